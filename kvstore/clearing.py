"""Taking blocks away for a reason other than room: cleared by an administrator, or their memory is gone."""

from __future__ import annotations

import numpy as np

from kvstore.errors import FailedPrecondition
from kvstore.layout import NONE, ExtentState, SessionState, SlotState, State, Tier, states
from kvstore.moves import U32, ClearResult, MissCause
from kvstore.state import StoreState

__all__ = ["clear", "drop_extent"]


def clear(state: StoreState, namespace: int | None) -> ClearResult:
    """Removes every block of a namespace (None: of all) that nobody holds, from every tier. O(rows)."""
    columns = state.columns
    now = states(columns.state)
    wanted = now != State.FREE
    if namespace is not None:
        wanted &= columns.namespace == namespace
    rows = np.flatnonzero(wanted).astype(np.uint32)
    busy = now[rows] == State.FILLING
    for device in range(columns.shape.devices):
        busy |= _held(state, Tier.HBM, columns.hbm[device, rows])
    busy |= _held(state, Tier.DRAM, columns.dram[rows])
    gone = rows[~busy]
    for tier in Tier:
        for device in range(columns.shape.devices if tier is Tier.HBM else 1):
            slots = state.table.column(tier, device)[gone]
            slots = slots[slots != NONE]
            if len(slots):
                state.drop_copies(tier, slots, MissCause.CLEARED)
    state.counters["cleared"] += len(gone)
    return ClearResult(removed=len(gone), kept=int(busy.sum()))


def _held(state: StoreState, tier: Tier, slots: U32) -> np.typing.NDArray[np.bool_]:
    there = slots != NONE
    held: np.typing.NDArray[np.bool_] = there & (state.pool(tier).holders[np.where(there, slots, 0)] != 0)
    return held


def drop_extent(state: StoreState, extent: int) -> None:
    """The memory of an extent is gone, and whatever was in it; slots that somebody held are nobody's.

    Raises: NotFound; FailedPrecondition while an attached session holds a slot of it.
    """
    tier = state.extents.require(extent)
    pool = state.pool(tier)
    base, size = state.extents.range(extent)
    slots = np.arange(base, base + size, dtype=np.uint32)
    if len(pool.holders):
        attached = sum(
            1 << s.id for s in state.sessions if state.sessions.state(s.id) is SessionState.ATTACHED
        )
        if (pool.holders[slots] & np.uint64(attached)).any():
            raise FailedPrecondition(f"an attached session holds slots of extent {extent}")
    pool.close_extent(extent)
    if state.extents.state(extent) is ExtentState.READY:
        state.extents.drain(extent)
    filling = slots[pool.filling(slots)]
    if tier is Tier.HBM:
        state.unlink_fills(filling)
    elif tier is Tier.DRAM:
        state.unlink_promotions(filling)
    pool.free(filling)
    sealed = slots[pool.sealed(slots)]
    if len(sealed):
        state.drop_copies(tier, sealed, MissCause.DROPPED)
    quarantined = slots[pool.states(slots) == SlotState.QUARANTINED]
    pool.free(quarantined)
    state.extents.remove(extent)
