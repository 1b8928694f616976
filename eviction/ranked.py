"""Policies that give each block a rank that moves with time: of a class and a mark, the least rank goes first.

Blocks of one class lie in a log, in the order of their last use. A plan of the next victims is made of the logs in a
batch and used up; what was used after the plan was made is compared with it at each call, so a young block that is
worth less than an old one goes at once. No call looks at all blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows, Use
from eviction.class_log import NO_ENTRIES, ClassLog, Entries
from eviction.look import Look
from eviction.waiting import CachePolicy

__all__ = ["NO_PLAN", "RankedPolicy"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_FEWEST_YOUNG = 1024
_PLANNED_AHEAD = 1024
_MOST_YOUNG = 1 << 14
_FEWEST_MET = 128  # entries of the plan that are looked at together
_MOST_MET = 1 << 16  # entries of the logs, dead ones and what waits too, that a call goes by behind the first
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
        self._passed = 0, -1  # log, and stamp in it, that the last look behind the first went by
        self._plan = NO_PLAN
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
    def _lowest(self, count: int, may_go: MayGo | None) -> tuple[Entries, F64]:
        """`count` or more live entries of the logs that may go, those of the least rank, ascending; their ranks. Fewer
        where there are no more."""

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
        if isinstance(may_go, Look):
            return self._choose_of(count, may_go)
        rows, ranks = self._least(count, may_go)
        self._take(rows, ranks)
        return rows

    def _choose_of(self, count: int, look: Look) -> Rows:
        """Of the first in order those that may go; where these are too few, others behind them."""
        for most in (count, 2 * (look.at_once if self.capacity_blocks > _ALL_YOUNG else _ALL_YOUNG)):
            rows, ranks = self._least(most, look.unexpected)
            good = look(rows).nonzero()[0][:count]
            if len(good) == count or len(rows) < most:
                break
        found = rows[good]
        self._take(found, ranks[good])
        if len(found) == count or len(rows) < most:
            return found
        look.saw_all = False
        return np.concatenate((found, self._behind(count - len(found), look)))

    def _take(self, rows: Rows, ranks: F64) -> None:
        if len(rows):
            self._left(ranks)
            self._stamp[rows] = -1

    def _least(self, count: int, unexpected: MayGo | None) -> tuple[Rows, F64]:
        """The `count` of the least rank, ascending, and their ranks; fewer where there are not so many."""
        plan, plan_ranks = self._planned(count, unexpected)
        rows, stamps, ranks = self._young(unexpected)
        if len(plan_ranks):
            rows = np.concatenate((plan.rows, rows))
            stamps = np.concatenate((plan.stamps, stamps))
            ranks = np.concatenate((plan_ranks, ranks))
        if len(rows) > count:
            near = (ranks <= np.partition(ranks, count - 1)[count - 1]).nonzero()[0]
            rows, ranks, stamps = rows.take(near), ranks.take(near), stamps.take(near)
        order = np.lexsort((stamps, ranks))[:count]
        return rows[order], ranks[order]

    def _behind(self, count: int, look: Look) -> Rows:
        """Others that may go: from where a sample has the first of them, log by log and each from its oldest, which is
        of less worth first, about; or, where it has none, from where the last call stopped.

        Their ranks are not known, so they say nothing of what an evicted block was worth.
        """
        parts: list[Rows] = [np.empty(0, dtype=np.uint32)]
        begin, after = self._sampled(look) or self._passed
        asks, left = min(look.left, look.at_once), _MOST_MET
        for number in range(begin, len(self._logs) + 1):
            for rows, stamps in self._entries(number):
                at = int(np.searchsorted(stamps, after, side="right"))
                while at < len(rows) and count > 0 and asks > 0 and left > 0:
                    stop = min(at + max(asks, _FEWEST_MET), len(rows))
                    met = rows[at:stop][self._stamp.take(rows[at:stop]) == stamps[at:stop]]
                    met = look.unexpected_of(met)
                    asks, left = asks - len(met), left - (stop - at)
                    met = met[look(met)][:count]
                    self._stamp[met] = -1
                    parts.append(met)
                    count -= len(met)
                    if count > 0:
                        after, at = int(stamps[stop - 1]), stop
                if count <= 0 or asks <= 0 or left <= 0:
                    self._passed = number, after
                    return np.concatenate(parts)
            after = -1
        self._passed = 0, -1
        return np.concatenate(parts)

    def _sampled(self, look: Look) -> tuple[int, int] | None:
        """A log and a stamp in it, a little before the first that may go of a sample of all; None: none of that may."""
        logs = [(n, *part) for n in range(len(self._logs) + 1) for part in self._entries(n)]
        step = 1 + sum(len(rows) for _, rows, _ in logs) // look.sampled
        rows = np.concatenate([rows[::step] for _, rows, _ in logs])
        stamps = np.concatenate([stamps[::step] for _, _, stamps in logs])
        numbers = np.repeat([n for n, _, _ in logs], [-(-len(rows) // step) for _, rows, _ in logs])
        live = (self._stamp.take(rows) == stamps).nonzero()[0]
        good = look(rows[live]).nonzero()[0]
        if not len(good):
            return None
        at = live[good[0]]
        if good[0] and step <= look.at_once // 2:  # those between it and the one before it are soon looked at
            at = live[good[0] - 1]
            return int(numbers[at]), int(stamps[at])
        return int(numbers[at]), int(stamps[at]) - 1

    def _entries(self, number: int) -> Iterator[tuple[Rows, I64]]:
        """Rows and stamps of a log, dead ones too, in order; behind the last log are the young."""
        if number == len(self._logs):
            yield self._young_rows[: self._young_count], self._young_stamps[: self._young_count]
            return
        log = self._logs[number]
        for entries in log.parts() if log is not None else ():
            yield entries.rows, entries.stamps

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
            return NO_PLAN
        found = self._still_good(may_go, count)
        if len(found[1]) >= count or self._all_planned:
            return found
        size = count + _PLANNED_AHEAD
        self._plan, self._plan_start = self._lowest(size, may_go), 0
        self._all_planned = size >= self._count and may_go is None
        return self._still_good(may_go, count)

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
            return NO_PLAN
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
        self._plan, self._plan_start, self._all_planned = NO_PLAN, 0, False

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


NO_PLAN = (NO_ENTRIES, np.empty(0, dtype=np.float64))
