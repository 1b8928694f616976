"""Which of many values come for the first time.

Most often all do, and are few: then a set says so in a third of the time that sorting takes. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["firsts"]

_FEW = 128
"""Up to so many a set is the faster (8: 1.4 µs for 4.3; 64: 3.1 for 4.9; 512: 18 for 12)."""


def firsts(values: NDArray[np.uint32] | NDArray[np.uint64]) -> NDArray[np.bool_]:
    """[n] the first of each value. O(n log n)."""
    if len(values) <= _FEW and len(set(values.tolist())) == len(values):
        return np.ones(len(values), dtype=np.bool_)
    first = np.zeros(len(values), dtype=np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first
