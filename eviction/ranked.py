"""Policies that give each block a rank that moves with time: of a class and a mark, the least rank goes first.

Blocks of one class lie in a log, in the order of their last use. A plan of the next victims is made of the logs in a
batch and used up; what was used after the plan was made is compared with it at each call, so a young block that is
worth less than an old one goes at once. No call looks at all blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows, Use
from eviction.class_log import NO_ENTRIES, ClassLog, Entries
from eviction.waiting import CachePolicy

__all__ = ["RankedPolicy"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_FEWEST_YOUNG = 1024
_PLANNED_AHEAD = 1024
_MOST_YOUNG = 1 << 14
_FEWEST_MET = 128  # entries of the plan that are looked at together
_YOUNG_SHARE = 16  # of the cached blocks
_ALL_YOUNG = 2048  # blocks of a small cache: their ranks are made anew at each call, and none lies in a log


class RankedPolicy(CachePolicy):
    """Implements Policy but for classes, marks and ranks."""

    def __init__(self, *, rows: int, capacity_blocks: int, classes: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._stamp = np.full(rows, -1, dtype=np.int64)  # of the last use; not cached: -1
        self._next_stamp = 0
        self._logs: list[ClassLog | None] = [None] * classes
        self._young_rows = np.empty(_MOST_YOUNG, dtype=np.uint32)
        self._young_classes = np.empty(_MOST_YOUNG, dtype=np.intp)
        self._young_uses = np.empty(_MOST_YOUNG, dtype=np.intp)  # place of the use in _marks
        self._young_stamps = np.empty(_MOST_YOUNG, dtype=np.int64)
        self._marks = np.empty(_MOST_YOUNG, dtype=np.float64)  # of the uses that young blocks are of
        self._marks_count = 0
        self._young_count = 0
        self._any_logged = False
        self._all_planned = False  # all that is in the logs is in the plan
        self._plan = _NO_PLAN
        self._plan_start = 0  # what is planned before it no longer counts

    # -- what a policy adds

    @abstractmethod
    def _classify(self, use: Use) -> I64:
        """[n] the class of each block of the use from now on. Called once a use, before it is entered."""

    @abstractmethod
    def _mark(self) -> float:
        """Of a use now; never descends."""

    @abstractmethod
    def _young_ranks(self, classes: I64, uses: I64, marks: F64) -> F64:
        """[n] ranks of blocks of these classes; the mark of each is that of its use."""

    @abstractmethod
    def _lowest(self, count: int) -> tuple[Entries, F64]:
        """About `count` or more live entries of the logs, those of the least rank, ascending; their ranks."""

    @abstractmethod
    def _left(self, ranks: F64) -> None:
        """Blocks of these ranks are evicted; at least one."""

    # -- CachePolicy

    def _used(self, use: Use) -> None:
        self._enter(use.rows[::-1], self._classify(use)[::-1])

    def _enter(self, rows: Rows, classes: I64) -> None:
        """These are the last that were used, in this order, and of these classes."""
        n = len(rows)
        if self._young_count + n > min(len(self._young_rows), self._most_young()):
            self._put_away(n)
        first, stop = self._young_count, self._young_count + n
        self._young_rows[first:stop] = rows
        self._young_classes[first:stop] = classes
        self._young_uses[first:stop] = self._marks_count
        self._marks[self._marks_count] = self._mark()
        self._marks_count += 1
        self._young_count = stop
        stamps = np.arange(self._next_stamp, self._next_stamp + n)
        self._young_stamps[first:stop] = stamps
        self._stamp[rows] = stamps
        self._next_stamp += n

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        count = min(count, self._count)
        if count <= 0:
            return np.empty(0, dtype=np.uint32)
        plan, plan_ranks = self._planned(count, may_go)
        rows, stamps, ranks = self._young(may_go)
        if len(plan_ranks):
            rows = np.concatenate((plan.rows, rows))
            stamps = np.concatenate((plan.stamps, stamps))
            ranks = np.concatenate((plan_ranks, ranks))
        if len(rows) > count:
            near = (ranks <= np.partition(ranks, count - 1)[count - 1]).nonzero()[0]
            rows, ranks, stamps = rows.take(near), ranks.take(near), stamps.take(near)
        order = np.lexsort((stamps, ranks))[:count]
        found: Rows = rows[order]
        if len(found):
            self._left(ranks[order])
        self._stamp[found] = -1
        return found

    def _forget(self, rows: Rows) -> None:
        self._stamp[rows] = -1

    def check_integrity(self) -> None:
        """Raises AssertionError where cache, young and logs differ. O(rows)."""
        super().check_integrity()
        assert ((self._stamp >= 0) == self._cached).all()
        in_logs = [part for log in self._logs if log is not None for part in log.parts()]
        rows = np.concatenate([self._young_rows[: self._young_count], *(e.rows for e in in_logs)])
        stamps = np.concatenate([self._young_stamps[: self._young_count], *(e.stamps for e in in_logs)])
        assert np.count_nonzero(self._stamp[rows] == stamps) == self._count

    # -- parts

    def _most_young(self) -> int:
        """With those that no longer count."""
        if self.capacity_blocks <= _ALL_YOUNG:
            return 2 * self.capacity_blocks + _FEWEST_YOUNG
        return min(max(self._count // _YOUNG_SHARE, _FEWEST_YOUNG), _MOST_YOUNG // 2)

    def _young(self, may_go: MayGo | None) -> tuple[Rows, I64, F64]:
        """Rows, stamps and ranks of what was used since the plan and counts."""
        n = self._young_count
        good = (self._stamp.take(self._young_rows[:n]) == self._young_stamps[:n]).nonzero()[0]
        rows = self._young_rows.take(good)
        if may_go is not None and len(rows):
            allowed = may_go(rows)
            good, rows = good[allowed], rows[allowed]
        ranks = self._young_ranks(
            self._young_classes.take(good), self._young_uses.take(good), self._marks[: self._marks_count]
        )
        return rows, self._young_stamps.take(good), ranks

    def _planned(self, count: int, may_go: MayGo | None) -> tuple[Entries, F64]:
        """At least `count` of what is planned, counts and may go, or all there is in the logs."""
        if not self._any_logged:
            return _NO_PLAN
        found = self._still_good(may_go, count)
        if len(found[1]) >= count or self._all_planned:
            return found
        size = count + _PLANNED_AHEAD
        while True:
            self._plan, self._plan_start = self._lowest(size), 0
            self._all_planned = size >= self._count
            found = self._still_good(may_go, count)
            if len(found[1]) >= count or self._all_planned:
                return found
            size *= 4

    def _still_good(self, may_go: MayGo | None, count: int) -> tuple[Entries, F64]:
        """The first `count` of the plan that count and may go; those before them that do not count are met once."""
        entries, ranks = self._plan
        at, width, missing = self._plan_start, max(2 * count, _FEWEST_MET), count
        parts: list[I64] = []
        while missing > 0 and at < len(ranks):
            stop = min(at + width, len(ranks))
            good = (self._stamp.take(entries.rows[at:stop]) == entries.stamps[at:stop]).nonzero()[0] + at
            if at == self._plan_start:
                self._plan_start = int(good[0]) if len(good) else stop
            if may_go is not None and len(good):
                good = good[may_go(entries.rows.take(good))]
            parts.append(good[:missing])
            missing -= len(parts[-1])
            at, width = stop, 4 * width
        if not parts:
            return _NO_PLAN
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return entries.picked(found), ranks.take(found)

    def _put_away(self, room: int) -> None:
        """What is young and counts goes to the logs, but in a small cache, where all stay young: nothing is planned
        there, and no rank is old. Room is made for a use of so many more."""
        n = self._young_count
        good = np.flatnonzero(self._stamp[self._young_rows[:n]] == self._young_stamps[:n])
        rows, stamps = self._young_rows[good], self._young_stamps[good]
        classes, uses = self._young_classes[good], self._young_uses[good]
        marks = self._marks[uses]
        if len(good) + room > len(self._young_rows):
            self._young_rows = np.empty(len(good) + room, dtype=np.uint32)
            self._young_classes = np.empty(len(good) + room, dtype=np.intp)
            self._young_uses = np.empty(len(good) + room, dtype=np.intp)
            self._young_stamps = np.empty(len(good) + room, dtype=np.int64)
            self._marks = np.concatenate((self._marks, np.empty(len(good) + room)))
        # Before it evicts for a prompt a cache has more blocks than it should.
        if self.capacity_blocks <= _ALL_YOUNG and len(good) <= 2 * _ALL_YOUNG:
            kept, where = np.unique(uses, return_inverse=True)
            self._young_count, self._marks_count = len(good), len(kept)
            self._marks[: len(kept)] = self._marks[kept]
            for column, values in (
                (self._young_rows, rows),
                (self._young_stamps, stamps),
                (self._young_classes, classes),
                (self._young_uses, where),
            ):
                column[: len(good)] = values
            return
        self._settle(classes, Entries(rows=rows, stamps=stamps, marks=marks))
        self._young_count = self._marks_count = 0
        self._plan, self._plan_start, self._all_planned = _NO_PLAN, 0, False

    def _settle(self, classes: I64, entries: Entries) -> None:
        """To the logs of their classes."""
        self._any_logged = True
        order = np.argsort(classes, kind="stable")
        classes, entries = classes[order], entries.picked(order)
        cuts = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(classes)]
        for low, high in pairwise(cuts):
            if low < high:
                part = entries.picked(slice(low, high))
                self._log(int(classes[low])).append(part, self._stamp)

    def _log(self, number: int) -> ClassLog:
        log = self._logs[number]
        if log is None:
            log = self._logs[number] = ClassLog()
        return log


_NO_PLAN = (NO_ENTRIES, np.empty(0, dtype=np.float64))
