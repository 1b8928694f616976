"""What a figure was measured on: machine, versions and commit, kept beside every stored result."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["Machine", "describe", "document"]

_PACKAGES = (
    "cuda-bindings",
    "cupy-cuda13x",
    "flashinfer-python",
    "grpcio",
    "lmdb",
    "numpy",
    "protobuf",
    "torch",
    "triton",
    "uvloop",
    "xxhash",
)
_ROOT = Path(__file__).resolve().parent.parent
_ARCHIVED = Path(__file__).with_name("commit.txt")
_COMMIT_DIGITS = 12
_DEADLINE_S = 10


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
    gpu: str
    """Names of the GPUs and the driver's version; empty without any."""
    commit: str
    """Of this source, with "+" behind it where files differed from it, which is not known of an archive."""
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
        gpu=_gpu(),
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
    """Empty where this is neither a git checkout nor what `git archive` wrote of one."""
    head = _git("rev-parse", f"--short={_COMMIT_DIGITS}", "HEAD")
    if not head:
        return _archived_commit(_ARCHIVED)
    return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no") else head


def _archived_commit(file: Path) -> str:
    """What `git archive` wrote into `file`; empty where it wrote nothing."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if "$" in text else text[:_COMMIT_DIGITS]


def _git(*arguments: str) -> str:
    return _run("git", "-C", str(_ROOT), *arguments)


def _gpu() -> str:
    """For example "NVIDIA H200, 580.95.05"; a line a GPU becomes "2 x …" where they are alike."""
    lines = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    counts = Counter(line.strip() for line in lines)
    return "; ".join(f"{count} x {line}" if count > 1 else line for line, count in counts.items())


def _run(*command: str) -> str:
    """What a command prints; empty where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=_DEADLINE_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
