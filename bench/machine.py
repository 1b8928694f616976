"""What a figure was measured on: machine, versions and commit, kept beside every stored result."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["Machine", "describe", "document"]

_PACKAGES = ("grpcio", "lmdb", "numpy", "protobuf", "torch", "uvloop", "xxhash")
_ROOT = Path(__file__).resolve().parent.parent
_GIT_DEADLINE_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine and the software on it. Sizes in bytes; an empty string where something is not known."""

    cpu: str
    cores: int
    """Those that this process may use."""
    memory_bytes: int
    kernel: str
    python: str
    packages: dict[str, str]
    commit: str
    """Of this source, with "+" behind it where files differed from it."""
    taken: str
    """When, ISO 8601, UTC."""


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release().partition("-")[0],
        python=platform.python_version(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        commit=_commit(),
        taken=datetime.now(tz=UTC).isoformat(timespec="seconds"),
    )


def document(results: object) -> dict[str, object]:
    """What is stored in bench/results: the machine and what was measured on it."""
    return {"machine": asdict(describe()), "results": results}


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Empty where this is no git checkout, or git is not there."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            check=True,
            text=True,
            timeout=_GIT_DEADLINE_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
