"""The fault points that the code has, read from the code: the crash tests try a new one without a list to amend.

A fault point is a call of something named `fault` or `_fault` with a constant name of two words, `seal.commit`. Which
process passes it follows from the file that it stands in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FaultPoints", "fault_points"]

_ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"[a-z_]+\.[a-z_]+")
_SKIPPED = ("kvstore/wire/v1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPoints:
    """Names of fault points, sorted, by who passes them."""

    store: tuple[str, ...]
    """Between two writes of the pure store, in the daemon."""
    recovery: tuple[str, ...]
    """Between two writes of `Store.recover`."""
    daemon: tuple[str, ...]
    """In the daemon's shell."""
    mover: tuple[str, ...]
    worker: tuple[str, ...]
    """In a client's process: client library, copier, adapter."""


def fault_points() -> FaultPoints:
    """Reads every module of ours."""
    found: dict[str, set[str]] = {name: set() for name in FaultPoints.__slots__}
    for folder in ("kvstore", "tiers", "eviction", "engine_adapter"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            place = path.relative_to(_ROOT).as_posix()
            if not place.startswith(_SKIPPED):
                found[_who(place)].update(_points(path))
    return FaultPoints(**{name: tuple(sorted(points)) for name, points in found.items()})


def _who(place: str) -> str:
    if place.startswith(("engine_adapter/", "kvstore/client/")):
        return "worker"
    if place.startswith("kvstore/daemon/"):
        return "daemon"
    if place.startswith(("kvstore/mover", "tiers/")):
        return "mover"
    return "recovery" if place == "kvstore/tables/recovering.py" else "store"


def _points(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if (
        "fault(" not in text
    ):  # few have one, and the rest takes a second to parse, at each collection of the tests
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[0]
        value = name.value if isinstance(name, ast.Constant) else None
        if called in ("fault", "_fault") and isinstance(value, str) and _NAME.fullmatch(value):
            yield value
