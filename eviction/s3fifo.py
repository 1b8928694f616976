"""S3-FIFO: a small queue that most blocks leave after one look, a main queue for those used again, and ghosts.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023, with its constants: the
small queue has a tenth of the cache, uses are counted to three, as many ghosts as the main queue holds.
"""

from __future__ import annotations

import numpy as np

from eviction.base import MayGo, Rows, Use
from eviction.ghosts import Ghosts
from eviction.look import Look
from eviction.order import Order
from eviction.waiting import CachePolicy

__all__ = ["S3FifoPolicy"]

_SMALL_SHARE = 10
_MOST_USES = 3
_USES_TO_STAY = 2  # in the small queue: fewer, and a block leaves it as a ghost


class S3FifoPolicy(CachePolicy):
    """Implements Policy. Blocks inserted together go tail first."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks)
        self._small, self._main = Order(rows), Order(rows)
        self._small_most = max(capacity_blocks // _SMALL_SHARE, 1)
        self._ghosts = Ghosts(capacity_blocks=capacity_blocks)
        self._uses = np.zeros(rows, dtype=np.int8)
        self._name = np.zeros(rows, dtype=np.uint64)

    def _used(self, use: Use) -> None:
        touched = use.rows[~use.fresh]
        self._uses[touched] = np.minimum(self._uses[touched] + 1, _MOST_USES)
        fresh, names = use.rows[use.fresh][::-1], use.names[use.fresh][::-1]
        if not len(fresh):
            return
        self._uses[fresh] = 0
        self._name[fresh] = names
        known = self._ghosts.known(names)
        self._ghosts.discard(names[known])
        self._main.append(fresh[known])
        self._small.append(fresh[~known])

    def _choose(self, count: int, may_go: MayGo | None) -> Rows:
        parts, missing = [np.empty(0, dtype=np.uint32)], count
        small_may_go = True
        look = may_go if isinstance(may_go, Look) else None
        while missing > 0 and (len(self._small) or len(self._main)) and (look is None or look.left > 0):
            over = len(self._small) - self._small_most
            if small_may_go and (over > 0 or not len(self._main)):
                met = self._small.take(min(missing, max(over, 1)), may_go)
                small_may_go = len(met) > 0
                parts.append(self._out_of_small(met))
            else:
                met = self._main.take(min(missing, len(self._main)), may_go)
                if not len(met):
                    break
                parts.append(self._out_of_main(met))
            missing -= len(parts[-1])
        if missing > 0:  # what may go is all in the small queue
            parts.append(self._small.take(missing, may_go))
        return np.concatenate(parts)

    def _out_of_small(self, met: Rows) -> Rows:
        """Of the oldest, what leaves; what was used moves to the main queue."""
        stays = self._uses[met] >= _USES_TO_STAY
        self._uses[met[stays]] = 0
        self._main.append(met[stays])
        gone = met[~stays]
        self._ghosts.add(self._name[gone])
        self._ghosts.trim(max(self.capacity_blocks - self._small_most, 1))
        return gone

    def _out_of_main(self, met: Rows) -> Rows:
        """Of the oldest, what leaves; what was used goes round once more."""
        stays = self._uses[met] > 0
        self._uses[met[stays]] -= 1
        self._main.append(met[stays])
        return met[~stays]

    def _forget(self, rows: Rows) -> None:
        self._small.remove(rows)
        self._main.remove(rows)

    def check_integrity(self) -> None:
        """Raises AssertionError where queues and cache differ. O(rows)."""
        super().check_integrity()
        for order in (self._small, self._main):
            order.check_integrity()
            assert self._cached[order.rows()].all()
        assert len(self._small) + len(self._main) == len(self)
