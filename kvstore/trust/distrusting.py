"""Taking back blocks whose bytes are not to be believed, also those that somebody holds.

A copy that nobody holds is dropped. One that is held cannot be: its bytes may be on their way to a GPU. It becomes a
private slot of its holders, which is found no more, is published no more, and is free when the last of them lets go.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import MOVER_BIT, NONE, SlotState, Tier
from kvstore.moves import U32, MissCause
from kvstore.recorder import Event
from kvstore.state import StoreState

__all__ = ["busy_rows", "distrust"]

_MOVERS = np.uint64(0xFFFF << MOVER_BIT)


def busy_rows(state: StoreState, rows: U32) -> NDArray[np.bool_]:
    """[n] rows whose DRAM slot a mover reads or writes: what it does has to end first."""
    dram = state.columns.dram[rows]
    there = dram != NONE
    moved: NDArray[np.bool_] = there & ((state.dram.holders[np.where(there, dram, 0)] & _MOVERS) != 0)
    return moved


def distrust(state: StoreState, rows: U32, tiers: tuple[Tier, ...]) -> None:
    """No copy of these SEALED rows in these tiers is given out any more. No row is busy; none stands twice."""
    for device in range(state.columns.shape.devices):
        loading = state.columns.hbm[device, rows]
        loading = loading[state.hbm.filling(loading)]
        if len(loading):
            state.unlink_fills(loading)
    for tier in tiers:
        for device in range(state.columns.shape.devices if tier is Tier.HBM else 1):
            slots = state.table.column(tier, device)[rows]
            slots = slots[state.pool(tier).sealed(slots)]
            if len(slots):
                _distrust_copies(state, tier, device, slots)


def _distrust_copies(state: StoreState, tier: Tier, device: int, slots: U32) -> None:
    pool = state.pool(tier)
    held = pool.holders[slots] != 0 if len(pool.holders) else np.zeros(len(slots), dtype=np.bool_)
    block = state.columns.hash[pool.row[slots[0]]].tobytes()
    state.recorder.note(Event.CONDEMN, tier, len(slots), block=block)
    if (~held).any():
        state.drop_copies(tier, slots[~held], MissCause.CORRUPT)
    if held.any():
        _make_private(state, tier, device, slots[held])


def _make_private(state: StoreState, tier: Tier, device: int, slots: U32) -> None:
    pool = state.pool(tier)
    rows = pool.row[slots]
    pool.set_state(slots, SlotState.FILLING)
    state.fault("distrust.filling")
    state.table.column(tier, device)[rows] = NONE
    state.fault("distrust.unlinked")
    pool.row[slots] = NONE
    last = rows[~state.table.has_copy(rows)]
    if len(last):
        state.ghosts.note(state.columns.hash[last], MissCause.CORRUPT)
        state.table.free(last)
    state.waits.resolved(rows)
