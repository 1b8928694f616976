"""Policies whose victims are the first of one order; they differ in what a use does to it."""

from __future__ import annotations

from eviction.base import MayGo, Rows
from eviction.order import Order
from eviction.waiting import CachePolicy

__all__ = ["InOrderPolicy"]


class InOrderPolicy(CachePolicy):
    """Implements Policy but for `_used`, which puts rows at the end of `_order`."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._order = Order(rows)

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
