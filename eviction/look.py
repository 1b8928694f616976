"""A bounded look at what may go: whoever owns a cache is asked after so many rows a call, and no more.

What may not go can be anything: half of a cache held, all of it, all but one block. A policy that looked for the rest
in its order would stop its owner for as long as that takes. So it names fewer, and goes on there in its next call.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows

__all__ = ["Look"]

_FEWEST_AT_ONCE = 1024
_MOST_AT_ONCE = 10  # times as many in one call: three queues, each at its front, by a sample and further on


class Look:
    """A MayGo for one call of a policy, who heeds `left`."""

    __slots__ = ("_may_go", "_next_use", "at_once", "left", "saw_all")

    def __init__(self, may_go: MayGo, count: int, next_use: NDArray[np.int64] | None = None) -> None:
        """`count` victims are wanted; `next_use`: [rows] not 0: somebody waits for it, known without asking."""
        self._may_go, self._next_use = may_go, next_use
        self.at_once = max(count, _FEWEST_AT_ONCE)
        """Rows that one part of an order is to be looked at before something else is tried."""
        self.left = _MOST_AT_ONCE * self.at_once
        """Rows that may be asked after yet."""
        self.saw_all = True
        """False: there may be rows that were not asked after."""

    @property
    def sampled(self) -> int:
        """Rows of a sample by which to find where something may go."""
        return max(min(self.at_once // 2, self.left), 1)

    @property
    def unexpected(self) -> MayGo | None:
        """Whether nobody waits for each; None: nobody waits for any."""
        next_use = self._next_use
        return None if next_use is None else lambda rows: next_use[rows] == 0

    def unexpected_of(self, rows: Rows) -> Rows:
        """Of these what nobody waits for."""
        return rows if self._next_use is None else rows[self._next_use[rows] == 0]

    def __call__(self, rows: Rows) -> NDArray[np.bool_]:
        """[n] whether each may go."""
        if self._next_use is None:
            self.left -= len(rows)
            return self._may_go(rows)
        good: NDArray[np.bool_] = self._next_use[rows] == 0
        unexpected = rows[good]
        if len(unexpected):
            self.left -= len(unexpected)
            good[good] = self._may_go(unexpected)
        return good
