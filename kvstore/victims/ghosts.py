"""Blocks that were lost, with the cause: what `explain` says when a prompt is a miss.

A ring of fixed size in plain arrays; noting is O(n), looking up O(size) and only done for people.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import U64, MissCause

__all__ = ["Ghosts"]


class Ghosts:
    """The last `size` lost blocks."""

    __slots__ = ("_at", "_causes", "_hashes")

    def __init__(self, size: int) -> None:
        self._hashes: U64 = np.zeros((size, 2), dtype=np.uint64)
        self._causes: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self._at = 0

    def note(self, hashes: U64, cause: MissCause) -> None:
        """These blocks are gone."""
        size = len(self._causes)
        hashes = hashes[-size:]
        at = (self._at + np.arange(len(hashes))) % size
        self._hashes[at] = hashes
        self._causes[at] = cause
        self._at = (self._at + len(hashes)) % size

    def cause(self, wanted: U64) -> MissCause:
        """Why the block `wanted` ([2]) is not cached; the latest note counts."""
        size = len(self._causes)
        hits = np.flatnonzero((self._hashes[:, 0] == wanted[0]) & (self._hashes[:, 1] == wanted[1]))
        if not len(hits):
            return MissCause.NEVER_STORED
        age = (self._at - 1 - hits) % size
        return MissCause(int(self._causes[hits[age.argmin()]]))
