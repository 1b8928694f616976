"""Sizes that were given at run time and last as long as the service: in memory that the keeper holds.

What lasts longer is noted on disk (`kvstore.daemon.space`).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import numpy as np

from tiers.memfd import create_memfd

__all__ = ["Sizes"]

_BYTES = 4096


class Sizes:
    """One page. Owner loop only."""

    NAME = "sizes"

    def __init__(self, inherited: Mapping[str, int]) -> None:
        """`inherited`: descriptors of the daemon before; without them nothing was resized."""
        self.fd = inherited[self.NAME] if self.NAME in inherited else create_memfd("kvstore-sizes", _BYTES)
        self._numbers = np.frombuffer(mmap.mmap(self.fd, _BYTES), dtype="<u8")

    @property
    def dram_bytes(self) -> int:
        """What DRAM was resized to; 0: it was not."""
        return int(self._numbers[0])

    @dram_bytes.setter
    def dram_bytes(self, nbytes: int) -> None:
        self._numbers[0] = nbytes
