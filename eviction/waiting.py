"""What the waiting queue says of blocks: the policies' common half.

`CachePolicy` holds which rows are cached and what waits for them, and lets what is waited for go last: the
block whose next use is furthest away first. A policy adds the order of all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows, Stop, Use
from eviction.look import Look

__all__ = ["CachePolicy"]

_MOST_ASKED = 4096  # rows a call: more would hold up the owner
_SOUGHT = -1  # a row whose next use is looked for


class CachePolicy(ABC):
    """Implements Policy but for the order of blocks that nobody waits for."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._cached = np.zeros(rows, dtype=np.bool_)
        self._count = 0
        self._now_s = 0.0
        self._waiting: Waiting | None = None

    def __len__(self) -> int:
        return self._count

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """[n] whether each is cached."""
        found: NDArray[np.bool_] = self._cached[rows]
        return found

    def use(self, use: Use) -> None:
        """Touches and inserts."""
        self._now_s = use.now_s
        self._cached[use.rows] = True
        self._count += int(np.count_nonzero(use.fresh))
        self._used(use)

    def ended(self, rows: Rows, stop: Stop) -> None:
        """What is not cached is passed over."""
        self._ended(rows[self._cached[rows]], stop)

    def expect(self, waiting: Sequence[Rows]) -> None:
        """What waits, next first. O(what came and went) where the queue only moved up by one, else O(rows in it)."""
        if self._waiting is None:
            self._waiting = Waiting(len(self._cached))
        self._waiting.replace(waiting)

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        """First of what nobody waits for, then of the rest."""
        self._now_s = now_s
        waiting = self._waiting
        look = None if may_go is None else Look(may_go, count, waiting.next_use if waiting else None)
        if not waiting:
            found = self._choose(count, look)
        else:
            found = self._choose(count, look or waiting.unexpected)
            if len(found) < count and (look is None or look.saw_all):
                last = waiting.last(count - len(found), self._cached, may_go)
                self._forget(last)
                found = np.concatenate((found, last))
        self._cached[found] = False
        self._count -= len(found)
        return found

    def remove(self, rows: Rows) -> None:
        """What is not cached is passed over."""
        gone = rows[self._cached[rows]]
        self._forget(gone)
        self._cached[gone] = False
        self._count -= len(gone)

    def check_integrity(self) -> None:
        """Raises AssertionError where the count is wrong. O(rows)."""
        assert self._count == np.count_nonzero(self._cached)

    @abstractmethod
    def _used(self, use: Use) -> None:
        """Touches and inserts in the policy's order."""

    @abstractmethod
    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        """At most `count` rows in order; they have left the policy's order. `may_go` is a `Look` where the owner lets
        only some go; else it says what nobody waits for."""

    @abstractmethod
    def _forget(self, rows: Rows) -> None:
        """These, all cached, leave the policy's order."""

    def _ended(self, _rows: Rows, _stop: Stop) -> None:
        """The answer to a prompt of these, all cached, ended. A policy that learns from it says how."""
        return


class Waiting:
    """The requests in the queue, and which of them wants each row first."""

    __slots__ = ("_first", "_last_use", "_next_use", "_passed", "_queue")

    def __init__(self, rows: int) -> None:
        self._queue: list[Rows] = []
        self._first = 1  # serial number of the first in the queue
        self._passed = 0  # rows from the end of the queue that the last call went by
        self._next_use = np.zeros(rows, dtype=np.int64)  # [rows] of the first that wants the row; none: 0
        self._last_use = np.zeros(rows, dtype=np.int64)  # [rows] of the last; none: less than `_first`

    def __len__(self) -> int:
        return len(self._queue)

    def replace(self, waiting: Sequence[Rows]) -> None:
        """These wait, next first. A request that waits on is the same object as before."""
        queue = list(waiting)
        if self._queue and not _goes_on(queue, self._queue):
            if _goes_on(queue, self._queue[1:]):
                self._drop_first()
            else:
                for rows in self._queue:
                    self._next_use[rows] = 0
                self._first += len(self._queue)
                self._queue = []
        for rows in queue[len(self._queue) :]:
            self._queue.append(rows)
            serial = self._first + len(self._queue) - 1
            self._next_use[rows[self._next_use[rows] == 0]] = serial
            self._last_use[rows] = serial

    def _drop_first(self) -> None:
        rows, serial = self._queue.pop(0), self._first
        self._first += 1
        rows = rows[self._next_use[rows] == serial]
        self._next_use[rows] = 0
        again = rows[self._last_use[rows] > serial]
        self._next_use[again] = _SOUGHT
        left = len(again)
        for place, others in enumerate(self._queue):
            if not left:
                break
            found = others[self._next_use[others] == _SOUGHT]
            self._next_use[found] = self._first + place
            left -= len(found)

    @property
    def next_use(self) -> NDArray[np.int64]:
        """[rows] not 0: somebody waits for it. Not to be changed."""
        return self._next_use

    def unexpected(self, rows: Rows) -> NDArray[np.bool_]:
        """[n] whether nobody waits for each."""
        found: NDArray[np.bool_] = self._next_use[rows] == 0
        return found

    def last(self, count: int, cached: NDArray[np.bool_], may_go: MayGo | None) -> Rows:
        """At most `count` of what is cached and waited for, the furthest next use first, within one the tail first.

        `may_go` is asked of a bounded number; where it lets too few of them go the next call goes on behind them.
        """
        parts: list[Rows] = []
        behind, left = 0, max(count, _MOST_ASKED)
        skipped, self._passed = self._passed if may_go is not None else 0, 0
        for place in reversed(range(len(self._queue))):
            rows = self._queue[place][::-1]
            behind += len(rows)
            if behind <= skipped:
                continue
            rows = rows[max(len(rows) - (behind - skipped), 0) :]
            here = (cached[rows] & (self._next_use[rows] == self._first + place)).nonzero()[0]
            if may_go is not None and len(here) > left:
                self._passed = behind - len(rows) + int(here[left])
                here = here[:left]
            left -= len(here)
            rows = rows[here]
            if may_go is not None and len(rows):
                rows = rows[may_go(rows)]
            parts.append(rows[:count])
            count -= len(parts[-1])
            if count <= 0:
                self._passed = 0
                break
            if self._passed:
                break
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)


def _goes_on(queue: list[Rows], before: list[Rows]) -> bool:
    """Whether `queue` begins with the requests of `before`."""
    return len(before) <= len(queue) and all(one is other for one, other in zip(before, queue, strict=False))
