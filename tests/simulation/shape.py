"""Sizes and odds of a simulated machine, who dies in it, and what its store must never do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstore.config import Durability
from tiers.nvme.capacity import SMALL_FILES_BYTES, index_bytes, slab_file_bytes
from tiers.nvme.slab import stride_bytes

__all__ = ["SLOT_BYTES", "START_MS", "Crash", "Death", "Shape", "Wrong"]

SLOT_BYTES = 4096
START_MS = 1_700_000_000_000
_FOLDER = "/sim/nvme"
_INDEX_SHARE_BYTES = 60 << 20
"""Of a path's capacity: a path that is configured has 64 MiB at least, and slabs are to be few and small here."""


class Death(Enum):
    """Who dies."""

    MOVER = "mover"
    DAEMON = "daemon"
    EVERYTHING = "everything"
    POWER = "power"


class Crash(BaseException):
    """Somebody died here. Not an Exception: what dies handles nothing."""


class Wrong(AssertionError):
    """The store did what it must never do."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and odds of a machine."""

    durability: Durability = Durability.POWER
    dram_extents: int = 3
    dram_slots: int = 16
    """Of each extent."""
    paths: int = 1
    """Disks' folders, each with a mover, slabs and an index of its own."""
    hbm_slots: int = 24
    """Of each device, whose memory outlives the daemon, not the machine; 0: no engine has HBM of its own."""
    devices: int = 1
    """That engines which compare are spread over, the others have the first: two of them load one block at once."""
    slabs: int = 3
    """Of each path."""
    slab_slots: int = 16
    read_error: float = 0.0
    write_error: float = 0.0
    short: float = 0.0
    sync_error: float = 0.0
    no_space: float = 0.0
    hang: float = 0.0
    """Odds, at each piece of I/O, that the disk answers nothing for up to 20 s."""
    index_share_bytes: int = _INDEX_SHARE_BYTES
    flips: float = 0.0
    """Odds, at each step, that a bit on the medium flips."""
    comparing: float = 0.0
    """Odds that an engine has HBM and compares what it loads: while all do, movers look at nothing that they read."""

    @property
    def folders(self) -> list[str]:
        """Of the paths."""
        return [f"{_FOLDER}{number}" for number in range(self.paths)]

    @property
    def slab_bytes(self) -> int:
        return self.slab_slots * stride_bytes(SLOT_BYTES)

    @property
    def map_bytes(self) -> int:
        return 1 << 20

    def room_of(self, slabs: int) -> int:
        """What so many slabs may take."""
        return slabs * slab_file_bytes(self.slab_bytes)

    def capacity_of(self, slabs: int) -> int:
        """Size of a path with so many slabs."""
        return self.room_of(slabs) + index_bytes(self.index_share_bytes) + SMALL_FILES_BYTES

    def bound_of(self, slabs: int) -> int:
        """The most that a folder with so many slabs takes, with the index that it has here."""
        return self.room_of(slabs) + index_bytes(self.map_bytes) + SMALL_FILES_BYTES

    def slabs_of(self, capacity_bytes: int) -> int:
        """Slabs of a path of that size."""
        return (capacity_bytes - self.capacity_of(0)) // self.room_of(1)
