"""What is lost against tail-first LRU, exactly: an LRU of the same size beside a cache, and the account of the two.

No sample and no estimate: of each prompt the cache's hits stand beside those that LRU would have had, so that a policy
that is worse is found out when it has cost so many blocks, however noisy a load is. What it may cost is a quarter of
the cache, since a policy that keeps what LRU lets go pays for that first and is paid for it later, and some blocks
besides for what it must learn first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import Rows
from eviction.names import NOWHERE
from eviction.order import Order

__all__ = ["Floor"]

I64 = NDArray[np.int64]

_PART = 0.25  # of the cache
_LEARNING_BLOCKS = 512.0  # some long prompts
_SHARE = 0.0005  # of what was asked for, besides
_HALF_LIFE_BLOCKS = 1 << 18  # as what the hazard policy has learned
_HALF_LIFE_CACHES = 64  # of a larger cache
_MOST_CREDIT = 2.0  # stakes: what was won counts against what is lost later, but not without an end


class Floor:
    """The account of a cache. Who owns it tells of every use, and how many blocks are cached after each eviction.

    Blocks are known by places of their names, below `places`; NOWHERE is a block that is never a hit.
    """

    def __init__(self, *, places: int, capacity_blocks: int) -> None:
        self._lru = Order(places)
        self._half_life = float(max(_HALF_LIFE_BLOCKS, _HALF_LIFE_CACHES * capacity_blocks))
        self._stake = _PART * capacity_blocks + _LEARNING_BLOCKS
        self._asked = 0.0
        self.owed = 0.0
        """Blocks that LRU would have hit more often since `settle`; the older the less."""
        self.debt = 0.0
        """As `owed`, ever since."""

    def use(self, places: I64, known: NDArray[np.bool_], cached: NDArray[np.bool_]) -> int:
        """How many blocks of a prompt, [n] its head first, were cached, less those that LRU would have had.

        Leading ones alone. `known`: whether the name at a place was the block's before this use.
        """
        n = len(places)
        placed = places != NOWHERE
        rows = places.astype(np.uint32)
        here = known & placed
        here[here] = self._lru.has(rows[here])
        self._lru.append(_distinct(rows[placed])[::-1])
        gain = _leading(cached) - _leading(here)
        fade = 0.5 ** (n / self._half_life)
        self._asked = self._asked * fade + n
        self.owed = max(self.owed * fade - gain, -_MOST_CREDIT * self._stake)
        self.debt = max(self.debt * fade - gain, -_MOST_CREDIT * self._stake)
        return gain

    def trim(self, most: int) -> None:
        """The cache has so many blocks now."""
        if len(self._lru) > most:
            self._lru.take(len(self._lru) - most)

    def remove(self, places: I64) -> None:
        """These left for another reason than eviction."""
        self._lru.remove(np.unique(places[places != NOWHERE]).astype(np.uint32))

    @property
    def broken(self) -> bool:
        """Whether more is owed than a policy may cost."""
        return self.owed > self._stake + _SHARE * self._asked

    @property
    def price(self) -> float:
        """Blocks that a policy must have been better by to take over: the more was lost so far, the more."""
        return self._stake + max(self.debt, 0.0)

    def settle(self) -> None:
        """Another policy is followed from now on."""
        self.owed = 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError where the LRU's parts contradict each other. O(places)."""
        self._lru.check_integrity()


def _leading(hits: NDArray[np.bool_]) -> int:
    return len(hits) if hits.all() else int(hits.argmin())


def _distinct(rows: Rows) -> Rows:
    """Each once: blocks whose names are equal, as a client may have it, share a place."""
    ordered = np.sort(rows)
    return np.unique(rows) if (ordered[1:] == ordered[:-1]).any() else rows
