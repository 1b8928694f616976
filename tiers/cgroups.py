"""Control groups that bound this process's memory: its own and all above it, each of which may have a limit."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["CGROUPS", "LIMITS", "PROC", "own_cgroups"]

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files that hold a group's limit, in version 2 and in version 1. "max", or a very large number: none."""


def own_cgroups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Folders of the groups, the root among them; some may not exist.

    In a container with a cgroup namespace the root is its own group; on a host a service is some levels below.
    """
    folders: list[Path] = []
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    for line in ["0::/", ":memory:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") and ".." not in path:  # "..": outside of what is mounted here
            root = cgroups / controllers
            own = root / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(folders))
