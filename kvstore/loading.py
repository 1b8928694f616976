"""Blocks found on disk at a start: rows and NVMe slots for them, in bulk."""

from __future__ import annotations

import numpy as np

from kvstore.layout import GENERATION_SHIFT, NONE, ExtentState, SlotState, Tier
from kvstore.moves import U32, U64
from kvstore.state import StoreState
from kvstore.table import distinct

__all__ = ["load_nvme"]

_CHUNK = 1 << 16
_KEY_SHIFT = np.uint64(20)


def load_nvme(
    state: StoreState,
    *,
    hashes: U64,
    parents: U64,
    namespaces: U32,
    depths: U32,
    slots: U32,
    generations: U32,
    touches: U64,
) -> int:
    """Makes SEALED rows for blocks that storage has; [n] each, slots distinct and FREE. Returns how many there are.

    Blocks that are known already, or stand twice, or find no row, are passed over: their slots are free to be
    overwritten. Parents are found where they are loaded too, in whatever order.
    """
    pool = state.nvme
    free = np.zeros(len(pool), dtype=np.bool_)
    for extent in state.extents.of(Tier.NVME, None, ExtentState.READY):
        base, size = state.extents.range(extent)
        free[base : base + size] = (pool.state[base : base + size] & np.uint64(0xFF)) == np.uint64(
            SlotState.FREE
        )
    usable = slots < len(pool)
    usable[usable] = free[slots[usable]]
    # Chains together, from the root on: then rows are contiguous, which is what makes a match cheap.
    order = np.flatnonzero(usable)
    order = order[np.lexsort((depths[order], touches[order] >> _KEY_SHIFT, namespaces[order]))]
    loaded: list[U32] = []
    parts: list[U64] = []
    latest = (np.uint64(state.now_ms) << _KEY_SHIFT) | np.uint64((1 << 20) - 1)
    for at in range(0, len(order), _CHUNK):
        chunk = order[at : at + _CHUNK]
        new = state.table.find(hashes[chunk], namespaces[chunk]) == NONE
        chunk = chunk[new]
        chunk = chunk[distinct(hashes[chunk])]
        rows = state.table.reserve(
            hashes=hashes[chunk],
            namespaces=namespaces[chunk],
            depths=depths[chunk],
            parents=np.full(len(chunk), NONE, dtype=np.uint32),
            touches=np.minimum(touches[chunk], latest),
        )
        chunk, rows = chunk[rows != NONE], rows[rows != NONE]
        _place(state, rows, slots[chunk], generations[chunk])
        loaded.append(rows)
        parts.append(parents[chunk])
    if not loaded:
        return 0
    rows = np.concatenate(loaded)
    state.columns.parent[rows] = state.table.index.find(np.concatenate(parts))
    state.counters["loaded_blocks"] += len(rows)
    return len(rows)


def _place(state: StoreState, rows: U32, slots: U32, generations: U32) -> None:
    """The slots hold these rows' blocks, under the generations that storage knows them by."""
    pool = state.nvme
    pool.claim(slots)
    pool.state[slots] = (generations.astype(np.uint64) << GENERATION_SHIFT) | np.uint64(SlotState.FILLING)
    state.complete(Tier.NVME, rows, slots, 0)
    state.table.publish(rows)
