"""Whether this machine can hold what is configured: asked before anything is made, so that the answer is one line.

`kvstore serve` asks both. A daemon that starts from nothing asks again about its disks; of memory it takes what
there is and says what is lacking, for a limit may have become narrower since. That memory or a disk is only short just
now is found out, and said, where it is taken.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvstore.config import ServeConfig
from kvstore.errors import ConfigError
from kvstore.units import format_size
from tiers.cgroups import CGROUPS, LIMITS, PROC, own_cgroups

__all__ = ["check_disks", "check_memory", "memory_bytes"]


def check_memory(config: ServeConfig) -> None:
    """Raises ConfigError for a DRAM tier that is larger than all memory."""
    most = memory_bytes()
    if most is not None and config.dram_bytes > most:
        raise ConfigError(
            f"dram: {format_size(config.dram_bytes)} is more than the {format_size(most)} of memory that this machine "
            "or this process's cgroup has: give less"
        )


def check_disks(config: ServeConfig) -> None:
    """Raises ConfigError for a missing folder, and for paths that are together larger than the disk they are on."""
    wanted: dict[int, int] = {}  # bytes by device
    for path in config.nvme:
        place = Path(path.path)
        if not place.parent.is_dir():  # a mistyped path must not become a new folder somewhere
            raise ConfigError(
                f"nvme: the folder {place.parent} does not exist: create it, or give another path"
            )
        folder = place if place.is_dir() else place.parent
        try:
            disk, device = os.statvfs(folder), folder.stat().st_dev
        except OSError as error:
            raise ConfigError(f"nvme: cannot use {folder}: {error.strerror}") from None
        size = disk.f_blocks * disk.f_frsize
        wanted[device] = wanted.get(device, 0) + path.capacity_bytes
        if wanted[device] > size:
            raise ConfigError(
                f"nvme: {format_size(wanted[device])} is configured on the disk of {place}, which has "
                f"{format_size(size)} in all: give less"
            )


def memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Memory of the machine, or of the narrowest cgroup above this process where that is less; None where unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (proc / "meminfo").read_text(encoding="ascii")
        found.append(int(text.split("MemTotal:")[1].split()[0]) * 1024)
    for folder in own_cgroups(proc, cgroups):
        for name in LIMITS:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                found.append(int((folder / name).read_text(encoding="ascii")))
    return min(found, default=None)
