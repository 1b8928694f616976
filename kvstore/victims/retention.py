"""Blocks that an engine wants to stay for some time, by priority: an order of eviction, no pin.

Owns three volatile columns by row. What is retained goes after all that is not, the lower priority first, and within
one what ends sooner; so more than fits pins nothing. A row that has another block since is retained no more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT, Columns, touch_key
from kvstore.moves import U32, U64

__all__ = ["MAX_PRIORITY", "Retention"]

MAX_PRIORITY = 100
_RETAINED = np.uint64(1 << 62)  # above every touch key, below what queued requests want
_PRIORITY_SHIFT = np.uint64(55)
_MOST_S = (1 << 35) - 1  # of the time in a key, above the depth


class Retention:
    """Every call is O(rows named), and O(1) where nothing is retained."""

    __slots__ = ("_columns", "_ends_ms", "_marks", "_priority", "_until_ms")

    def __init__(self, columns: Columns) -> None:
        rows = columns.shape.max_rows
        self._columns = columns
        self._until_ms: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._priority: NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        self._marks: U32 = np.zeros(rows, dtype=np.uint32)  # generation of the row, plus one
        self._ends_ms = 0  # nothing is retained beyond it

    def put(self, rows: U32, above: U32, priority: int, until_ms: int, now_ms: int) -> None:
        """`rows` are retained; so are the blocks `above` them in their chain, without which they are no hits: by no
        less than they are already. Replaces what was said of `rows`; priority 0 ends it."""
        old = np.where(self.holds(above, now_ms), self._priority[above], np.uint8(0))
        self._until_ms[above] = np.where(old > 0, np.maximum(self._until_ms[above], until_ms), until_ms)
        self._priority[above] = np.maximum(old, np.uint8(priority))
        self._until_ms[rows] = until_ms
        self._priority[rows] = priority
        for each in (above, rows):
            self._marks[each] = self._marks_of(each)
        self._ends_ms = max(self._ends_ms, until_ms)

    def holds(self, rows: U32, now_ms: int) -> NDArray[np.bool_]:
        """[n] whether each is retained now."""
        if now_ms >= self._ends_ms:
            return np.zeros(len(rows), dtype=np.bool_)
        found: NDArray[np.bool_] = (self._until_ms[rows] > now_ms) & (self._priority[rows] > 0)
        found &= self._marks[rows] == self._marks_of(rows)
        return found

    def raise_keys(self, keys: U64, rows: U32, now_ms: int) -> None:
        """Puts the eviction keys ([n], the smaller goes first) of retained rows behind all others', in place."""
        held = self.holds(rows, now_ms)
        if held.any():
            rows = rows[held]
            ends_s = np.minimum(self._until_ms[rows] // 1000, _MOST_S).astype(np.uint64)
            priority = self._priority[rows].astype(np.uint64) << _PRIORITY_SHIFT
            keys[held] = _RETAINED | priority | touch_key(ends_s, self._columns.depth[rows])

    def _marks_of(self, rows: U32) -> U32:
        generations: U32 = (self._columns.state[rows] >> GENERATION_SHIFT).astype(np.uint32)
        return generations + np.uint32(1)
