"""DRAM: memfd extents, each mapped wherever the kernel puts it."""

from __future__ import annotations

from tiers.memfd import MemfdTier, map_memory, unmap

__all__ = ["DramTier"]


class DramTier(MemfdTier):
    """MemoryTier of host memory."""

    def __init__(self) -> None:
        super().__init__("dram")

    def _map(self, extent: int, fd: int, nbytes: int) -> int:  # noqa: ARG002 (the place is the kernel's choice)
        return map_memory(fd, nbytes)

    def _unmap(self, extent: int, address: int, nbytes: int) -> None:  # noqa: ARG002
        unmap(address, nbytes)
