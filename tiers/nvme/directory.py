"""The directory of one NVMe path: ownership, lock, and how its capacity is divided.

    lock              flock held by the daemon and, inherited, by its mover: free only when both are gone
    secret            the tenant's, written by the daemon; a file of its own: without it no block can be found again
    threads           I/O threads that suit the disk (tiers.nvme.probe)
    slab-<n>-<s>.kv   slabs (tiers.nvme.slab)
    index/            LMDB (tiers.nvme.index)

Directory 0700, files 0600: blocks are plaintext prompts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import AlreadyExists, ConfigError
from kvstore.units import MIB, format_size
from tiers.base import PAGE_BYTES
from tiers.nvme.slab import SlabFile, list_slabs

__all__ = ["NvmeDirectory", "SlabPlan", "check_room", "default_map_bytes", "plan"]

_LOCK = "lock"
_MIN_MAP_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPlan:
    """How a path's capacity is divided; all of it together is at most the capacity."""

    slabs: int
    slab_bytes: int
    map_bytes: int


def default_map_bytes(capacity_bytes: int) -> int:
    """Size of the index's map: 1 % of the capacity. A group of 128 slots takes 12 KiB, twice that while it changes."""
    return max(_MIN_MAP_BYTES, capacity_bytes // 100 // PAGE_BYTES * PAGE_BYTES)


def plan(capacity_bytes: int, extent_bytes: int, map_bytes: int) -> SlabPlan:
    """Slabs that fit beside the index. `extent_bytes` is a slab's wished size; a small capacity gets one smaller slab.

    Raises ConfigError where not even that fits.
    """
    left = capacity_bytes - map_bytes
    slab_bytes = min(extent_bytes, left) // PAGE_BYTES * PAGE_BYTES
    if slab_bytes < MIB:
        raise ConfigError(
            f"nvme: {format_size(capacity_bytes)} is too little: the index takes {format_size(map_bytes)} of it; "
            f"give at least {format_size(map_bytes + extent_bytes)}"
        )
    return SlabPlan(slabs=left // slab_bytes, slab_bytes=slab_bytes, map_bytes=map_bytes)


def check_room(path: Path, wanted: SlabPlan, existing: Sequence[SlabFile]) -> None:
    """Raises ConfigError where the disk cannot hold `wanted`, counting what its slabs and index take already."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    index = path / "index" / "data.mdb"
    taken = sum(file.nbytes for file in existing)
    with contextlib.suppress(FileNotFoundError):
        taken += index.stat().st_blocks * 512
    needed = wanted.slabs * wanted.slab_bytes + wanted.map_bytes
    if needed - taken > free:
        raise ConfigError(
            f"nvme: {path} has {format_size(free + taken)} of room, {format_size(needed)} is configured: "
            "give less, or free space on that disk"
        )


class NvmeDirectory:
    """An open, locked directory. One owner thread."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        numbers = [file.number for file in list_slabs(path)]
        self._next_slab = max(numbers, default=0) + 1

    @classmethod
    def open(cls, path: str | Path) -> NvmeDirectory:
        """Makes the directory where it does not exist, and locks it.

        Raises ConfigError where it cannot be ours, AlreadyExists while another daemon or its mover has it.
        """
        directory = Path(path)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _claim(directory)
            return cls(directory, _lock(directory))
        except OSError as error:
            raise ConfigError(f"nvme: cannot use {directory}: {error.strerror}") from error

    @property
    def lock_fd(self) -> int:
        """The lock's descriptor, for a mover to inherit: the lock lasts as long as anybody has it open."""
        return self._lock_fd

    def slabs(self) -> list[SlabFile]:
        """The slabs that exist, by number."""
        return list_slabs(self.path)

    def new_slab_number(self) -> int:
        """A number that no slab of this directory has."""
        number = self._next_slab
        self._next_slab += 1
        return number

    def close(self) -> None:
        """Lets go of the lock (a mover may still have it)."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _claim(directory: Path) -> None:
    """Makes the directory private; refuses one that has somebody's files or another owner."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"nvme: {directory} belongs to another user (uid {status.st_uid})")
    if not (directory / _LOCK).exists() and set(os.listdir(directory)) - {"lost+found"}:
        raise ConfigError(
            f"nvme: {directory} holds other files; give a directory of its own, for example {directory}/kvstore"
        )
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def _lock(directory: Path) -> int:
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyExists(
            f"nvme: {directory} is in use by another kvstore daemon or its mover (pid {owner})",
            retry_after_s=0.1,
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd
