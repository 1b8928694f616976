"""The store's own invariants, checked over whole tables: after every step of the tests, and on demand.

Each line that is returned is one broken invariant, in words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import MOVER_BIT, NONE, ExtentState, SessionState, SlotState, State, Tier, states
from kvstore.state import StoreState

__all__ = ["check"]

_LIVE = (SessionState.ATTACHED, SessionState.DYING, SessionState.ATTACHING)


def check(state: StoreState) -> list[str]:
    """Everything that is wrong; empty when the store is sound. O(rows + slots)."""
    faults: list[str] = []
    for tier in Tier:
        faults += _check_pool(state, tier)
    faults += _check_rows(state)
    faults += _check_links(state)
    faults += _check_index(state)
    faults += state.waits.faults()
    faults += state.quotas.faults((state.hbm, state.dram, state.nvme))
    faults += state.queued.faults()
    faults += state.early.faults()
    return faults


def _count(wrong: NDArray[np.bool_], what: str) -> list[str]:
    """One line when any is wrong."""
    if not wrong.any():
        return []
    return [f"{int(wrong.sum())} {what}; the first is {int(wrong.argmax())}"]


def _check_pool(state: StoreState, tier: Tier) -> list[str]:
    """free + filling + sealed + quarantined = total in each extent; holders agree with the states."""
    columns, pool = state.columns, state.pool(tier)
    now = states(pool.state)
    name = tier.name.lower()
    faults: list[str] = []
    inside = np.zeros(len(now), dtype=np.int64)
    for extent in state.extents.of(tier):
        if columns.extent_state[extent] in (ExtentState.READY, ExtentState.DRAINING, ExtentState.LOADING):
            base, size = state.extents.range(extent)
            inside[base : base + size] += 1
            if (pool.extent[base : base + size] != extent).any():
                faults.append(f"{name}: slots of extent {extent} name another extent")
            if (now[base : base + size] > max(SlotState)).any():
                faults.append(f"{name}: slots of extent {extent} are in an unknown state")
    faults += _count(inside > 1, f"{name} slots lie in two extents")
    faults += _count((inside == 0) & (now != SlotState.FREE), f"{name} slots are used and lie in no extent")
    faults += _count(
        (now == SlotState.FREE) & (pool.row != NONE) & (inside > 0), f"free {name} slots name a row"
    )
    listed = sum(len(owner.free) for owner in pool.classes.values())
    ready = np.zeros(len(now), dtype=np.bool_)
    for extent in state.extents.of(tier, None, ExtentState.READY):
        base, size = state.extents.range(extent)
        ready[base : base + size] = True
    free = int(np.count_nonzero(ready & (now == SlotState.FREE)))
    if listed != free:
        faults.append(f"{name}: {listed} slots are listed as free, {free} are")
    if tier is not Tier.NVME:
        known = state.sessions.holders() | np.uint64(0xFFFF << MOVER_BIT)
        faults += _count((pool.holders & ~known) != 0, f"{name} slots are held by sessions that do not exist")
        faults += _count((now == SlotState.FREE) & (pool.holders != 0), f"free {name} slots are held")
        filling = now == SlotState.FILLING
        faults += _count(filling & (pool.holders == 0), f"filling {name} slots are held by nobody")
        distrusted = now == SlotState.DISTRUSTED
        faults += _count(distrusted & (pool.holders == 0), f"distrusted {name} slots are held by nobody")
        faults += _count(distrusted & (pool.row != NONE), f"distrusted {name} slots name a row")
        # Without a row it is a block that was taken back while several read it.
        shared = filling & ((pool.holders & (pool.holders - np.uint64(1))) != 0) & (pool.row != NONE)
        faults += _count(shared, f"filling {name} slots have two holders")
    return faults


def _aside(state: StoreState) -> NDArray[np.bool_]:
    """[rows] those put aside for blocks that are being found on disk: FREE, never given out, columns filled ahead."""
    if not state.loads:
        return np.zeros(state.columns.shape.max_rows, dtype=np.bool_)
    aside: NDArray[np.bool_] = (states(state.columns.state) == State.FREE) & ~state.table.runs.is_free()
    return aside


def _check_rows(state: StoreState) -> list[str]:
    columns = state.columns
    now = states(columns.state)
    sealed, filling, free = (now == each for each in (State.SEALED, State.FILLING, State.FREE))
    copies = np.zeros(len(now), dtype=np.int64)
    for tier in Tier:
        for device in range(columns.shape.devices if tier is Tier.HBM else 1):
            copies += state.pool(tier).sealed(state.table.column(tier, device))
    faults = _count(sealed & (copies == 0), "sealed rows have no complete copy")
    unsealed = ~sealed & (now != State.CLEARED)
    faults += _count(unsealed & (copies > 0), "rows that are not sealed have a complete copy")
    any_copy = (columns.dram != NONE) | (columns.nvme != NONE) | (columns.hbm != NONE).any(axis=0)
    free &= ~_aside(state)
    faults += _count(free & any_copy, "free rows name a slot")
    faults += _count(free & columns.hash.any(axis=1), "free rows have a hash")
    if state.table.used != int((~free).sum()):
        faults.append(f"{state.table.used} rows are counted as used, {int((~free).sum())} are")
    fillers = np.zeros(len(now), dtype=np.int64)
    live = np.uint64(sum(1 << s.id for s in state.sessions if state.sessions.state(s.id) in _LIVE))
    for device in range(columns.shape.devices):
        slots = columns.hbm[device]
        fillers += state.hbm.filling(slots) & (
            (state.hbm.holders[np.where(slots != NONE, slots, 0)] & live) != 0
        )
    faults += _count(filling & (fillers != 1), "reserved rows have not exactly one live filler")
    return faults


def _check_links(state: StoreState) -> list[str]:
    """Row → slot → row, and back."""
    faults: list[str] = []
    columns = state.columns
    rows = np.arange(columns.shape.max_rows, dtype=np.uint32)
    aside = _aside(state)
    for tier in Tier:
        pool = state.pool(tier)
        name = tier.name.lower()
        linked = np.zeros(len(pool), dtype=np.int64)
        for device in range(columns.shape.devices if tier is Tier.HBM else 1):
            column = state.table.column(tier, device)
            used = (column != NONE) & ~aside
            if (column[used] >= len(pool)).any():
                faults.append(f"rows name {name} slots that do not exist")
                continue
            slots = column[used]
            linked[slots] += 1
            if (pool.row[slots] != rows[used]).any():
                faults.append(
                    f"{int((pool.row[slots] != rows[used]).sum())} {name} slots do not name the row that names them"
                )
            if tier is Tier.HBM and (pool.devices(slots) != device).any():
                faults.append(f"rows name hbm slots of another device than {device}")
            wrong = states(pool.state[slots]) == SlotState.FREE
            faults += [f"{int(wrong.sum())} rows name free {name} slots"] if wrong.any() else []
        faults += _count(linked > 1, f"{name} slots are named by two rows")
        now = states(pool.state)
        faults += _count(
            (now == SlotState.SEALED) & (linked != 1), f"sealed {name} slots are named by no row"
        )
        if tier is not Tier.NVME:
            faults += _count(
                (pool.row != NONE) & (linked == 0), f"{name} slots name a row that does not name them"
            )
    return faults


def _check_index(state: StoreState) -> list[str]:
    columns = state.columns
    used = np.flatnonzero(states(columns.state) != State.FREE).astype(np.uint32)
    found = state.table.index.find(columns.hash[used])
    entries = state.table.index.entries()
    if (
        state.loads
    ):  # entries come before the rows that they are of, and may hide a row of the same block for a moment
        aside = _aside(state)
        entries = entries[~aside[entries]]
        found = np.where((found != NONE) & aside[np.where(found != NONE, found, 0)], used, found)
    faults = _count(found != used, "rows are not what the index finds under their hash")
    if len(entries) != len(used):
        faults.append(f"the index has {len(entries)} entries for {len(used)} rows")
    return faults
