"""W-TinyLFU: a small LRU window, and a main part that lets a block in only if it is used more than what it replaces.

Einziger, Eytan, Friedman, Manes: "Adaptive software cache management", Middleware 2018, with the window at a hundredth
of the cache, and the main part a segmented LRU with four fifths protected. Blocks that came together go tail first.
"""

from __future__ import annotations

import numpy as np

from eviction.base import MayGo, Rows, Use
from eviction.order import Order
from eviction.sketch import Sketch
from eviction.waiting import CachePolicy

__all__ = ["WTinyLfuPolicy"]

_WINDOW_SHARE = 100
_PROTECTED = 0.8  # of the main part


class WTinyLfuPolicy(CachePolicy):
    """Implements Policy."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._window, self._probation, self._protected = Order(rows), Order(rows), Order(rows)
        self._window_most = max(capacity_blocks // _WINDOW_SHARE, 1)
        self._protected_most = max(int((capacity_blocks - self._window_most) * _PROTECTED), 1)
        self._sketch = Sketch(capacity_blocks)
        self._name = np.zeros(rows, dtype=np.uint64)

    def _used(self, use: Use) -> None:
        rows, fresh = use.rows[::-1], use.fresh[::-1]
        self._name[rows] = use.names[::-1]
        self._sketch.add(use.names)
        touched = rows[~fresh]
        in_window = self._window.has(touched)
        promoted = touched[~in_window]
        self._probation.remove(promoted)
        self._protected.append(promoted)
        self._probation.append(self._protected.take(len(self._protected) - self._protected_most))
        self._window.append(touched[in_window])
        self._window.append(rows[fresh])
        self._overflow()

    def _overflow(self) -> None:
        """While the cache has room, what the window is too small for is let in."""
        room = self.capacity_blocks - self._window_most - len(self._probation) - len(self._protected)
        over = len(self._window) - self._window_most
        self._probation.append(self._window.take(min(room, over)))

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        """The oldest of the window and of probation in pairs; of each the one that was used less."""
        count = min(count, len(self))
        over = min(max(len(self._window) - self._window_most, 0), count)
        candidates = self._window.take(over, may_go)
        victims = self._probation.first(len(candidates), may_go)
        if len(victims) < len(candidates):
            missing = len(candidates) - len(victims)
            victims = np.concatenate((victims, self._protected.first(missing, may_go)))
        pairs = len(victims)
        better = np.zeros(len(candidates), dtype=np.bool_)
        better[:pairs] = self._sketch.count(self._name[candidates[:pairs]]) > self._sketch.count(
            self._name[victims]
        )
        gone = candidates.copy()
        gone[better] = victims[better[:pairs]]
        self._forget(gone)
        self._probation.append(candidates[better])
        return np.concatenate((gone, self._rest(count - len(gone), may_go)))

    def _rest(self, count: int, may_go: MayGo | None) -> Rows:
        parts = [np.empty(0, dtype=np.uint32)]
        for order in (self._probation, self._window, self._protected):
            parts.append(order.take(count, may_go))
            count -= len(parts[-1])
        return np.concatenate(parts)

    def _forget(self, rows: Rows) -> None:
        for order in (self._window, self._probation, self._protected):
            order.remove(rows)

    def check_integrity(self) -> None:
        """Raises AssertionError where parts and cache differ. O(rows)."""
        super().check_integrity()
        parts = (self._window, self._probation, self._protected)
        for order in parts:
            order.check_integrity()
            assert self._cached[order.rows()].all()
        assert sum(len(order) for order in parts) == len(self)
