"""An order of rows in arrays: rows are appended in batches and taken from the front.

Owns a log of rows and, for each row, where in the log it stands. A row that is appended again or removed leaves its old
entry behind, which is passed over; the log is packed when it is full, so everything is amortised O(1) a row and numpy
alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows

__all__ = ["Order"]

_NOWHERE = np.int64(0)  # serial numbers begin at 1, so that a new order is zeros, which take no memory
_FIRST_LOG_ROWS = 1024
_FEWEST_SCANNED = 64
_MOST_SCANNED = 1 << 17
_NO_ROWS: Rows = np.empty(0, dtype=np.uint32)


class Order:
    """Rows in the order in which they were last appended. A row stands in it once."""

    __slots__ = ("_base", "_count", "_end", "_log", "_place", "_start")

    def __init__(self, rows: int) -> None:
        self._place = np.zeros(rows, dtype=np.int64)  # [rows] serial number of the row's entry
        self._log = np.empty(_FIRST_LOG_ROWS, dtype=np.uint32)
        self._base = 1  # serial number of _log[0]
        self._start = 0  # nothing that counts stands before it in _log
        self._end = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def places(self) -> NDArray[np.int64]:
        """[rows] ascending in order; 0: not in it. Not to be changed."""
        return self._place

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """[n] whether each row is in the order."""
        found: NDArray[np.bool_] = self._place[rows] > 0
        return found

    def append(self, rows: Rows) -> None:
        """These are the last now, in this order; distinct."""
        n = len(rows)
        if self._end + n > len(self._log):
            self._pack(n)
        self._count += n - int(np.count_nonzero(self._place[rows] > 0))
        self._log[self._end : self._end + n] = rows
        first = self._base + self._end
        self._place[rows] = np.arange(first, first + n)
        self._end += n

    def remove(self, rows: Rows) -> None:
        """Distinct; what is not in the order is passed over."""
        self._count -= int(np.count_nonzero(self._place[rows] > 0))
        self._place[rows] = _NOWHERE

    def clear(self) -> None:
        """Removes all. O(rows in it)."""
        self.remove(self.rows())
        self._start = self._end

    def take(self, count: int, may_go: MayGo | None = None) -> Rows:
        """Removes and returns the first `count` rows that may go, fewer where there are not so many."""
        found = self.first(count, may_go)
        self.remove(found)
        return found

    def first(self, count: int, may_go: MayGo | None = None) -> Rows:
        """The first `count` rows that may go, fewer where there are not so many."""
        parts: list[Rows] = []
        missing, position, all_gone = min(count, self._count), self._start, True
        width = max(2 * missing, _FEWEST_SCANNED)
        while missing > 0 and position < self._end:
            stop = min(position + width, self._end)
            width = min(2 * width, _MOST_SCANNED)  # long stretches may be dead, or may not go
            rows = self._log[position:stop]
            live = self._place[rows] == np.arange(self._base + position, self._base + stop)
            position = stop
            if all_gone:
                all_gone = not live.any()
                self._start = stop if all_gone else self._start
            rows = rows[live]
            if may_go is not None and len(rows):
                rows = rows[may_go(rows)]
            parts.append(rows[:missing])
            missing -= len(parts[-1])
        return np.concatenate(parts) if parts else _NO_ROWS

    def rows(self) -> Rows:
        """All, in order."""
        log = self._log[self._start : self._end]
        live = self._place[log] == np.arange(self._base + self._start, self._base + self._end)
        rows: Rows = log[live]
        return rows

    def check_integrity(self) -> None:
        """Raises AssertionError where count, log and places differ. O(rows)."""
        rows = self.rows()
        assert len(rows) == self._count == np.count_nonzero(self._place > 0)

    def _pack(self, room: int) -> None:
        """Drops entries that no longer count; at least half of the log is free after it."""
        rows = self.rows()
        size = max(len(self._log), _FIRST_LOG_ROWS)
        while size < 2 * (len(rows) + room):
            size *= 2
        log = np.empty(size, dtype=np.uint32)
        log[: len(rows)] = rows
        self._base += self._end  # serial numbers only grow
        self._place[rows] = np.arange(self._base, self._base + len(rows))
        self._log, self._start, self._end = log, 0, len(rows)
