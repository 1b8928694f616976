"""Block rows: allocated in runs, reserved under a hash, published, taken away, in an order that a crash cannot hurt.

Owns the blocks' columns and the index over them. A row is found by its hash as soon as it is reserved, and is a hit
only when its state is SEALED. Filling: columns, then the state word, then the index. Taking away: the state word, then
the index, then the columns. A FREE row has a hash of zeros, so that contiguous comparison never meets a ghost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, Columns, State, Tier, states, touch_key
from kvstore.moves import U32, U64
from kvstore.tables.firsts import firsts
from kvstore.tables.index import Index
from kvstore.tables.runs import FreeRuns
from kvstore.tables.spans import span_of

__all__ = ["PINNED", "BlockTable", "distinct"]

PINNED = 255
"""`priority` of a block whose last copy is not evicted."""
_STATE_BITS = np.uint64(0xFF)
_ONE_GENERATION = np.uint64(1 << 8)
_FILLING = np.uint64(State.FILLING)
_USABLE_STATES = np.uint64(2)
_WINDOW_ROWS = 1 << 16


def distinct(hashes: U64) -> NDArray[np.bool_]:
    """[n] the first of each hash. Equal first words count as equal: rare, and costs a private slot at worst."""
    return firsts(hashes[:, 0])


class BlockTable:
    """Operations on rows. Arrays of rows hold no duplicates and no NONE where not said."""

    __slots__ = ("_fault", "_free", "_reserved", "born", "columns", "index", "runs")

    def __init__(self, columns: Columns, fault: Callable[[str], None]) -> None:
        self.columns = columns
        self.index = Index(columns)
        self._fault = fault
        self._free: NDArray[np.bool_] = states(columns.state) == State.FREE
        self.runs = FreeRuns(self._free)
        self.born: U32 = np.zeros(columns.shape.max_rows, dtype=np.uint32)
        """[rows] in which call of `reserve` each was; 0: before this daemon, or found on disk."""
        self._reserved = 0
        for base in range(0, columns.shape.max_rows, _WINDOW_ROWS):
            self.runs.add_range(base, min(_WINDOW_ROWS, columns.shape.max_rows - base))

    @property
    def used(self) -> int:
        """Rows that are not free."""
        return self.columns.shape.max_rows - len(self.runs)

    def locate(self, hashes: U64, namespace: int) -> U32:
        """Row of each block of a chain, NONE where none is filling or sealed under that namespace. O(n)."""
        return self._usable(self.index.locate(hashes), namespace)

    def find(self, hashes: U64, namespaces: U32 | int) -> U32:
        """As `locate`, for hashes that form no chain."""
        return self._usable(self.index.find(hashes), namespaces)

    def are(self, rows: U32, hashes: U64, namespaces: U32) -> bool:
        """Whether each row (NONE allowed) is the one that `find` would give for its block. O(n), without the index."""
        if not (rows != NONE).all():
            return False
        columns = self.columns
        same = columns.hash.take(rows, axis=0) == hashes
        same[:, 0] &= columns.namespace.take(rows) == namespaces
        same[:, 1] &= _usable(columns.state.take(rows))
        return bool(same.all())

    def _usable(self, rows: U32, namespaces: U32 | int) -> U32:
        columns = self.columns
        span = span_of(rows, columns.shape.max_rows)
        if span is None:
            known = rows != NONE
            safe = rows if known.all() else np.where(known, rows, np.uint32(0))
            good = known & (columns.namespace.take(safe) == namespaces) & _usable(columns.state.take(safe))
        else:
            good = (columns.namespace[span] == namespaces) & _usable(columns.state[span])
        return rows if good.all() else np.where(good, rows, np.uint32(NONE))

    def sealed(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether each row (NONE allowed) is SEALED."""
        return self._is(rows, State.SEALED)

    def filling(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether each row (NONE allowed) is FILLING."""
        return self._is(rows, State.FILLING)

    def _is(self, rows: U32, wanted: State) -> NDArray[np.bool_]:
        span = span_of(rows, self.columns.shape.max_rows)
        if span is not None:
            run: NDArray[np.bool_] = (self.columns.state[span] & _STATE_BITS) == np.uint64(wanted)
            return run
        known = rows != NONE
        safe = rows if known.all() else np.where(known, rows, np.uint32(0))
        same: NDArray[np.bool_] = (self.columns.state.take(safe) & _STATE_BITS) == np.uint64(wanted)
        return same if safe is rows else known & same

    def reserve(self, *, hashes: U64, namespaces: U32 | int, depths: U32, parents: U32, touches: U64) -> U32:
        """Makes FILLING rows for distinct hashes: [n] rows, NONE where table or index is full or a row has the hash.

        The latter is a block of another namespace: keys differ, so it takes a client that makes hashes up.
        """
        columns = self.columns
        got = np.full(len(hashes), NONE, dtype=np.uint32)
        new = self.index.find(hashes) == NONE
        if not new.all():
            if new.any():
                got[new] = self.reserve(
                    hashes=hashes[new],
                    namespaces=namespaces if isinstance(namespaces, int) else namespaces[new],
                    depths=depths[new],
                    parents=parents[new],
                    touches=touches[new],
                )
            return got
        rows = self.runs.take(len(hashes))
        n = len(rows)
        if not n:
            return got
        columns.hash[rows] = hashes[:n]
        columns.namespace[rows] = namespaces if isinstance(namespaces, int) else namespaces[:n]
        columns.depth[rows] = depths[:n]
        columns.parent[rows] = parents[:n]
        columns.touch[rows] = touches[:n]
        columns.priority[rows] = 0
        columns.hbm[:, rows] = NONE
        columns.dram[rows] = NONE
        columns.nvme[rows] = NONE
        self._reserved += 1
        self.born[rows] = self._reserved
        self._fault("rows.columns")
        columns.state[rows] = (columns.state[rows] & ~_STATE_BITS) | np.uint64(State.FILLING)
        self._fault("rows.filling")
        entered = self.index.insert(hashes[:n], rows)
        self._fault("rows.index")
        if not entered.all():
            self.free(rows[~entered])
            rows = np.where(entered, rows, np.uint32(NONE))
        got[:n] = rows
        return got

    def publish(self, rows: U32) -> None:
        """FILLING rows become hits. This word is the commit."""
        self.columns.state[rows] = (self.columns.state[rows] & ~_STATE_BITS) | np.uint64(State.SEALED)
        self._fault("rows.sealed")

    def clear(self, rows: U32) -> None:
        """SEALED rows are hits no more, from this word on; `free` is to come."""
        self.columns.state[rows] = (self.columns.state[rows] & ~_STATE_BITS) | np.uint64(State.CLEARED)
        self._fault("rows.cleared")

    def cleared(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether each row (NONE allowed) is CLEARED."""
        return self._is(rows, State.CLEARED)

    def free(self, rows: U32) -> None:
        """Rows end. No slot points at them any more, or the caller takes the slots away next."""
        if not len(rows):
            return
        columns = self.columns
        columns.state[rows] = (columns.state[rows] & ~_STATE_BITS) + _ONE_GENERATION
        self._fault("rows.free")
        self.index.remove(columns.hash[rows], rows)
        self._fault("rows.unindexed")
        columns.hash[rows] = 0
        columns.hbm[:, rows] = NONE
        columns.dram[rows] = NONE
        columns.nvme[rows] = NONE
        columns.priority[rows] = 0
        self.runs.give(rows)

    def touch(self, rows: U32, now_ms: int) -> None:
        """These were used now. Duplicates allowed. O(n)."""
        columns = self.columns
        span = span_of(rows, columns.shape.max_rows)
        if span is None:
            columns.touch[rows] = touch_key(now_ms, columns.depth.take(rows))
        else:
            columns.touch[span] = touch_key(now_ms, columns.depth[span])

    def slots(self, tier: Tier, rows: U32, device: int) -> U32:
        """[n] slot of each row (NONE allowed) in a tier, or NONE."""
        column = self.column(tier, device)
        span = span_of(rows, len(column))
        if span is not None:
            return column[span].copy()
        known = rows != NONE
        if known.all():
            found: U32 = column.take(rows)
            return found
        return np.where(known, column.take(np.where(known, rows, np.uint32(0))), np.uint32(NONE))

    def column(self, tier: Tier, device: int) -> U32:
        """The pointers into a tier: [rows]."""
        if tier is Tier.HBM:
            hbm: U32 = self.columns.hbm[device]
            return hbm
        return self.columns.dram if tier is Tier.DRAM else self.columns.nvme

    def has_copy(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether any tier has the block, or is about to."""
        columns = self.columns
        copy = (columns.dram.take(rows) != NONE) | (columns.nvme.take(rows) != NONE)
        for device in range(columns.shape.devices):
            copy |= columns.hbm[device].take(rows) != NONE
        found: NDArray[np.bool_] = copy
        return found


def _usable(words: U64) -> NDArray[np.bool_]:
    """[n] FILLING or SEALED: of FREE and CLEARED the one is below and the other above."""
    found: NDArray[np.bool_] = (words & _STATE_BITS) - _FILLING < _USABLE_STATES
    return found
