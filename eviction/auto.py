"""`auto`: the hazard policy, as long as it costs little against LRU; else LRU, until the other would hit clearly more.

LRU is in charge until the hazard policy has learned something. What the cache hits less than LRU would is known exactly
(`floor.py`): when the hazard policy has cost what it may cost, LRU takes over again. What the hazard policy would hit
more from then on is estimated by an understudy, a small cache over a sample of the blocks (`understudy.py`); it takes
over again when its lead is beyond chance and more than was lost by it.

The hazard policy is told of every use whoever is in charge, so it never stops learning. The order that LRU goes by is
kept beside it all the time, so a change of whom the cache follows costs the same however large the cache is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eviction.base import MayGo, Rows, Stop, Use
from eviction.floor import Floor
from eviction.hazard import HazardPolicy
from eviction.order import Order
from eviction.understudy import Understudy

__all__ = ["AutoPolicy"]

_HAZARD, _LRU = "hazard", "lru"
_FEWEST_LIVES = 1 << 13
"""What is learned of fewer is learned of a few hundred prompts and is chance: on no trace here is anything to speak of
gained by it, and on some a third of a point of the hits is lost."""
_FEWEST_TURNOVERS = 8
"""Times that as much as the cache holds was asked for. Ages that reach beyond what was seen so far are guessed: a large
cache that went by them earlier paid for it at once, and lost a policy that was right later, or half a point."""


class AutoPolicy(HazardPolicy):
    """Implements Policy and Chooser."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self.floor = Floor(places=self.most_places, capacity_blocks=capacity_blocks)
        self._by_use = Order(rows)  # what LRU goes by
        self._name_of = np.zeros(rows, dtype=np.uint64)
        self._understudy: Understudy | None = None  # while LRU is in charge again
        self.in_charge = _LRU
        """See Chooser."""

    def use(self, use: Use) -> None:
        """Touches and inserts, and looks whether another is to be followed from now on."""
        super().use(use)
        self._by_use.append(use.rows[::-1])
        self._name_of[use.rows] = use.names
        gain = self.floor.use(self.places, self.known, ~use.fresh)
        if self.in_charge == _HAZARD:
            if self.floor.broken:
                self.follow_lru()
        elif self._understudy is None:
            if self.has_learned:
                self.follow_hazard()
        elif self._understudy.use(use, gain) and self._understudy.leads_by(self.floor.price):
            self.follow_hazard()

    @property
    def has_learned(self) -> bool:
        """Whether the hazard policy may be followed for the first time."""
        turnovers = self.floor.asked / max(self.capacity_blocks, 1)
        return self.lives >= _FEWEST_LIVES and turnovers >= _FEWEST_TURNOVERS

    def follow_lru(self) -> None:
        """LRU orders the cache from now on. O(1)."""
        self._understudy = Understudy(self, self.capacity_blocks)
        self.in_charge = _LRU

    def follow_hazard(self) -> None:
        """The hazard policy does again. O(1)."""
        self._understudy = None
        self.in_charge = _HAZARD
        self.floor.settle()

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        """As the one in charge says."""
        found = super().victims(count, now_s, may_go)
        self.floor.trim(len(self))
        return found

    def remove(self, rows: Rows) -> None:
        """What LRU would have of these has left as well."""
        self.floor.remove(self.find(self._name_of[rows[self.has(rows)]]))
        super().remove(rows)

    def hit_rates(self) -> Mapping[str, float]:
        """See Chooser. The hazard policy's is of a sample while LRU is in charge again, and not known at first."""
        floor = self.floor
        if not floor.asked:
            return {}
        rates = {_LRU: floor.lru_hits / floor.asked, self.in_charge: floor.hits / floor.asked}
        if self._understudy is not None and self._understudy.hit_rate is not None:
            rates[_HAZARD] = self._understudy.hit_rate
        return rates

    def check_integrity(self) -> None:
        """Raises AssertionError where the two orders differ in what is cached. O(rows)."""
        super().check_integrity()
        self.floor.check_integrity()
        self._by_use.check_integrity()
        assert self._cached[self._by_use.rows()].all()
        assert len(self._by_use) == len(self)

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        if self.in_charge == _HAZARD:
            found = super()._choose(count, may_go)
            self._by_use.remove(found)
        else:
            found = self._by_use.take(count, may_go)
            super()._forget(found)
        return found

    def _forget(self, rows: Rows) -> None:
        super()._forget(rows)
        self._by_use.remove(rows)

    def _ended(self, rows: Rows, stop: Stop) -> None:
        super()._ended(rows, stop)
        if self._understudy is not None:
            self._understudy.ended(self._name_of[rows], stop)
