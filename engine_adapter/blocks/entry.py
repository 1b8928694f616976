"""What the block manager knows of one request, from its `enqueue` to its `release`. One engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Admission
from engine_adapter.loading.load import Load
from kvstore.client import PendingGrant
from kvstore.identity import HashChain

__all__ = ["MAX_UNUSED_S", "NO_PAGES", "NO_SLOTS", "Entry", "Phase"]

NO_SLOTS: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
NO_PAGES: NDArray[np.int32] = np.empty(0, dtype=np.int32)


MAX_UNUSED_S = 0.5
"""An engine that has not asked for a request for so long wants others first, or none. So long pages may also wait for
room in DRAM while a request lacks pages."""


class Phase(IntEnum):
    """How far a request is: see `engine_adapter.blocks.manager`."""

    QUEUED = 0
    ASKED = 1
    LOADING = 2
    ADMITTED = 3


@dataclass(slots=True)
class Entry:
    """One request."""

    lease: int
    chain: HashChain
    cap_blocks: int  # most blocks that may be hits: one token is always computed
    found: NDArray[np.uint8]  # tiers of the leading run when it was enqueued
    due_at: float = 0.0  # when it was expected to run as it was enqueued
    patience_until: float = 0.0  # then it computes what others are computing; 0: has not asked yet
    phase: Phase = Phase.QUEUED
    asked_at: float = 0.0  # when the engine last wanted to admit it
    turn_at: float = 0.0  # when it first asked the store, which serves in that order; 0: it has no turn
    retry_at: float = 0.0
    changed: bool = False  # the store said so since it asked
    seen_blocks: int = 0  # of its chain, in memory when its patience was last renewed
    lacks_room: bool = False  # its last answer: others have the slots that it needs, in HBM or in DRAM
    private: bool = False  # it has asked for slots of its own for blocks that others are computing
    grant: PendingGrant | None = None
    load: Load | None = None  # that its admission waits for, or its first step
    admission: Admission | None = None
    slots: NDArray[np.uint32] = field(default_factory=lambda: NO_SLOTS)  # block table, as slots
    pages: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)  # and as pages of this process
    sealed_blocks: int = 0  # blocks that are hits, or whose seal was staged
    named_blocks: int = 0  # of its chain, in its last question
    wait_s: float = 0.0  # for what that has found on its way
    overtaken: list[range] = field(default_factory=list)  # blocks that were loaded behind computed ones
    lost: bool = False  # a slot of it is no longer ours, or is wrong: it has to be computed again

    @property
    def may_go_on(self) -> bool:
        """Whether what it waits for is here, and it has not been asked for since."""
        if self.phase is Phase.ASKED:
            return self.grant is not None and self.grant.done()
        return self.phase is Phase.LOADING and (self.load is None or self.load.loaded or self.load.failed)

    @property
    def gives_back(self) -> bool:
        """Whether what it has got can be taken back at once: it waits for nothing, or for a load that has not begun."""
        if self.phase is Phase.LOADING and self.load is not None and not self.load.begun:
            return True
        return self.may_go_on

    def computes(self, asked_since: float) -> bool:
        """Whether it computes what is not cached of it, or is about to: it has the slots, and the engine wants it.

        One that was not asked for since then may stand in the engine's queue behind who waits for it to compute.
        """
        if self.phase is Phase.ADMITTED:
            return True
        has_slots = self.phase is Phase.LOADING or (self.phase is Phase.ASKED and self.private)
        return has_slots and self.asked_at >= asked_since
