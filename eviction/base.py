"""The eviction contract: which of many blocks go first, decided for a batch at a time.

A policy sees one key a block, `touch_key(last touch, depth)` with what the store adds for blocks that are nowhere
else; the smaller goes first. It knows nothing of tiers, slots or sessions: what may not go is not eligible.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Chooses victims. Deterministic, no side effect on its arguments, no call or object for a single block."""

    def victims(
        self, keys: NDArray[np.uint64], eligible: NDArray[np.bool_], count: int
    ) -> NDArray[np.uint32]:
        """Positions of at most `count` eligible blocks, those that go first in order.

        `keys` and `eligible` are [n]. Fewer than `count` are returned only where fewer are eligible. O(n).
        """
        ...
