"""ARC: blocks used once and blocks used again in two lists, whose shares follow what would have hit.

Megiddo and Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003, for a prompt at a time: all its
blocks adapt the shares before any is evicted, and those that came together go tail first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows, Use
from eviction.ghosts import Ghosts
from eviction.order import Order
from eviction.waiting import CachePolicy

__all__ = ["ArcPolicy"]


class ArcPolicy(CachePolicy):
    """Implements Policy."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._once, self._again = Order(rows), Order(rows)
        self._once_left = Ghosts(capacity_blocks=capacity_blocks)
        self._again_left = Ghosts(capacity_blocks=capacity_blocks)
        self._once_share = 0.0  # blocks that the list of those used once should have
        self._name = np.zeros(rows, dtype=np.uint64)

    def _used(self, use: Use) -> None:
        rows, fresh = use.rows[::-1], use.fresh[::-1]
        again = ~fresh
        if fresh.any():
            names = use.names[::-1][fresh]
            self._name[rows[fresh]] = names
            again[fresh] = self._came_back(names)
        self._once.remove(rows[again])
        self._again.append(rows[again])
        self._once.append(rows[~again])

    def _came_back(self, names: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """[n] which of these had left not long ago; the shares follow."""
        from_once, from_again = self._once_left.known(names), self._again_left.known(names)
        ones, others = int(np.count_nonzero(from_once)), int(np.count_nonzero(from_again))
        many_once, many_again = max(len(self._once_left), 1), max(len(self._again_left), 1)
        self._once_share += ones * max(1.0, many_again / many_once)
        self._once_share -= others * max(1.0, many_once / many_again)
        self._once_share = min(max(self._once_share, 0.0), float(self.capacity_blocks))
        self._once_left.discard(names[from_once])
        self._again_left.discard(names[from_again])
        found: NDArray[np.bool_] = from_once | from_again
        return found

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        wanted = min(max(len(self._once) - int(self._once_share), 0), count)
        once = self._once.take(wanted, may_go)
        again = self._again.take(count - len(once), may_go)
        more = self._once.take(count - len(once) - len(again), may_go)
        self._once_left.add(self._name[once])
        self._once_left.add(self._name[more])
        self._again_left.add(self._name[again])
        self._once_left.trim(max(self.capacity_blocks - len(self._once), 0))
        of_all = len(self._once) + len(self._again) + len(self._once_left)
        self._again_left.trim(max(2 * self.capacity_blocks - of_all, 0))
        return np.concatenate((once, again, more))

    def _forget(self, rows: Rows) -> None:
        self._once.remove(rows)
        self._again.remove(rows)

    def check_integrity(self) -> None:
        """Raises AssertionError where lists and cache differ. O(rows)."""
        super().check_integrity()
        for order in (self._once, self._again):
            order.check_integrity()
            assert self._cached[order.rows()].all()
        assert len(self._once) + len(self._again) == len(self)
