"""What is lost against tail-first LRU, exactly: an LRU of the same size beside a cache, and the account of the two.

No sample and no estimate: of each prompt the cache's hits stand beside those that LRU would have had, so that a policy
that is worse is found out when it has cost so many blocks, however noisy a load is. What it may cost is a share of what
was asked for, since that is what a user loses, and never more than a quarter of the cache and some blocks: a policy
that keeps what LRU lets go pays for that first and is paid for it later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import Rows
from eviction.names import NOWHERE
from eviction.order import Order

__all__ = ["Floor"]

I64 = NDArray[np.int64]

_SHARE = 0.003  # of what was asked for: what `auto` may be below LRU by its promise
_PART = 0.25  # of the cache
_LEARNING_BLOCKS = 512.0  # some long prompts
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
        self._most_stake = _PART * capacity_blocks + _LEARNING_BLOCKS
        self.asked = self.hits = self.lru_hits = 0.0
        """Blocks that were asked for, and what of them the cache and LRU hit; the older the less."""
        self.owed = 0.0
        """Blocks that LRU would have hit more often since `settle`; the older the less."""
        self.debt = 0.0
        """As `owed`, ever since."""

    def use(self, places: I64, known: NDArray[np.bool_], cached: NDArray[np.bool_]) -> int:
        """How many blocks of a prompt, [n] its head first, were cached, less those that LRU would have had.

        Leading ones alone. `known`: whether the name at a place was the block's before this use.
        """
        n, rows = len(places), places.astype(np.uint32)
        lru_hits = _leading(known)
        lru_hits = _leading(self._lru.has(rows[:lru_hits]))
        hits = _leading(cached)
        self._lru.append(_distinct(rows[places != NOWHERE])[::-1])
        fade = 0.5 ** (n / self._half_life)
        self.asked = self.asked * fade + n
        self.hits = self.hits * fade + hits
        self.lru_hits = self.lru_hits * fade + lru_hits
        gain = hits - lru_hits
        least = -_MOST_CREDIT * self.stake
        self.owed = max(self.owed * fade - gain, least)
        self.debt = max(self.debt * fade - gain, least)
        return gain

    def trim(self, most: int) -> None:
        """The cache has so many blocks now."""
        if len(self._lru) > most:
            self._lru.take(len(self._lru) - most)

    def remove(self, places: I64) -> None:
        """These left for another reason than eviction."""
        self._lru.remove(np.unique(places[places != NOWHERE]).astype(np.uint32))

    @property
    def stake(self) -> float:
        """Blocks that a policy may cost."""
        return min(_SHARE * self.asked, self._most_stake)

    @property
    def broken(self) -> bool:
        """Whether more is owed than that."""
        return self.owed > self.stake

    @property
    def price(self) -> float:
        """Blocks that a policy must have been better by to take over: the more was lost so far, the more."""
        return self.stake + max(self.debt, 0.0)

    def settle(self) -> None:
        """Another policy is followed from now on."""
        self.owed = 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError where the LRU's parts contradict each other. O(places)."""
        self._lru.check_integrity()


def _leading(hits: NDArray[np.bool_]) -> int:
    if not len(hits):
        return 0
    at = int(hits.argmin())
    return len(hits) if hits[at] else at


def _distinct(rows: Rows) -> Rows:
    """Each once: blocks whose names are equal, as a client may have it, share a place."""
    ordered = np.sort(rows)
    return np.unique(rows) if (ordered[1:] == ordered[:-1]).any() else rows
