"""First in, first out: what was inserted first goes first, however often it was used since."""

from __future__ import annotations

import numpy as np

from eviction.base import Use
from eviction.in_order import InOrderPolicy

__all__ = ["FifoPolicy"]


class FifoPolicy(InOrderPolicy):
    """Implements Policy. Blocks inserted together go head first, as they came.

    A prompt is inserted block after block: what of its own has to leave for that is a miss by then, and inserted again.
    """

    def _used(self, use: Use) -> None:
        self._order.append(use.rows[use.fresh])
        again = use.rows[~use.fresh]
        while len(again) and (over := len(self._order) - self.capacity_blocks) > 0:
            leaving = np.isin(again, self._order.first(over))
            if not leaving.any():
                break
            self._order.append(again[leaving])
            again = again[~leaving]
