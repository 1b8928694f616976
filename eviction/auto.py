"""`auto`: the policy that would have hit most often lately, by shadows, and never for long one that is worse than LRU.

Every candidate runs in a shadow (`shadow.py`) over the same sample of blocks; the cache follows the one in charge.
Another takes over when its shadow hit more often by a margin; LRU already when it hit more often at all. So what is
lost against LRU is bounded by what the shadows need to notice it: the half-life of their counts.

The hazard policy is told of every use whoever is in charge: it never stops learning, and it knows in which order blocks
were used, from which any other candidate is made when that takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from eviction.arc import ArcPolicy
from eviction.base import MayGo, Policy, PolicyFactory, Rows, Stop, Use
from eviction.hazard import HazardPolicy
from eviction.lru import LruPolicy
from eviction.s3fifo import S3FifoPolicy
from eviction.shadow import Shadows

__all__ = ["AutoPolicy"]

_FLOOR = "lru"
_FIRST = "hazard"  # what it has not learned yet it orders like LRU
_OTHERS: dict[str, PolicyFactory] = {_FLOOR: LruPolicy, "arc": ArcPolicy, "s3fifo": S3FifoPolicy}
_FEWEST_SEEN = 1024.0  # sampled blocks: before that nothing is changed
_MARGIN = 0.02  # of the sampled blocks: a change costs what the one in charge has learned, so it must pay
_FLOOR_MARGIN = 0.001
_DEVIATIONS = 3.0  # batches of one burst are not independent, so two would be exceeded by chance too often


class AutoPolicy:
    """Implements Policy."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        self._rows, self._capacity = rows, capacity_blocks
        self._hazard = HazardPolicy(rows=rows, capacity_blocks=capacity_blocks)
        self._other: Policy | None = None  # in charge, where the hazard policy is not
        self.in_charge = _FIRST
        in_small = partial(HazardPolicy, teacher=self._hazard)
        self.shadows = Shadows({_FIRST: in_small, **_OTHERS}, capacity_blocks)
        self._names = np.zeros(rows, dtype=np.uint64)
        self._depths = np.zeros(rows, dtype=np.uint32)
        self._waiting: Sequence[Rows] = ()

    def __len__(self) -> int:
        return len(self._hazard)

    def use(self, use: Use) -> None:
        """Touches and inserts, in the shadows too."""
        self._hazard.use(use)
        if self._other is not None:
            self._other.use(use)
        self._names[use.rows] = use.names
        self._depths[use.rows] = use.depths
        if self.shadows.use(use):
            self._judge()

    def ended(self, rows: Rows, stop: Stop) -> None:
        """For who learns from it."""
        self._hazard.ended(rows, stop)
        self.shadows.ended(self._names[rows], stop)

    def expect(self, waiting: Sequence[Rows]) -> None:
        """For whoever is in charge."""
        self._waiting = waiting
        self._charged().expect(waiting)

    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        """As the one in charge says."""
        found = self._charged().victims(count, now_s, may_go)
        if self._other is not None:
            self._hazard.remove(found)
        return found

    def remove(self, rows: Rows) -> None:
        """From all."""
        self._hazard.remove(rows)
        if self._other is not None:
            self._other.remove(rows)

    def hit_rates(self) -> Mapping[str, float]:
        """See Chooser."""
        seen = self.shadows.seen
        return {name: hits / seen for name, hits in self.shadows.hits.items()} if seen else {}

    def check_integrity(self) -> None:
        """Raises AssertionError where policies differ in what is cached. O(rows)."""
        self._hazard.check_integrity()
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
        for name, margin in ((best, _MARGIN), (_FLOOR, _FLOOR_MARGIN)):
            if name != self.in_charge:
                lead, deviations = shadows.lead(name, self.in_charge)
                if lead > margin and deviations > _DEVIATIONS:
                    self._hand_over(name)
                    return

    def _hand_over(self, name: str) -> None:
        self._charged().expect(())
        self.in_charge = name
        self._other = None if name == _FIRST else self._made(_OTHERS[name])
        self._charged().expect(self._waiting)

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
