"""What goes into and comes out of the store as data: limits, answers, moves' outcomes and reports.

Records only: nothing here decides. All are frozen. Arrays in them are given away by the store and never changed by it
afterwards; whoever receives one may keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.cache_use import Access
from kvstore.layout import Tier

__all__ = [
    "U8",
    "U32",
    "U64",
    "ClearResult",
    "Explanation",
    "ExtentId",
    "ExtentInfo",
    "FlushLeft",
    "FlushMark",
    "Grant",
    "MissCause",
    "MoveKind",
    "MoveStatus",
    "NamespaceId",
    "NvmeChanges",
    "Outcome",
    "SealOutcome",
    "SessionId",
    "SessionInfo",
    "Slots",
    "StepAnswer",
    "StoreLimits",
    "StoreStats",
    "TierStats",
]

U8: TypeAlias = NDArray[np.uint8]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]

SessionId = NewType("SessionId", int)
"""Position in the session table, 0..47: also the session's bit in a slot's `holders` word."""
NamespaceId = NewType("NamespaceId", int)
"""Position in the namespace table."""
ExtentId = NewType("ExtentId", int)
"""Position in the extents table."""


class Outcome(IntEnum):
    """What became of one block of an acquire; the numbers of `Outcome` in the protocol."""

    MISS = 0
    HIT_HBM = 1
    HIT_DRAM = 2
    PROMOTING = 3
    PENDING = 4
    NO_SLOT = 5
    LATER = 6


class SealOutcome(IntEnum):
    """What became of one seal; the numbers of `SealOutcome` in the protocol."""

    PUBLISHED = 0
    DUPLICATE = 1
    STALE = 2


class MoveKind(IntEnum):
    """Direction of a move between DRAM and a path."""

    READ = 1  # nvme → dram
    WRITE = 2  # dram → nvme
    VERIFY = 3  # nothing moves: the checksum of what is in dram


class MoveStatus(IntEnum):
    """How a move ended."""

    OK = 0
    CORRUPT = 1  # READ: the bytes are not those that were written; the block is removed from this tier
    IO_ERROR = 2
    CANCELLED = 3
    NOT_SYNCED = 4  # WRITE: carried out, and the medium did not say that it has it


class MissCause(IntEnum):
    """Why a block is not cached; the name in lower case with spaces is the `cause` of an Explanation."""

    NEVER_STORED = 0
    BEING_FILLED = 1
    EVICTED = 2
    CORRUPT = 3
    CLEARED = 4
    DROPPED = 5  # its device was released


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """The bounds of a store. Counts unless the name says otherwise."""

    max_message_blocks: int = 8192
    """Most blocks that one acquire, prefetch, pin or explain may name."""
    max_held_slots: int = 1 << 20
    """Most slots, HBM and DRAM together, that one session may hold."""
    max_want_slots: int = 1024
    """Most fill slots ahead (credit) that a session is given."""
    max_want_room: int = 1024
    """Most DRAM slots ahead (room) that a session is given."""
    max_reserve: int = 8192
    """Most slots beyond the chain that one acquire may ask for."""
    max_waiting_leases: int = 4096
    """Most leases of one session that wait for something."""
    max_unseen_grants: int = 4096
    """Most grants that one session has not confirmed by `seen`; the oldest is then taken as seen."""
    max_writes: int = 65536
    """Most blocks queued for writing down, over all paths; beyond it they are dropped and counted."""
    max_reads: int = 65536
    """Most promotions queued, over all paths; beyond it a block on NVMe alone is a miss."""
    max_pins: int = 65536
    """Most blocks pinned."""
    ghosts: int = 65536
    """How many lost blocks are remembered, with the cause, for explain."""
    paths: int = 4
    """Number of NVMe paths (movers), at most 16."""
    victim_batch: int = 1024
    """Victims chosen at once."""
    reserve_fraction: float = 0.02
    """Part of a tier's slots of one class that the background evictor keeps free."""
    canary_every: int = 256
    """Of so many blocks served from DRAM one is checksummed again; 0: none."""
    reserve_slots: int = 8
    """Least number of slots that it keeps free, where the class has four times as many."""
    write_budget_bytes: int = 0
    """Most bytes that each NVMe path may write in 24 hours, flushes apart; 0: no bound."""
    prefetch_share: float = 0.5
    """Most of DRAM that blocks take which were read ahead and not asked for yet; 0: nothing is read ahead."""


_PROMOTING = np.uint8(Outcome.PROMOTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Answer to an acquire. The first five arrays have one element a block from `first` to the end of the chain."""

    outcomes: U8  # Outcome
    hbm_slots: U32  # NONE where nothing is given
    hbm_generations: U32
    dram_slots: U32
    dram_generations: U32
    reserve_slots: U32
    reserve_generations: U32

    @property
    def complete(self) -> bool:
        """Whether nothing of the chain is to be waited for."""
        return bool((self.outcomes < _PROMOTING).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Slots to fill, given ahead: HBM credit and DRAM room."""

    hbm_slots: U32
    hbm_generations: U32
    dram_slots: U32
    dram_generations: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """Answer to a step."""

    seal_outcomes: U8  # SealOutcome, one a seal


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeChanges:
    """What the durable index has to learn: each slot that changed since the last call, once, as it is now."""

    published: NDArray[np.void]  # NVME_ENTRY (kvstore/wire/packed.py): slots that hold a block
    freed: U32  # slots that hold none


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushMark:
    """The blocks that were in DRAM and not in storage when a flush began."""

    rows: U32
    words: U64  # their state words then

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushLeft:
    """Blocks of a flush that storage does not have. Those that left the store meanwhile are not counted."""

    coming: int  # still in DRAM: to be written
    missing: int  # all that storage lacks: also those that only HBM has by now, which nothing can write
    unfit: int = 0  # written for this flush and evicted again: storage is smaller than what was to be flushed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentInfo:
    """One extent, for reports and for the shell."""

    extent: ExtentId
    tier: Tier
    device: int  # HBM: device; NVMe: path; DRAM: 0
    draining: bool
    nbytes: int
    slot_bytes: int  # 0: not cut into slots now
    slot_base: int
    slots: int
    free_slots: int
    identity: int  # HBM: digest of the device that its blocks were written on


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearResult:
    """What a clear removed, in blocks."""

    removed: int
    kept: int  # held or being filled
    digests: tuple[
        bytes, ...
    ]  # of its namespace, the first half; empty where all were cleared, or there is no such


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt was a miss."""

    cached_blocks: int  # leading run
    cause: str  # empty: all are cached; else MissCause in words
    detail: str
    blocks_by_tier: Mapping[str, int]  # of the cached run, by the highest tier of each block


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """One session, for reports."""

    session: SessionId
    name: str
    state: str  # "attaching", "attached", "lost", "dying"
    device: int | None
    identity: int  # digest of that device; 0: not stated
    slot_bytes: int
    members: int
    held_hbm_slots: int
    held_dram_slots: int
    access: Access  # what it allows itself
    attached_ms: int  # time of the attach, as it was passed in


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier. Slots are counted over all extents and classes."""

    tier: Tier
    allocated_bytes: int
    slots: int
    free_slots: int
    filling_slots: int
    sealed_slots: int
    held_slots: int
    orphan_slots: int  # HBM: sealed slots that no live session maps
    quarantined_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The whole store: gauges, and counters that only grow."""

    tiers: tuple[TierStats, ...]
    sessions: tuple[SessionInfo, ...]
    counters: Mapping[str, int]
    rows: int
    max_rows: int
    queued_reads: int
    queued_writes: int
    moves_in_flight: int
