"""Tables for people: what was measured beside what is stored in bench/results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

__all__ = ["RESULTS", "Figure", "comparison", "read_baseline", "write_result"]

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a table. `bound` is what it must reach, in the same unit."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    larger_is_better: bool = False

    @property
    def reached(self) -> bool:
        """Whether the bound is kept; True where there is none."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.larger_is_better else self.value <= self.bound


def comparison(title: str, figures: Sequence[Figure], baseline: Mapping[str, float]) -> Table:
    """Each figure, its bound where it has one, and the stored one. `baseline` is by the figures' names."""
    table = Table(title=title, title_justify="left")
    bounds = any(figure.bound is not None for figure in figures)
    table.add_column("what")
    table.add_column("now", justify="right")
    if bounds:
        table.add_column("must be", justify="right")
    table.add_column("stored", justify="right")
    table.add_column("now / stored", justify="right")
    for figure in figures:
        stored = baseline.get(figure.name)
        style = "" if figure.reached else "[red]"
        row = [escape(figure.name), f"{style}{_number(figure.value)} {figure.unit}".rstrip()]
        if bounds:
            row.append(_bound(figure))
        row.append("" if stored is None else f"{_number(stored)} {figure.unit}".rstrip())
        row.append("" if not stored else f"{figure.value / stored:.2f}")
        table.add_row(*row)
    return table


def read_baseline(name: str, folder: Path = RESULTS) -> dict[str, object]:
    """The stored document `<name>.json`: `machine` and `results`; empty where there is none yet."""
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    assert isinstance(found, dict), f"{name}.json is not an object"
    return found


def write_result(name: str, document: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Stores a document as the new baseline, all of it or nothing; where it is."""
    path = folder / f"{name}.json"
    new = path.with_suffix(".json.new")  # whoever is stopped now leaves what was there
    new.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return new.replace(path)


def _bound(figure: Figure) -> str:
    if figure.bound is None:
        return ""
    sign = "≥" if figure.larger_is_better else "≤"
    return f"{sign} {_number(figure.bound)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
