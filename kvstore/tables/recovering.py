"""After the daemon's death: makes the tables consistent, whatever write was the last.

Works on the columns alone, before anything is derived from them, and may itself be killed and run again. A slot is
believed only where slot and row name each other and both are SEALED; all else that nobody holds becomes free, and what
somebody holds stays held, as a private slot to fill. So a block that was about to be published can be lost, and one
that was not complete can never be a hit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import (
    MOVER_BIT,
    NONE,
    Columns,
    ExtentState,
    SessionState,
    SlotState,
    State,
    Tier,
    states,
)
from kvstore.tables.index import Index
from kvstore.tables.table import PINNED

__all__ = ["reconcile"]

_STATE_BITS = np.uint64(0xFF)
_ONE_GENERATION = np.uint64(1 << 8)
_CHUNK = 1 << 16


def reconcile(columns: Columns, fault: Callable[[str], None]) -> None:
    """Brings the tables into a state that `check_integrity` finds sound; sessions become LOST. O(rows + slots)."""
    known = _sessions(columns)
    fault("recover.sessions")
    _distrusted(columns)
    fault("recover.distrusted")
    inside = [_slots_of_extents(columns, tier) for tier in Tier]
    _pointers(columns, inside)
    fault("recover.pointers")
    _rows(columns)
    fault("recover.rows")
    _index(columns)
    fault("recover.index")
    for tier in Tier:
        _slots(columns, tier, inside[tier], known)
        fault("recover.slots")


def _sessions(columns: Columns) -> np.uint64:
    """Every session that was there is LOST until it resumes; returns the bits that may be in a `holders` word."""
    there = columns.session_state != SessionState.FREE
    columns.session_state[there] = SessionState.LOST
    bits = sum(1 << session for session in np.flatnonzero(there).tolist())
    return np.uint64(bits | (0xFFFF << MOVER_BIT))


def _distrusted(columns: Columns) -> None:
    """A session may have computed with what it holds of a CLEARED row: that was found wrong (kvstore.trust.watching).

    An administrator clears what nobody holds, and what is CLEARED is given to nobody.
    """
    cleared = states(columns.state) == State.CLEARED
    for tier in (Tier.HBM, Tier.DRAM):
        pool = columns.pool(tier)
        rows = np.where(pool.row < columns.shape.max_rows, pool.row, 0)
        marked = (states(pool.state) == SlotState.SEALED) & (pool.row != NONE) & cleared[rows]
        marked &= (pool.holders & np.uint64((1 << MOVER_BIT) - 1)) != 0
        pool.state[marked] = (pool.state[marked] & ~_STATE_BITS) | np.uint64(SlotState.DISTRUSTED)


def _slots_of_extents(columns: Columns, tier: Tier) -> NDArray[np.bool_]:
    """[slots] whether each lies in an extent that is cut. Entries that were being cut are UNASSIGNED again."""
    pool = columns.pool(tier)
    inside = np.zeros(len(pool.state), dtype=np.bool_)
    for extent in np.flatnonzero(columns.extent_tier == tier).tolist():
        state = columns.extent_state[extent]
        if state == ExtentState.DRAINING and tier is Tier.HBM:  # it was being dropped: what is left is good
            columns.extent_state[extent] = state = ExtentState.READY
        if state in (ExtentState.READY, ExtentState.DRAINING):
            base, size = int(columns.extent_slot_base[extent]), int(columns.extent_slots[extent])
            pool.extent[base : base + size] = extent
            inside[base : base + size] = True
        elif state == ExtentState.UNASSIGNED:
            columns.extent_slot_bytes[extent] = 0
            columns.extent_slot_base[extent] = NONE
            columns.extent_slots[extent] = 0
    return inside


def _pointers(columns: Columns, inside: list[NDArray[np.bool_]]) -> None:
    """Rows keep only pointers to complete slots that point back."""
    sealed = states(columns.state) == State.SEALED
    columns.dram[:] = _believed(columns, Tier.DRAM, columns.dram, sealed, inside[Tier.DRAM])
    columns.nvme[:] = _believed(columns, Tier.NVME, columns.nvme, sealed, inside[Tier.NVME])
    for device in range(columns.shape.devices):
        here = inside[Tier.HBM] & (columns.extent_device[columns.pool(Tier.HBM).extent] == device)
        columns.hbm[device] = _believed(columns, Tier.HBM, columns.hbm[device], sealed, here)


def _believed(
    columns: Columns,
    tier: Tier,
    column: NDArray[np.uint32],
    sealed: NDArray[np.bool_],
    inside: NDArray[np.bool_],
) -> NDArray[np.uint32]:
    pool = columns.pool(tier)
    good = sealed & (column < len(pool.state))
    rows = np.flatnonzero(good)
    slots = column[rows]
    good[rows] = inside[slots] & (states(pool.state[slots]) == SlotState.SEALED) & (pool.row[slots] == rows)
    return np.where(good, column, np.uint32(NONE))


def _rows(columns: Columns) -> None:
    """A row without a complete copy is free."""
    copy = (columns.dram != NONE) | (columns.nvme != NONE) | (columns.hbm != NONE).any(axis=0)
    _free_rows(columns, (states(columns.state) != State.SEALED) | ~copy)
    columns.priority[columns.priority == PINNED] = 0


def _free_rows(columns: Columns, gone: NDArray[np.bool_]) -> None:
    used = gone & (states(columns.state) != State.FREE)
    columns.state[used] = (columns.state[used] & ~_STATE_BITS) + _ONE_GENERATION
    columns.hash[gone] = 0
    columns.hbm[:, gone] = NONE
    columns.dram[gone] = NONE
    columns.nvme[gone] = NONE


def _index(columns: Columns) -> None:
    """The index names exactly the SEALED rows; a row that finds no place in it, or is there twice, is free."""
    index = Index(columns)
    sealed = states(columns.state) == State.SEALED
    entries = columns.rows
    stale = (entries != NONE) & ~sealed[np.where(entries < len(sealed), entries, 0)]
    stale |= (entries >= len(sealed)) & (entries != NONE)
    entries[stale] = NONE
    columns.tags[stale] = 0
    rows = np.flatnonzero(sealed).astype(np.uint32)
    for at in range(0, len(rows), _CHUNK):
        chunk = rows[at : at + _CHUNK]
        found = index.find(columns.hash[chunk])
        missing = chunk[found == NONE]
        if len(missing):
            missing = missing[np.unique(columns.hash[missing, 0], return_index=True)[1]]
            index.insert(columns.hash[missing], missing)
            found = index.find(columns.hash[chunk])
        lost = chunk[found != chunk]
        if len(lost):
            index.remove(columns.hash[lost], lost)
            gone = np.zeros(len(sealed), dtype=np.bool_)
            gone[lost] = True
            _free_rows(columns, gone)


def _slots(columns: Columns, tier: Tier, inside: NDArray[np.bool_], known: np.uint64) -> None:
    """What is believed stays; what is held is private; a half-written slot on NVMe waits for its mover's end."""
    pool = columns.pool(tier)
    state = states(pool.state)
    row = np.where(pool.row < columns.shape.max_rows, pool.row, 0)
    if tier is Tier.HBM:
        device = np.where(inside, columns.extent_device[pool.extent], 0)
        back = columns.hbm[np.minimum(device, columns.shape.devices - 1), row]
    else:
        back = (columns.dram if tier is Tier.DRAM else columns.nvme)[row]
    ids = np.arange(len(state), dtype=np.uint32)
    linked = inside & (state == SlotState.SEALED) & (pool.row != NONE) & (back == ids)
    if tier is Tier.NVME:
        private = inside & (state == SlotState.FILLING)
        stays = linked | private | (inside & (state == SlotState.QUARANTINED))
    else:
        pool.holders[:] &= known
        private = inside & ~linked & (state != SlotState.FREE) & (pool.holders != 0)
        stays = linked | private
        pool.holders[~stays] = 0
    freed = ~stays & (state != SlotState.FREE)
    if tier is Tier.NVME:
        columns.nvme_changed[freed] = 1
    pool.state[freed] = (pool.state[freed] & ~_STATE_BITS) + _ONE_GENERATION
    private &= state != SlotState.DISTRUSTED  # who holds it publishes nothing yet: kvstore.trust.distrusting
    pool.state[private] = (pool.state[private] & ~_STATE_BITS) | np.uint64(SlotState.FILLING)
    pool.row[~linked] = NONE
