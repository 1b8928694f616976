"""The host memory that this process has pinned for one device: DRAM extents, as they come and go.

`register` and `unregister` are what a session calls when it maps and unmaps an extent, on whichever thread does that
(0.05 s a GiB that was touched before). Readers see one immutable snapshot, so they take no lock.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.cuda_driver import CudaDriver
from kvstore.errors import KvstoreError
from kvstore.units import format_size

__all__ = ["PinnedHost"]

U64 = NDArray[np.uint64]

_LOG = logging.getLogger("kvstore.copier")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ranges:
    """[r] pinned ranges, by address."""

    starts: U64
    ends: U64
    seen: U64  # where kernels see the range

    def with_range(self, start: int, end: int, seen: int) -> _Ranges:
        rows = sorted(
            [
                *zip(self.starts.tolist(), self.ends.tolist(), self.seen.tolist(), strict=True),
                (start, end, seen),
            ]
        )
        table: U64 = np.asarray(rows, dtype=np.uint64).reshape(-1, 3)
        return _Ranges(starts=table[:, 0].copy(), ends=table[:, 1].copy(), seen=table[:, 2].copy())

    def without(self, start: int) -> _Ranges:
        keep = self.starts != np.uint64(start)
        return _Ranges(starts=self.starts[keep], ends=self.ends[keep], seen=self.seen[keep])


_NONE: U64 = np.empty(0, dtype=np.uint64)


class PinnedHost:
    """See the module. Any thread."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._ranges = _Ranges(starts=_NONE, ends=_NONE, seen=_NONE)

    def register(self, address: int, nbytes: int) -> None:
        """Pins a range. Where the driver refuses, copies from and to it go on, at the speed of pageable memory."""
        try:
            seen = self._driver.register(address, nbytes)
        except KvstoreError as error:
            _LOG.warning(
                "%s of host memory cannot be pinned, copies will be slow: %s", format_size(nbytes), error
            )
            return
        with self._lock:
            self._ranges = self._ranges.with_range(address, address + nbytes, seen)

    def unregister(self, address: int) -> None:
        """Unpins the range that begins at `address`, before it is unmapped; one that could not be pinned is ignored."""
        with self._lock:
            known = bool((self._ranges.starts == np.uint64(address)).any())
            self._ranges = self._ranges.without(address)
        if known:
            try:
                self._driver.unregister(address)
            except KvstoreError as error:  # a broken context: the process is about to end
                _LOG.warning("host memory at %#x was not unpinned: %s", address, error)

    @property
    def starts(self) -> U64:
        """[r] where ranges begin: no single copy may reach over one."""
        return self._ranges.starts

    def seen_by_kernels(self, addresses: U64) -> U64 | None:
        """[n] what kernels call these addresses; None where one is not pinned. O(n log r)."""
        ranges = self._ranges
        if not len(ranges.starts):
            return None
        place = np.searchsorted(ranges.starts, addresses, side="right") - 1
        if (place < 0).any() or (addresses >= ranges.ends[place]).any():
            return None
        seen: U64 = addresses - ranges.starts[place] + ranges.seen[place]
        return seen
