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

__all__ = ["CachePolicy"]


class CachePolicy(ABC):
    """Implements Policy but for the order of blocks that nobody waits for."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._cached = np.zeros(rows, dtype=np.bool_)
        self._count = 0
        self._now_s = 0.0
        self._waiting: Sequence[Rows] = ()
        self._next_use: NDArray[np.int32] | None = (
            None  # [rows] place in the queue; what nobody waits for: -1
        )

    def __len__(self) -> int:
        return self._count

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
        """What waits, next first. O(rows in it)."""
        if self._next_use is None:
            self._next_use = np.full(len(self._cached), -1, dtype=np.int32)
        for rows in self._waiting:
            self._next_use[rows] = -1
        for place in reversed(range(len(waiting))):  # the nearest use is written last
            self._next_use[waiting[place]] = place
        self._waiting = waiting

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        """First of what nobody waits for, then of the rest."""
        self._now_s = now_s
        if not self._waiting:
            found = self._choose(count, may_go)
        else:
            found = self._choose(count, self._unexpected(may_go))
            if len(found) < count:
                found = np.concatenate((found, self._expected(count - len(found), may_go)))
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
        """At most `count` rows in order; they have left the policy's order."""

    @abstractmethod
    def _forget(self, rows: Rows) -> None:
        """These, all cached, leave the policy's order."""

    def _ended(self, _rows: Rows, _stop: Stop) -> None:
        """The answer to a prompt of these, all cached, ended. A policy that learns from it says how."""
        return

    def _unexpected(self, may_go: MayGo | None) -> MayGo:
        """Of what may go, what nobody waits for."""
        next_use = self._next_use
        assert next_use is not None
        if may_go is None:
            return lambda rows: next_use[rows] < 0
        return lambda rows: (next_use[rows] < 0) & may_go(rows)

    def _expected(self, count: int, may_go: MayGo | None) -> Rows:
        """At most `count` of what is waited for, the furthest next use first, within one the tail first."""
        parts: list[Rows] = []
        for place in reversed(range(len(self._waiting))):
            rows = self._waiting[place][::-1]
            assert self._next_use is not None
            rows = rows[self._cached[rows] & (self._next_use[rows] == place)]
            if may_go is not None and len(rows):
                rows = rows[may_go(rows)]
            parts.append(rows[:count])
            count -= len(parts[-1])
            if count <= 0:
                break
        found = np.concatenate(parts)
        self._forget(found)
        return found
