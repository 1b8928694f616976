"""Copies blocks in host memory and takes their checksums on the way: compiled, or in Python in two passes.

The checksum is that of `tiers.nvme.trailer`, so what a copy says of a block is what storage writes behind it. Owns no
memory: whoever calls vouches for the addresses. Thread-safe; without the GIL, but for the hand-over.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from tiers.nvme.trailer import checksum

try:
    from kvstore._summed_copy import copy as _copy
except ImportError:  # built without a C compiler
    _copy = None  # type: ignore[assignment]

_IS_COMPILED = _copy is not None

__all__ = ["checksums_at", "copy_summed", "copy_summed_in_python"]

U64 = NDArray[np.uint64]


def copy_summed(targets: U64, sources: U64, nbytes: int) -> U64:
    """Copies blocks of `nbytes` from and to these addresses [n], none of which overlap: their checksums, [n, 2]."""
    if not _IS_COMPILED:
        return copy_summed_in_python(targets, sources, nbytes)
    sums: U64 = np.empty((len(targets), 2), dtype=np.uint64)
    _copy(np.ascontiguousarray(targets), np.ascontiguousarray(sources), nbytes, sums)
    return sums


def copy_summed_in_python(targets: U64, sources: U64, nbytes: int) -> U64:
    """See copy_summed. The checksum is that of what the target has then."""
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)
    return checksums_at(targets, nbytes)


def checksums_at(addresses: U64, nbytes: int) -> U64:
    """[n, 2] of blocks that stay where they are."""
    digests = [
        checksum(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))
        for address in addresses.tolist()
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2).copy()
