"""`auto`: the policy that would have hit most often lately, and never for long one that is worse than LRU.

What the cache hits less than LRU would is known exactly (`floor.py`): when a policy has cost what one may cost, LRU
takes over. What others would hit more than the cache is estimated by shadows (`shadow.py`) over a sample of the blocks:
one of them takes over when its lead is beyond chance and more than was lost by such changes so far. The hazard policy
is in charge first, and has a larger shadow while it is not: it is the one that is best on most loads.

The hazard policy is told of every use whoever is in charge: it never stops learning, and it knows in which order blocks
were used, from which any other candidate is made when that takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from eviction.arc import ArcPolicy
from eviction.base import MayGo, Policy, PolicyFactory, Rows, Stop, Use
from eviction.floor import Floor
from eviction.hazard import HazardPolicy
from eviction.lru import LruPolicy
from eviction.s3fifo import S3FifoPolicy
from eviction.shadow import Shadows

__all__ = ["AutoPolicy"]

_FLOOR = "lru"
_FIRST = "hazard"  # what it has not learned yet it orders like LRU
_OTHERS: dict[str, PolicyFactory] = {_FLOOR: LruPolicy, "arc": ArcPolicy, "s3fifo": S3FifoPolicy}
_UNDERSTUDY_BLOCKS = 2048  # up to twice as large a cache is shadowed as a whole
_FEWEST_SEEN = 1024.0  # sampled blocks: before that nothing is changed
_MARGIN = 0.02  # of the sampled blocks: a shadow is smaller than the cache, and so may be wrong by some of it
_DEVIATIONS = 3.0  # batches of one burst are not independent, so two would be exceeded by chance too often


class AutoPolicy:
    """Implements Policy."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        self._rows, self._capacity = rows, capacity_blocks
        self._hazard = HazardPolicy(rows=rows, capacity_blocks=capacity_blocks)
        self._other: Policy | None = None  # in charge, where the hazard policy is not
        self.in_charge = _FIRST
        self.floor = Floor(places=self._hazard.most_places, capacity_blocks=capacity_blocks)
        self.shadows = Shadows(_OTHERS, capacity_blocks)
        self._understudy: Shadows | None = None  # of the hazard policy, while that is not in charge
        self._names = np.zeros(rows, dtype=np.uint64)
        self._depths = np.zeros(rows, dtype=np.uint32)
        self._waiting: Sequence[Rows] = ()

    def __len__(self) -> int:
        return len(self._hazard)

    def use(self, use: Use) -> None:
        """Touches and inserts, in the shadows too."""
        self._hazard.use(use)
        gain = self.floor.use(self._hazard.places, self._hazard.known, ~use.fresh)
        if self._other is not None:
            self._other.use(use)
        self._names[use.rows] = use.names
        self._depths[use.rows] = use.depths
        if self.in_charge != _FLOOR and self.floor.broken:
            self._hand_over(_FLOOR)
        if self.shadows.use(use, gain):
            self._judge()
        if self._understudy is not None and self._understudy.use(use, gain):
            lead = self._understudy.lead(_FIRST)
            if lead.blocks > self.floor.price:
                self._hand_over(_FIRST)

    def ended(self, rows: Rows, stop: Stop) -> None:
        """For who learns from it."""
        self._hazard.ended(rows, stop)
        if self._understudy is not None:
            self._understudy.ended(self._names[rows], stop)

    def expect(self, waiting: Sequence[Rows]) -> None:
        """For whoever is in charge."""
        self._waiting = waiting
        self._charged().expect(waiting)

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        """As the one in charge says."""
        found = self._charged().victims(count, now_s, may_go)
        if self._other is not None:
            self._hazard.remove(found)
        self.floor.trim(len(self))
        return found

    def remove(self, rows: Rows) -> None:
        """From all."""
        self.floor.remove(self._hazard.find(self._names[rows[self._hazard.has(rows)]]))
        self._hazard.remove(rows)
        if self._other is not None:
            self._other.remove(rows)

    def hit_rates(self) -> Mapping[str, float]:
        """See Chooser."""
        shadows = self.shadows
        if not shadows.seen:
            return {}
        rates = {name: hits / shadows.seen for name, hits in shadows.hits.items()}
        if self._understudy is not None and self._understudy.seen:
            rates[_FIRST] = self._understudy.hits[_FIRST] / self._understudy.seen
        return rates | {self.in_charge: (shadows.hits[_FLOOR] + shadows.gain) / shadows.seen}

    def check_integrity(self) -> None:
        """Raises AssertionError where policies differ in what is cached. O(rows)."""
        self._hazard.check_integrity()
        self.floor.check_integrity()
        if self._other is not None:
            self._other.check_integrity()
            assert len(self._other) == len(self)

    def _charged(self) -> Policy:
        return self._hazard if self._other is None else self._other

    def _judge(self) -> None:
        shadows = self.shadows
        if shadows.seen < _FEWEST_SEEN:
            return
        best = max(shadows.hits, key=shadows.hits.__getitem__)
        lead = shadows.lead(best)
        clear = lead.share > _MARGIN and lead.deviations > _DEVIATIONS
        if clear and best != self.in_charge and lead.blocks > self.floor.price:
            self._hand_over(best)

    def _hand_over(self, name: str) -> None:
        self._charged().expect(())
        self.in_charge = name
        self._other = None if name == _FIRST else self._made(_OTHERS[name])
        self._charged().expect(self._waiting)
        self.floor.settle()
        self.shadows.begin_anew()
        if name == _FIRST:
            self._understudy = None
        elif self._understudy is None:
            small = partial(HazardPolicy, teacher=self._hazard)
            self._understudy = Shadows(
                {_FLOOR: LruPolicy, _FIRST: small}, self._capacity, blocks=_UNDERSTUDY_BLOCKS
            )
        else:
            self._understudy.begin_anew()

    def _made(self, factory: PolicyFactory) -> Policy:
        """A policy that knows what is cached, and in which order it was used. O(rows)."""
        policy = factory(rows=self._rows, capacity_blocks=self._capacity)
        rows = self._hazard.in_order()[::-1]  # a use goes head first
        if len(rows):
            policy.use(
                Use(
                    rows=rows,
                    fresh=np.ones(len(rows), dtype=np.bool_),
                    names=self._names[rows],
                    depths=self._depths[rows],
                    now_s=0.0,
                    prompt_blocks=len(rows),
                )
            )
        return policy
