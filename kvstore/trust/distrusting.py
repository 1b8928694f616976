"""Taking back blocks whose bytes are not to be believed, also those that somebody holds.

A copy that nobody holds is dropped. One that is held cannot be: its bytes may be on their way to a GPU, or have been
computed with. It becomes DISTRUSTED: found no more, published no more, free when the last holder lets go. Until then
nothing that a holder computes is published, since it may have been computed from those bytes: an engine keeps the slots
of a request for as long as it computes it, so what was computed from a wrong block is sealed before that block is let
go of. The mark is in the slot, so a restart forgets none of this. What was published before goes as well: everything
below the block in its chains (`kvstore.trust.lineage`), in every tier.

A copy in HBM that no row names, because another was there first, is known by what it was loaded from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import MOVER_BIT, NONE, SlotState, Tier
from kvstore.moves import U32, U64, MissCause
from kvstore.recorder import Event
from kvstore.state import StoreState

__all__ = ["busy_rows", "distrust", "distrust_fills"]

_MOVERS = np.uint64(0xFFFF << MOVER_BIT)


def busy_rows(state: StoreState, rows: U32) -> NDArray[np.bool_]:
    """[n] rows whose DRAM slot a mover reads or writes: what it does has to end first."""
    dram = state.columns.dram[rows]
    there = dram != NONE
    moved: NDArray[np.bool_] = there & ((state.dram.holders[np.where(there, dram, 0)] & _MOVERS) != 0)
    return moved


def distrust(state: StoreState, rows: U32, words: U64, tiers: tuple[Tier, ...]) -> None:
    """No copy of these rows in these tiers is given out any more. No row is busy; none stands twice.

    `words` [n]: their state words while the copies were given out.
    """
    private = state.copied.copies_of(rows, words)
    distrust_fills(state, private[state.hbm.filling(private)])
    for device in range(state.columns.shape.devices):
        loading = state.columns.hbm[device, rows]
        distrust_fills(state, loading[state.hbm.filling(loading)])
    for tier in tiers:
        for device in range(state.columns.shape.devices if tier is Tier.HBM else 1):
            slots = state.table.column(tier, device)[rows]
            slots = slots[state.pool(tier).sealed(slots)]
            if len(slots):
                _distrust_copies(state, tier, device, slots)


def distrust_fills(state: StoreState, slots: U32) -> None:
    """FILLING HBM slots hold wrong bytes, or soon will: a copy out of a wrong block."""
    if not len(slots):
        return
    state.unlink_fills(slots)
    _mark(state, Tier.HBM, slots)


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
    _mark(state, tier, slots)
    state.table.column(tier, device)[rows] = NONE
    state.fault("distrust.unlinked")
    pool.row[slots] = NONE
    last = rows[~state.table.has_copy(rows)]
    if len(last):
        state.ghosts.note(state.columns.hash[last], MissCause.CORRUPT)
        state.table.free(last)
    state.waits.resolved(rows)


def _mark(state: StoreState, tier: Tier, slots: U32) -> None:
    state.pool(tier).set_state(slots, SlotState.DISTRUSTED)
    state.fault("distrust.marked")
    state.columns.distrusts[0] += np.uint64(1)
    state.count_spoiled()
