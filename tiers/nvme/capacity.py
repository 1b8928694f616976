"""What a path takes on its disk: how a capacity is divided, and what is there in truth.

The capacity is a bound on everything in the directory, by a file's length and by the room that the file system gives
it, whichever is more: slabs, the pages in which a file system notes where a slab lies, the index at its largest, and
the small files. `plan` divides it once so that the bound holds whatever happens; `disk_usage` counts what is there, and
`require_room` asks it before each new slab, so that a file that could not be deleted costs a slab and not the bound.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError, KvstoreError, ResourceExhausted
from kvstore.units import MIB, format_size
from tiers.base import PAGE_BYTES
from tiers.nvme.disk import SYSTEM_DISK, Disk

__all__ = [
    "SMALL_FILES_BYTES",
    "DiskUsage",
    "SlabPlan",
    "check_room",
    "crowded_bytes",
    "default_map_bytes",
    "disk_usage",
    "index_bytes",
    "is_own",
    "plan",
    "require_room",
    "slab_file_bytes",
    "slab_room",
]

SMALL_FILES_BYTES = 4 * MIB
"""For everything that is neither a slab nor the index: lock, secret, threads, size, budget, the folders themselves,
`namespaces` (at most 1 MiB) and `cleared` (0.8 MiB), and for each of them a second copy until it is renamed."""
_MIN_MAP_BYTES = 8 * MIB
_LOCK_FILE_BYTES = 2 * PAGE_BYTES  # LMDB's lock.mdb with 8 readers
_SLAB = "slab-"
_OWN = {"lock", "secret", "cleared", "namespaces", "threads", "size", "budget", "index", "lost+found", "."}
_SECTOR_BYTES = 512  # unit of st_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPlan:
    """How a path's capacity is divided; all of it together, with the small files, is at most the capacity."""

    slabs: int
    slab_bytes: int
    map_bytes: int

    @property
    def slabs_bytes(self) -> int:
        """The most that all slabs take."""
        return self.slabs * slab_file_bytes(self.slab_bytes)

    @property
    def total_bytes(self) -> int:
        """The most that a directory divided like this takes."""
        return self.slabs_bytes + index_bytes(self.map_bytes) + SMALL_FILES_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Bytes of a directory with everything in it."""

    slab_bytes: int
    index_bytes: int
    other_bytes: int
    foreign: tuple[tuple[str, int], ...] = ()
    """(name, bytes) of what in it is not the service's, the largest first; counted in `other_bytes` too."""

    @property
    def total_bytes(self) -> int:
        """All of it: never more than the capacity."""
        return self.slab_bytes + self.index_bytes + self.other_bytes


def is_own(name: str) -> bool:
    """Whether something in a path's directory, or below it, is the service's. `name` is relative to the directory."""
    top = name.partition("/")[0]
    return top.startswith(_SLAB) or top.removesuffix(".new") in _OWN


def crowded_bytes(foreign: Sequence[tuple[str, int]], capacity_bytes: int, planned_bytes: int) -> int:
    """What slabs lack because somebody else's files count as well. `planned_bytes`: SlabPlan.total_bytes."""
    return max(0, sum(nbytes for _, nbytes in foreign) - max(0, capacity_bytes - planned_bytes))


def slab_file_bytes(nbytes: int) -> int:
    """The most that a slab of `nbytes` takes on the disk.

    A file system marks what was written of a preallocated file range by range: in the worst case, slots of one page
    written here and there, 128 ranges a MiB, of which a half-full page of ext4 or XFS notes 170.
    """
    return nbytes + PAGE_BYTES * (1 + -(-nbytes // MIB))


def index_bytes(map_bytes: int) -> int:
    """The most that an index with a map of `map_bytes` takes on the disk."""
    return slab_file_bytes(map_bytes) + _LOCK_FILE_BYTES


def default_map_bytes(capacity_bytes: int) -> int:
    """Size of the index's map: 1 % of the capacity. A group of 128 slots takes 12 KiB, twice that while it changes."""
    return max(_MIN_MAP_BYTES, capacity_bytes // 100 // PAGE_BYTES * PAGE_BYTES)


def plan(capacity_bytes: int, extent_bytes: int, map_bytes: int) -> SlabPlan:
    """Slabs that fit beside the index. `extent_bytes` is a slab's wished size; a small capacity gets one smaller slab.

    Raises ConfigError where not even that fits.
    """
    left = slab_room(capacity_bytes, map_bytes)
    slab_bytes = min(extent_bytes, _largest_slab(left))
    if slab_bytes < MIB:
        raise ConfigError(
            f"nvme: {format_size(capacity_bytes)} is too little: the index takes {format_size(map_bytes)} of it; "
            f"give at least {format_size(map_bytes + extent_bytes)}"
        )
    return SlabPlan(slabs=left // slab_file_bytes(slab_bytes), slab_bytes=slab_bytes, map_bytes=map_bytes)


def slab_room(capacity_bytes: int, map_bytes: int) -> int:
    """What slabs may take of a capacity beside an index with this map. Negative: not even the index fits."""
    return capacity_bytes - index_bytes(map_bytes) - SMALL_FILES_BYTES


def _largest_slab(left: int) -> int:
    """The largest slab, in whole pages, that takes at most `left` bytes."""
    nbytes = max(0, left) * MIB // (MIB + PAGE_BYTES) - 2 * PAGE_BYTES
    return max(0, nbytes // PAGE_BYTES * PAGE_BYTES)


def disk_usage(directory: Path) -> DiskUsage:
    """What is there now. Files that go meanwhile count as gone. Raises OSError. O(files)."""
    slabs = index = other = 0
    foreign: dict[str, int] = {}
    for folder, names, files in os.walk(directory):
        top = os.path.relpath(folder, directory).partition("/")[0]
        here = _size_of(Path(folder))
        other += here
        if not is_own(top):
            foreign[top] = foreign.get(top, 0) + here
        names.sort()
        for name in files:
            nbytes = _size_of(Path(folder, name))
            first = name if top == "." else top
            if not is_own(first):
                foreign[first] = foreign.get(first, 0) + nbytes
            if Path(folder).name == "index":
                index += nbytes
            elif name.startswith(_SLAB):
                slabs += nbytes
            else:
                other += nbytes
    return DiskUsage(
        slab_bytes=slabs,
        index_bytes=index,
        other_bytes=other,
        foreign=tuple(sorted(foreign.items(), key=lambda item: (-item[1], item[0]))),
    )


def _size_of(path: Path) -> int:
    """The larger of what a file says it is and what the file system gives it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return max(status.st_size, status.st_blocks * _SECTOR_BYTES)


def require_room(directory: Path, limit_bytes: int, nbytes: int, disk: Disk = SYSTEM_DISK) -> None:
    """Raises ResourceExhausted where one more slab of `nbytes` could bring all slabs above `limit_bytes`; KvstoreError.

    `limit_bytes` is `slab_room`: what is left of the capacity beside the index and the small files at their largest.
    """
    try:
        taken = sum(slab_file_bytes(size) for name, size in disk.files(directory) if name.startswith(_SLAB))
    except OSError as error:
        raise KvstoreError(f"nvme: cannot look into {directory}: {error.strerror}") from error
    if taken + slab_file_bytes(nbytes) > limit_bytes:
        raise ResourceExhausted(
            f"nvme: no room for a slab of {format_size(nbytes)} in {directory}: slabs take {format_size(taken)} of "
            f"{format_size(limit_bytes)}; one of them could not be deleted, or the files of others take their room"
        )


def check_room(path: Path, wanted: SlabPlan) -> None:
    """Raises ConfigError where the disk cannot hold `wanted`, counting what its slabs and index take already."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    taken = disk_usage(path).total_bytes
    if wanted.total_bytes - taken > free:
        raise ConfigError(
            f"nvme: {path} has {format_size(free + taken)} of room, {format_size(wanted.total_bytes)} is configured: "
            "give less, or free space on that disk"
        )
