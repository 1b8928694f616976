"""An order of rows in arrays: rows are appended in batches and taken from the front.

Owns a log of rows and, for each row, where in the log it stands. A row that is appended again or removed leaves its old
entry behind, which is passed over. The log is in segments: whenever one is begun some neighbours that are mostly dead
are made one, so that the log stays a few times as long as the order, and no call pays for all of it at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows
from eviction.look import Look

__all__ = ["Order"]

_FEWEST_SEGMENT = 1 << 10
_MOST_SEGMENT = 1 << 13
_TIDIED = 3  # pairs of neighbours that are looked at when a segment is begun: dead entries are found sooner than made
_FEWEST_SCANNED = 64
_NO_ROWS: Rows = np.empty(0, dtype=np.uint32)


class _Segment:
    """Entries with ascending serial numbers: that of `rows[i]` is `base + i`."""

    __slots__ = ("base", "end", "rows", "start")

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.rows: Rows = np.empty(size, dtype=np.uint32)
        self.start = 0  # nothing that counts stands before it
        self.end = 0


class Order:
    """Rows in the order in which they were last appended. A row stands in it once."""

    __slots__ = ("_count", "_hand", "_last", "_passed", "_place", "_segments")

    def __init__(self, rows: int) -> None:
        # [rows] serial number of the row's entry; they begin at 1, so that a new order is zeros, which take no memory
        self._place = np.zeros(rows, dtype=np.int64)
        self._count = 0
        self._hand = 0  # of the segments, where the next look for dead entries begins
        self._passed = 0  # serial number up to which the last look found too few that may go
        self._last = _Segment(1, _FEWEST_SEGMENT)
        self._segments = [self._last]

    def __len__(self) -> int:
        return self._count

    def commit(self) -> None:
        """Takes its memory now: taken page by page it would make some call late."""
        self._place.fill(0)

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
        last, n = self._last, len(rows)
        if not n:
            return
        stop = last.end + n
        if stop > len(last.rows):
            self._append_parts(rows)
            return
        place = self._place
        self._count += n - int(np.count_nonzero(place[rows]))
        last.rows[last.end : stop] = rows
        place[rows] = np.arange(last.base + last.end, last.base + stop)
        last.end = stop

    def remove(self, rows: Rows) -> None:
        """Distinct; what is not in the order is passed over."""
        if not len(rows):
            return
        here = rows[self._place[rows] > 0]  # to write a zero where one is may take memory, and time
        self._count -= len(here)
        self._place[here] = 0

    def clear(self) -> None:
        """Removes all. O(rows in it)."""
        self.remove(self.rows())
        self._segments, self._hand = [self._last], 0
        self._last.start = self._last.end

    def take(self, count: int, may_go: MayGo | None = None) -> Rows:
        """Removes and returns the first `count` rows that may go, fewer where there are not so many."""
        if count <= 0 or not self._count:
            return _NO_ROWS
        found = self.first(count, may_go)
        self._count -= len(found)
        self._place[found] = 0
        return found

    def first(self, count: int, may_go: MayGo | None = None) -> Rows:
        """The first `count` rows that may go, fewer where there are not so many.

        A `Look` is asked of the first rows, and then of as many more from where a sample has one that may go or, where
        it has none, from where the last call stopped: what may go is found in the end, and no call looks at all.
        """
        if not isinstance(may_go, Look):
            return self._scan(0, count, may_go)[0]
        count = min(count, self._count)
        if count <= 0:
            return _NO_ROWS
        found, stopped_at = self._scan(0, count, may_go)
        if len(found) >= count or not stopped_at:
            self._passed = 0
            return found
        if may_go.left <= 0:
            may_go.saw_all = False
            return found
        begin = self._sampled(stopped_at, may_go) or max(self._passed, stopped_at)
        more, self._passed = self._scan(begin, count - len(found), may_go)
        if begin > stopped_at or self._passed:
            may_go.saw_all = False
        return np.concatenate((found, more))

    def _scan(self, begin: int, count: int, may_go: MayGo | None) -> tuple[Rows, int]:
        """The first `count` rows that may go behind serial number `begin`; and the number to go on from, 0 at the end.

        A `Look` is asked of so many as it may be at once.
        """
        missing, at, look = min(count, self._count), 0, may_go if isinstance(may_go, Look) else None
        asks = min(look.left, look.at_once) if look is not None else 0
        width = max(2 * missing, _FEWEST_SCANNED)
        parts: list[Rows] = []
        while at < len(self._segments):
            segment = self._segments[at]
            position = max(segment.start, begin - segment.base)
            while position < segment.end:
                if missing <= 0 or (look is not None and asks <= 0):
                    return _joined(parts), segment.base + position
                stop = min(position + width, segment.end)
                width *= 2  # long stretches may be dead, or may not go
                rows = self._live(segment, position, stop)
                if not len(rows):
                    segment.start = stop if segment.start == position else segment.start
                elif look is not None:
                    rows = look.unexpected_of(rows)
                    if len(rows) > asks:
                        stop = int(self._place[rows[asks]]) - segment.base
                        rows = rows[:asks]
                    asks -= len(rows)
                if may_go is not None and len(rows):
                    rows = rows[may_go(rows)]
                if len(rows):
                    parts.append(rows[:missing])
                    missing -= len(parts[-1])
                    if missing <= 0:
                        return _joined(parts), segment.base + position
                position = stop
            if segment.start == segment.end and segment is not self._last:
                self._drop(at)
            else:
                at += 1
        return _joined(parts), 0

    def _sampled(self, begin: int, look: Look) -> int:
        """A serial number, `begin` or behind it, a little before the first that may go of a sample; 0: none of that
        may."""
        ranges = [(s, max(s.start, begin - s.base)) for s in self._segments if s.base + s.end > begin]
        step = 1 + sum(s.end - low for s, low in ranges) // look.sampled
        parts = [
            (s.rows[low : s.end : step], np.arange(s.base + low, s.base + s.end, step)) for s, low in ranges
        ]
        rows, serials = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        live = (self._place[rows] == serials).nonzero()[0]
        good = look(rows[live]).nonzero()[0]
        if not len(good):
            return 0
        before = int(serials[live[good[0] - 1]]) + 1 if good[0] else begin
        return max(before, int(serials[live[good[0]]]) - look.at_once // 2)

    def rows(self) -> Rows:
        """All, in order."""
        return np.concatenate([self._live(s, s.start, s.end) for s in self._segments])

    def check_integrity(self) -> None:
        """Raises AssertionError where count, log and places differ. O(rows)."""
        rows = self.rows()
        assert len(rows) == self._count == np.count_nonzero(self._place > 0)
        assert (np.diff(self._place[rows]) > 0).all()
        assert self._segments[-1] is self._last
        for one, other in zip(self._segments, self._segments[1:], strict=False):
            assert one.base + len(one.rows) <= other.base

    def _live(self, segment: _Segment, low: int, high: int) -> Rows:
        """Of these entries those that count."""
        rows = segment.rows[low:high]
        live = self._place[rows] == np.arange(segment.base + low, segment.base + high)
        found: Rows = rows[live]
        return found

    def _append_parts(self, rows: Rows) -> None:
        """What the last segment has room for, and the rest to new ones."""
        while True:
            room = len(self._last.rows) - self._last.end
            if room:
                self.append(rows[:room])
                rows = rows[room:]
            if not len(rows):
                return
            for _ in range(_TIDIED):
                self._tidy()
            size = min(max(2 * self._count, _FEWEST_SEGMENT), _MOST_SEGMENT)
            self._last = _Segment(self._last.base + len(self._last.rows), size)
            self._segments.append(self._last)

    def _drop(self, at: int) -> None:
        del self._segments[at]
        if self._hand > at:
            self._hand -= 1

    def _tidy(self) -> None:
        """A look at the next two neighbours: they become one where their entries that count fit into one."""
        if self._hand + 2 >= len(self._segments):  # the last is still written to
            self._hand = 0
            if len(self._segments) < 3:
                return
        one, other = self._segments[self._hand], self._segments[self._hand + 1]
        before = self._live(one, one.start, one.end)
        behind = self._live(other, other.start, other.end)
        count = len(before) + len(behind)
        if count > _MOST_SEGMENT // 2:
            self._hand += 1
            return
        rows = np.concatenate((before, behind))
        self._place[rows] = np.arange(one.base, one.base + count)  # below `other`'s, so the order stays
        one.rows, one.start, one.end = rows, 0, count
        self._drop(self._hand + 1)


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NO_ROWS
