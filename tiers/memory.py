"""Storage in this process's own memory: the twin of the NVMe tier, for tests and for machines without a disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import NotFound, ResourceExhausted
from kvstore.moves import MoveKind, MoveStatus
from kvstore.units import format_size
from kvstore.wire.packed import REPLY
from tiers.base import MemoryTier, Moves, Replies
from tiers.nvme.slab import slots_in, stride_bytes
from tiers.nvme.trailer import checksum

__all__ = ["MemoryStorage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    identity: bytes
    payload: bytes
    checksum: bytes


@dataclass(slots=True, kw_only=True)
class _Slab:
    number: int
    nbytes: int
    slot_bytes: int
    blocks: dict[int, _Block]  # by offset


class MemoryStorage:
    """StorageTier that ends with the process. Slabs are named as on disk: one reopened by number has its blocks."""

    def __init__(self, memory: MemoryTier, *, capacity_bytes: int) -> None:
        self._memory = memory
        self._capacity_bytes = capacity_bytes
        self._slabs: dict[int, _Slab] = {}  # by extent
        self._by_number: dict[int, _Slab] = {}
        self._lock = threading.Lock()

    def open_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int) -> None:
        """See StorageTier."""
        slab = self._by_number.get(number)
        if slab is None:
            taken = sum(other.nbytes for other in self._by_number.values())
            if taken + nbytes > self._capacity_bytes:
                raise ResourceExhausted(f"no space for a slab of {format_size(nbytes)} in memory")
            slab = _Slab(number=number, nbytes=nbytes, slot_bytes=slot_bytes, blocks={})
            self._by_number[number] = slab
        self._slabs[extent] = slab

    def drop_slab(self, extent: int) -> None:
        """See StorageTier."""
        slab = self._slabs.pop(extent, None)
        if slab is None:
            raise NotFound(f"no slab is open as extent {extent}")
        del self._by_number[slab.number]

    def pieces(self, moves: Moves) -> Sequence[Moves]:
        """See StorageTier."""
        return [moves[at : at + 1] for at in range(len(moves))]

    def calls(self, moves: Moves) -> int:
        """See StorageTier: one a block."""
        return len(moves)

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier."""
        replies = np.zeros(len(moves), dtype=REPLY)
        replies["id"] = moves["id"]
        for i in range(len(moves)):
            status, digest = self._move(moves[i])
            replies["status"][i] = status
            replies["checksum"][i] = np.frombuffer(digest, dtype="<u8")
        return replies

    def sync(self) -> None:
        """See StorageTier."""

    def close(self) -> None:
        """See StorageTier."""
        self._slabs.clear()

    def _move(self, move: np.void) -> tuple[MoveStatus, bytes]:
        slab = self._slabs.get(int(move["nvme_extent"]))
        offset, length = int(move["nvme_offset"]), int(move["length"])
        stride = stride_bytes(length)
        if slab is None or length != slab.slot_bytes or offset % stride:
            return MoveStatus.IO_ERROR, bytes(16)
        if offset // stride >= slots_in(slab.nbytes, length):
            return MoveStatus.IO_ERROR, bytes(16)
        try:
            view = self._memory.view(int(move["dram_extent"]))
        except NotFound:
            return MoveStatus.IO_ERROR, bytes(16)
        start = int(move["dram_offset"])
        payload = view[start : start + length]
        if len(payload) != length:
            return MoveStatus.IO_ERROR, bytes(16)
        identity = b"".join(move[name].tobytes() for name in ("hash", "ns_digest", "generation"))
        if int(move["kind"]) == MoveKind.WRITE:
            digest = move["checksum"].tobytes() if move["unread"] else checksum(payload)
            block = _Block(identity=identity, payload=bytes(payload), checksum=digest)
            with self._lock:
                slab.blocks[offset] = block
            return MoveStatus.OK, block.checksum
        with self._lock:
            found = slab.blocks.get(offset)
        if (
            found is None
            or found.identity != identity
            or not (move["unread"] or checksum(memoryview(found.payload)) == found.checksum)
        ):
            return MoveStatus.CORRUPT, bytes(16)
        payload[:] = found.payload
        return MoveStatus.OK, found.checksum
