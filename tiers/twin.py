"""The host-memory twin of a device's HBM: the same contract and the same address layout without a GPU.

All extents of a device lie in one reserved address range, back to back in the order in which they came, so that
extents that are whole numbers of slots form one strided array; the hole of a dropped extent is used again first. A
twin without sharing stands for a driver that cannot export memory: what it makes is lost with the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import NotFound
from kvstore.units import MIB
from tiers.base import PAGE_BYTES, DeviceTier, Sharing
from tiers.gaps import first_gap
from tiers.memfd import MemfdTier, available_memory_bytes, create_memfd, map_memory, reserve, unmap
from tiers.placeholders import Placeholders

__all__ = ["TwinDevice", "TwinTier", "boot_id"]

_EXTENT_BYTES = 64 * MIB


def boot_id() -> str:
    """Names this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class TwinDevice:
    """Device of host memory."""

    kind = "twin"
    uuid = ""
    granularity_bytes = PAGE_BYTES
    extent_bytes = _EXTENT_BYTES

    def __init__(self, sharing: Sharing = Sharing.DESCRIPTORS) -> None:
        self._sharing = sharing

    @property
    def identity(self) -> str:
        """See Device."""
        return f"twin {boot_id()}"

    def free_bytes(self) -> int:
        """See Device."""
        return available_memory_bytes()

    def reserve(self, capacity_bytes: int) -> DeviceTier:
        """See Device."""
        return TwinTier(capacity_bytes, self._sharing)

    def close(self) -> None:
        """See Device."""


class TwinTier(MemfdTier):
    """DeviceTier, and MemoryTier, of one device's twin. Reserving `capacity_bytes` takes no memory."""

    device = "cpu"

    def __init__(self, capacity_bytes: int, sharing: Sharing = Sharing.DESCRIPTORS) -> None:
        super().__init__("hbm")
        self.sharing = sharing
        self.capacity_bytes = -(-capacity_bytes // PAGE_BYTES) * PAGE_BYTES
        self._base = reserve(self.capacity_bytes)
        self._places: dict[int, tuple[int, int]] = {}  # extent → [begin, end) in the range
        self._plain: Placeholders[int] = Placeholders()  # to memfds that only this process has

    @property
    def base(self) -> int:
        """See DeviceTier."""
        return self._base

    def new_extent(self, nbytes: int) -> int:
        """See DeviceTier."""
        fd = create_memfd("kvstore-hbm", nbytes)
        return fd if self.sharing is Sharing.DESCRIPTORS else self._plain.add(fd)

    def discard(self, fd: int) -> None:
        """See DeviceTier."""
        os.close(self._memory_of(fd))

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        """See DeviceTier."""
        super().adopt(extent, self._memory_of(fd), nbytes)

    def adopt_all(self, extents: Sequence[tuple[int, int, int]]) -> None:
        """See DeviceTier."""
        for place, (extent, fd, nbytes) in enumerate(extents):
            try:
                self.adopt(extent, fd, nbytes)
            except BaseException:
                for _, left, _ in extents[place + 1 :]:
                    self.discard(left)
                raise

    def offset(self, extent: int) -> int:
        """See DeviceTier."""
        if extent not in self._places:
            raise NotFound(f"hbm extent {extent} is not mapped")
        return self._places[extent][0]

    def read(self, address: int, nbytes: int) -> bytes:
        """See DeviceTier."""
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """See DeviceTier."""
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        """See DeviceTier."""
        super().close()
        for fd in self._plain.take_all():
            os.close(fd)
        if self._base:
            unmap(self._base, self.capacity_bytes)
            self._base = 0

    def _memory_of(self, fd: int) -> int:
        """The memfd behind a descriptor: itself, or what a placeholder of ours stands for (which is closed)."""
        memory = self._plain.take(fd)
        if memory is None:
            return fd
        os.close(fd)
        return memory

    def _map(self, extent: int, fd: int, nbytes: int) -> int:
        begin = first_gap(self._places.values(), nbytes, self.capacity_bytes)
        address = map_memory(fd, nbytes, self._base + begin)
        self._places[extent] = (begin, begin + nbytes)
        return address

    def _unmap(self, extent: int, address: int, nbytes: int) -> None:
        del self._places[extent]
        reserve(nbytes, address)  # over the mapping: the range stays ours, a late access is a SIGSEGV
