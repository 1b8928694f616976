"""A numpy array as the pages of a block manager."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import Pages

__all__ = ["pages_of"]


def pages_of(memory: NDArray[np.uint8]) -> Pages:
    """`[num_pages, page_bytes]` as pages in host memory."""
    count, page_bytes = memory.shape
    return Pages(address=memory.ctypes.data, count=count, page_bytes=page_bytes, device="cpu", owner=memory)
