"""The host-memory twin of a device's HBM: the same contract and the same address layout without a GPU.

All extents of a device lie in one reserved address range, back to back in the order in which they came, so that
extents that are whole numbers of slots form one strided array; the hole of a dropped extent is used again first.
"""

from __future__ import annotations

from kvstore.errors import NotFound, ResourceExhausted
from kvstore.units import format_size
from tiers.base import PAGE_BYTES
from tiers.memfd import MemfdTier, map_memory, reserve, unmap

__all__ = ["TwinTier"]


class TwinTier(MemfdTier):
    """MemoryTier of one device. `capacity_bytes` bounds all its extents together; reserving them takes no memory."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("hbm")
        self._capacity_bytes = -(-capacity_bytes // PAGE_BYTES) * PAGE_BYTES
        self._base = reserve(self._capacity_bytes)
        self._places: dict[int, tuple[int, int]] = {}  # extent → [begin, end) in the range

    @property
    def base(self) -> int:
        """Address of the reserved range."""
        return self._base

    def offset(self, extent: int) -> int:
        """Bytes from `base` to the extent. Raises NotFound."""
        if extent not in self._places:
            raise NotFound(f"hbm extent {extent} is not mapped")
        return self._places[extent][0]

    def close(self) -> None:
        """Drops every extent and gives the address range back."""
        super().close()
        if self._base:
            unmap(self._base, self._capacity_bytes)
            self._base = 0

    def _map(self, extent: int, fd: int, nbytes: int) -> int:
        begin = self._first_gap(nbytes)
        address = map_memory(fd, nbytes, self._base + begin)
        self._places[extent] = (begin, begin + nbytes)
        return address

    def _unmap(self, extent: int, address: int, nbytes: int) -> None:
        del self._places[extent]
        reserve(nbytes, address)  # over the mapping: the range stays ours, a late access is a SIGSEGV

    def _first_gap(self, nbytes: int) -> int:
        begin = 0
        for taken_from, taken_to in sorted(self._places.values()):
            if taken_from - begin >= nbytes:
                break
            begin = taken_to
        if begin + nbytes > self._capacity_bytes:
            raise ResourceExhausted(
                f"no room for {format_size(nbytes)} in {format_size(self._capacity_bytes)} of the device"
            )
        return begin
