"""Bytes of a block as a function of its hash, so that every served block can be checked against what must be in it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["block_bytes", "describes_itself", "expected", "private_bytes"]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def block_bytes(hash_: NDArray[np.uint64], nbytes: int) -> NDArray[np.uint8]:
    """The `nbytes` (a multiple of 8) of the block with this hash `[2]`; the hash itself comes first."""
    with np.errstate(over="ignore"):
        words = np.arange(nbytes // 8, dtype=np.uint64) * (_STEP ^ hash_[0]) + hash_[1]
        words ^= words >> np.uint64(29)
    words[:2] = hash_
    return words.view(np.uint8)


def expected(hash_: NDArray[np.uint64], page: NDArray[np.uint8]) -> bool:
    """Whether a page holds exactly the block of this hash."""
    return bool((page == block_bytes(hash_, len(page))).all())


def describes_itself(page: NDArray[np.uint8]) -> bool:
    """Whether a page holds the whole block of the hash that stands at its start, whichever that is."""
    return expected(page[:16].copy().view(np.uint64), page)


def private_bytes(seed: int, page: int, nbytes: int) -> NDArray[np.uint8]:
    """What a request writes into a page that is not full yet."""
    return block_bytes(np.array([seed, page ^ 0x5EED], dtype=np.uint64), nbytes)
