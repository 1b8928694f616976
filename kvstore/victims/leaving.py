"""Tiers that become smaller while they are in use: which extents leave, and what has to happen before they can.

An extent that leaves gives out no slots; its blocks are evicted a few at a time, and what is held, on its way or
pinned is waited for. Which extents those are is not kept: a restarted daemon chooses anew.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import ExtentState, SlotState, Tier
from kvstore.moves import U32, ExtentId, MissCause
from kvstore.state import StoreState
from kvstore.tables.extents import TRAILER_BYTES
from kvstore.tables.table import PINNED
from kvstore.victims.evicting import Evictor

__all__ = ["Leaving", "slots_for"]

_BLOCKS_A_TURN = 2048


class Leaving:
    """The extents that leave. All O(slots of an extent), but for `choose`."""

    __slots__ = ("_evictor", "_state")

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor

    def of(self, tier: Tier, device: int) -> list[ExtentId]:
        """Those of a tier that are still there."""
        extents = self._state.extents.of(tier, device)
        return [ExtentId(extent) for extent in extents if extent in self._evictor.leaving]

    def choose(self, tier: Tier, device: int, excess_bytes: int, cost: Callable[[int], int]) -> None:
        """Has extents leave that together cost `excess_bytes` or more: unused ones, then those used longest ago.

        `cost` says what an extent of so many bytes takes of what has to be given back. O(slots of the tier).
        """
        state = self._state
        able = (ExtentState.UNASSIGNED, ExtentState.READY, ExtentState.DRAINING)
        extents = [e for e in state.extents.of(tier, device) if state.extents.state(e) in able]
        staying = [extent for extent in extents if extent not in self._evictor.leaving]
        for extent in sorted(staying, key=lambda extent: (*self._worth(tier, extent), extent)):
            if excess_bytes <= 0:
                return
            excess_bytes -= cost(int(state.columns.extent_bytes[extent]))
            self._evictor.leave(tier, extent)

    def _worth(self, tier: Tier, extent: int) -> tuple[int, int]:
        """(slots that cannot be evicted now, median of the last uses): what is least goes first."""
        state, pool = self._state, self._state.pool(tier)
        base, size = state.extents.range(extent)
        slots = np.arange(base, base + size, dtype=np.uint32)
        used = slots[pool.sealed(slots)]
        if not len(used):
            return (size - int(np.count_nonzero(pool.states(slots) == SlotState.FREE)), 0)
        stuck = int(np.count_nonzero(~self._evictor.evictable(pool, used)))
        return (stuck, int(np.median(state.columns.touch[pool.row[used]])))

    def empty(self, tier: Tier, extent: int) -> str:
        """Takes some blocks out of an extent that leaves; why it cannot be dropped yet, empty when it can.

        A pinned block that has no other copy stays, and its extent with it. O(slots of the extent).
        """
        state, pool = self._state, self._state.pool(tier)
        base, size = state.extents.range(extent)
        slots = np.arange(base, base + size, dtype=np.uint32)
        victims = slots[self._evictor.evictable(pool, slots)][:_BLOCKS_A_TURN]
        if len(victims):
            self._evictor.evict(tier, victims)
        if len(pool.holders) and (held := int(np.count_nonzero(pool.holders[base : base + size]))):
            return f"{held} blocks are in use, or given to engines to fill"
        now = pool.states(slots)
        if moving := int(np.count_nonzero(now == SlotState.FILLING)):
            return f"{moving} blocks are being written"
        left = slots[now == SlotState.SEALED]
        pinned = left[state.columns.priority[pool.row[left]] == PINNED]
        elsewhere = pinned[self._elsewhere(tier, pinned)]
        if len(elsewhere):
            state.drop_copies(tier, elsewhere, MissCause.EVICTED)
        if only := len(pinned) - len(elsewhere):
            return f"{only} pinned blocks are there alone: unpin them"
        return f"{len(left)} blocks are left" if len(left) > len(pinned) else ""

    def _elsewhere(self, tier: Tier, slots: U32) -> NDArray[np.bool_]:
        """[n] whether another of the tiers that outlive a worker has the block too, complete, and nobody reads it."""
        state = self._state
        rows = state.pool(tier).row[slots]
        if tier is Tier.NVME:
            return state.dram.sealed(state.columns.dram[rows])
        return state.nvme.sealed(state.columns.nvme[rows])


def slots_for(state: StoreState, tier: Tier, nbytes: int, smallest_bytes: int) -> tuple[int, int]:
    """(slot ids that the tables have left for a tier, ids that `nbytes` more memory need).

    Counted in the smallest class that the tier has, or slots of `smallest_bytes` where it has none yet.
    """
    columns = state.columns
    extents = state.extents.of(tier)
    sizes = [int(columns.extent_slot_bytes[extent]) for extent in extents if columns.extent_slots[extent]]
    trailer = TRAILER_BYTES if tier is Tier.NVME else 0
    stride = min(sizes, default=smallest_bytes) + trailer
    uncut = sum(int(columns.extent_bytes[e]) for e in extents if not columns.extent_slots[e])
    left = len(columns.pool(tier).state) - sum(int(columns.extent_slots[extent]) for extent in extents)
    return left - uncut // stride, nbytes // stride
