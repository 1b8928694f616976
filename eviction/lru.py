"""Tail-first least recently used: the floor that every other policy is measured against.

Of blocks that were used together the last of the chain goes first, so no prefix loses its head before its tail, without
a count of children.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import Use
from eviction.in_order import InOrderPolicy

__all__ = ["Lru", "LruPolicy"]


class LruPolicy(InOrderPolicy):
    """Implements Policy."""

    def _used(self, use: Use) -> None:
        self._order.append(use.rows[::-1])


class Lru:
    """Implements EvictionPolicy: the keys already hold (last touch, −depth). Stateless."""

    __slots__ = ()

    def victims(
        self, keys: NDArray[np.uint64], eligible: NDArray[np.bool_], count: int
    ) -> NDArray[np.uint32]:
        """The eligible positions of the smallest keys, ascending by key, then by position. O(n)."""
        candidates = np.flatnonzero(eligible)
        of_candidates = keys[candidates]
        if 0 < count < len(candidates):
            threshold = np.partition(of_candidates, count - 1)[count - 1]
            near = of_candidates <= threshold  # more than `count` where keys are equal
            candidates, of_candidates = candidates[near], of_candidates[near]
        order = np.argsort(of_candidates, kind="stable")[: max(count, 0)]
        return candidates[order].astype(np.uint32)
