"""Rows and slots that lie behind each other, as a slice of their columns.

Both are given out in runs, so a chain mostly has one run of each. Through a slice a column is read without a gather and
written without a scatter: of 4,096 slots a bit is set in 1 µs instead of 47. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["span_of"]


def span_of(places: NDArray[np.uint32], limit: int) -> slice | None:
    """The slice that names these places of a column of `limit` entries, in order; None where none does.

    So it names no NONE, and none twice. O(n) where first and last could be the ends of a run, else O(1).
    """
    count = len(places)
    if not count:
        return slice(0, 0)
    first = int(places[0])
    end = first + count
    if int(places[-1]) != end - 1 or end > limit:
        return None
    if count > 2 and np.count_nonzero(places == np.arange(first, end, dtype=np.uint32)) != count:
        return None
    return slice(first, end)
