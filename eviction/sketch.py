"""How often names were used lately, in a table that is much smaller than the names: a count-min sketch that ages.

Cormode and Muthukrishnan, "An improved data stream summary", 2005; ageing by halving as in Einziger, Friedman, Manes,
"TinyLFU", 2017. Counts of names that share a cell in all lines are too high, never too low but by what halving took.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sketch"]

_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)
"""Odd, of one line each."""
_LINES = len(_FACTORS)
_MOST = 15  # four bits are enough to tell often from seldom
_CELLS_A_BLOCK = 4
_SAMPLE_BLOCKS = 10  # uses for each block of capacity, and all counts are halved


class Sketch:
    """Counts up to 15."""

    __slots__ = ("_cells", "_shift", "_until_halved", "_uses")

    def __init__(self, capacity_blocks: int) -> None:
        bits = max(_CELLS_A_BLOCK * capacity_blocks - 1, 63).bit_length()
        self._cells = np.zeros((_LINES, 1 << bits), dtype=np.uint8)
        self._shift = np.uint64(64 - bits)
        self._uses = 0
        self._until_halved = _SAMPLE_BLOCKS * max(capacity_blocks, 1)

    def add(self, names: NDArray[np.uint64]) -> None:
        """One more use of each; distinct names."""
        for line, where in zip(self._cells, self._where(names), strict=True):
            line[where] = np.minimum(line[where] + 1, _MOST)
        self._uses += len(names)
        if self._uses >= self._until_halved:
            self._cells >>= 1
            self._uses //= 2

    def count(self, names: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """[n] uses of each."""
        where = self._where(names)
        found: NDArray[np.uint8] = self._cells[np.arange(_LINES)[:, None], where].min(axis=0)
        return found

    def _where(self, names: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[lines, n] cells."""
        mixed = names ^ (names >> np.uint64(32))
        return (mixed[None, :] * _FACTORS[:, None]) >> self._shift
