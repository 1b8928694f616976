"""Tail-first least recently used: the floor that every other policy is measured against.

The key already holds (last touch, −depth), so of blocks that were used together the last of the chain goes first and
no prefix loses its head before its tail, without a count of children.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lru"]


class Lru:
    """Implements EvictionPolicy. Stateless."""

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
