"""Whether blocks that this engine's requests have were found wrong: seen in the shared tables, without a call.

The daemon marks slots whose block turned out to be wrong while somebody held them, and counts that. What was computed
with such a block is as wrong, and the store publishes nothing of an engine that holds one: so a request that has one
gives its pages back. Any thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Session
from kvstore.layout import Columns, SlotState, Tier, states

__all__ = ["WrongBlocks"]


class WrongBlocks:
    """Of one session."""

    __slots__ = ("_heard", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._heard = 0

    def news(self) -> bool:
        """Whether any slot was marked since the last call."""
        heard, self._heard = self._heard, int(self._columns.distrusts[0])
        return heard != self._heard

    def among(self, slots: NDArray[np.uint32]) -> bool:
        """Whether one of these HBM slots, which the session holds, is marked. O(n), and O(1) where none ever was."""
        columns = self._columns
        if not columns.distrusts[0]:
            return False
        return bool((states(columns.pool(Tier.HBM).state[slots]) == SlotState.DISTRUSTED).any())

    @property
    def _columns(self) -> Columns:
        return self._session.tables.tables.columns
