"""SIEVE: one queue and a hand that walks from old to new, evicts what was not used since it came by, spares the rest.

Zhang, Yang, Yue, Vigfusson, Rashmi: "SIEVE is simpler than LRU", NSDI 2024. What the hand has passed and what it has
not are two queues here; when it has passed all, they change places, which is the hand's way back to the oldest.
"""

from __future__ import annotations

import numpy as np

from eviction.base import MayGo, Rows, Use
from eviction.look import Look
from eviction.order import Order
from eviction.waiting import CachePolicy

__all__ = ["SievePolicy"]

_FEWEST_MET = 256
_LEFT = 4  # of a call's look, in parts: so far it goes
_MOST_TURNS = 3  # of the hand for one call: the first may find all visited, the second then finds none


class SievePolicy(CachePolicy):
    """Implements Policy. Blocks inserted together are met tail first."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._ahead, self._passed = Order(rows), Order(rows)
        self._visited = np.zeros(rows, dtype=np.bool_)

    def _used(self, use: Use) -> None:
        self._visited[use.rows] = ~use.fresh
        self._ahead.append(use.rows[use.fresh][::-1])

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        parts, missing, turns = [np.empty(0, dtype=np.uint32)], count, 0
        while missing > 0 and turns < _MOST_TURNS:
            met = self._meet(missing, may_go)
            if not len(met):
                if isinstance(may_go, Look) and len(self._ahead):
                    may_go.saw_all = False
                    break
                self._passed.append(self._ahead.rows())  # what somebody waits for
                self._ahead.clear()
                self._ahead, self._passed = self._passed, self._ahead
                turns += 1
                continue
            spared = self._visited[met]
            self._visited[met] = False
            self._passed.append(met[spared])
            parts.append(met[~spared])
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def _meet(self, count: int, may_go: MayGo | None) -> Rows:
        """The next that may go, at most so many. Where there are none near the hand it goes by some that its owner
        holds, as many as it may in a call."""
        found = self._ahead.take(count, may_go)
        while (
            isinstance(may_go, Look)
            and not len(found)
            and len(self._ahead)
            and may_go.left > _LEFT * may_go.at_once
        ):
            met = self._ahead.first(max(count, _FEWEST_MET))
            good = may_go(met)
            wanted = np.flatnonzero(good)[:count]
            if len(wanted) == count:
                met, good = met[: wanted[-1] + 1], good[: wanted[-1] + 1]
            self._ahead.remove(met)
            self._passed.append(met[~good])
            found = met[good]
        return found

    def _forget(self, rows: Rows) -> None:
        self._ahead.remove(rows)
        self._passed.remove(rows)

    def check_integrity(self) -> None:
        """Raises AssertionError where queues and cache differ. O(rows)."""
        super().check_integrity()
        for order in (self._ahead, self._passed):
            order.check_integrity()
            assert self._cached[order.rows()].all()
        assert len(self._ahead) + len(self._passed) == len(self)
