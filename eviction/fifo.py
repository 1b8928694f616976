"""First in, first out: what was inserted first goes first, however often it was used since."""

from __future__ import annotations

import numpy as np

from eviction.base import MayGo, Rows, Use
from eviction.order import Order
from eviction.waiting import CachePolicy

__all__ = ["FifoPolicy"]


class FifoPolicy(CachePolicy):
    """Implements Policy. Blocks inserted together go head first, as they came.

    A prompt is inserted block after block: what of its own has to leave for that is a miss by then, and inserted again.
    """

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._order = Order(rows)

    def _used(self, use: Use) -> None:
        self._order.append(use.rows[use.fresh])
        again = use.rows[~use.fresh]
        while len(again) and (over := len(self._order) - self.capacity_blocks) > 0:
            leaving = np.isin(again, self._order.first(over))
            if not leaving.any():
                break
            self._order.append(again[leaving])
            again = again[~leaving]

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        return self._order.take(count, may_go)

    def _forget(self, rows: Rows) -> None:
        self._order.remove(rows)

    def check_integrity(self) -> None:
        """Raises AssertionError where order and cache differ. O(rows)."""
        super().check_integrity()
        self._order.check_integrity()
        assert self._cached[self._order.rows()].all()
        assert len(self._order) == len(self)
