"""Carries out moves of one slab, one kind and one length: compiled from kvstore/native/slab_io.c, or in Python.

Neighbours on the disk are one vectored call straight from or into their DRAM slots, with the trailers between them in
pages of the calling thread. A write's checksum is taken just before its call, a read's just behind it. After a call
that got nowhere each slot is tried by itself: a kernel may fail a whole call for one bad sector in it, and a bad sector
costs its own block only.

Both do the same; the compiled one needs no interpreter for a whole batch. In Python a block costs 100 µs beside the
disk, which for 256 KiB is more than the disk takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import MOVE, REPLY
from tiers.base import MemoryTier, Moves, Replies
from tiers.nvme.slab import Slab, stride_bytes
from tiers.nvme.trailer import TRAILER_BYTES, Trailer, checksum, read_trailer, write_trailer

try:
    from kvstore._slab_io import transfer as _transfer
except ImportError:  # built without a C compiler
    _transfer = None  # type: ignore[assignment]

__all__ = ["IS_COMPILED", "MAX_RUN_SLOTS", "SHORT", "Carried", "Carry", "carry", "carry_in_python"]

IS_COMPILED = _transfer is not None
"""Whether the compiled one is in use. It releases the interpreter lock for the whole batch."""
MAX_RUN_SLOTS = 512
"""Most slots in one call: two buffers each, and IOV_MAX is 1024."""
SHORT = -1
"""The fault of a call that moved fewer bytes than a slot, and raised no error."""

# A move as a plain tuple: where numpy costs 100 µs a move, tuples cost 10.
_Row = tuple[int, int, int, int, int, bytes, bytes, bytes]
_MOVE_FIELDS = MOVE.fields
assert _MOVE_FIELDS is not None
_ROW_FIELDS = {
    "dram_extent": "<u2",
    "dram_offset": "<u8",
    "nvme_offset": "<u8",
    "generation": "<u4",
    "depth": "<u4",
    "hash": "V16",
    "parent": "V16",
    "ns_digest": "V16",
}
_ROW = np.dtype(
    {
        "names": list(_ROW_FIELDS),
        "formats": list(_ROW_FIELDS.values()),
        "offsets": [_MOVE_FIELDS[name][1] for name in _ROW_FIELDS],
        "itemsize": MOVE.itemsize,
    }
)


@dataclass(frozen=True, slots=True)
class Carried:
    """What became of moves, one element for each. `faults`: 0, an errno, or SHORT; what is CORRUPT has none."""

    replies: Replies
    faults: NDArray[np.int32]


class Carry(Protocol):
    """How moves are carried out."""

    def __call__(
        self, slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int, /
    ) -> Carried:
        """Blocks. `moves` are sorted by their place in the slab, within it, and within mapped memory.

        `pages`: page-aligned scratch of the calling thread for `MAX_RUN_SLOTS` trailers.
        """
        ...


def carry(slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int) -> Carried:
    """See Carry: compiled where there is a compiled one and the slab is a file of the system's, past the page cache."""
    if _transfer is None or slab.descriptor is None:
        return carry_in_python(slab, moves, memory, pages, written_ms)
    replies = np.empty(len(moves), dtype=REPLY)
    faults = np.empty(len(moves), dtype=np.int32)
    kind = int(moves["kind"][0])
    addresses = memory.addresses(moves["dram_extent"], moves["dram_offset"])
    _transfer(slab.descriptor, kind, moves.data, addresses.data, pages, written_ms, replies.data, faults.data)
    if kind == MoveKind.WRITE:
        slab.dirty = True  # after it: a sync between would take the mark away and not have the bytes
    return Carried(replies, faults)


def carry_in_python(
    slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int
) -> Carried:
    """See Carry."""
    replies = np.zeros(len(moves), dtype=REPLY)
    replies["id"] = moves["id"]
    faults = np.zeros(len(moves), dtype=np.int32)
    writes = int(moves["kind"][0]) == MoveKind.WRITE
    stride = stride_bytes(slab.file.slot_bytes)
    offsets = moves["nvme_offset"]
    ends = [*(np.flatnonzero(offsets[1:] != offsets[:-1] + np.uint64(stride)) + 1).tolist(), len(moves)]
    begin = 0
    for end in ends:
        for at in range(begin, end, MAX_RUN_SLOTS):
            part = slice(at, min(at + MAX_RUN_SLOTS, end))
            run = _Run(slab, moves[part], memory, pages)
            statuses, digests = run.write(written_ms) if writes else run.read()
            replies["status"][part] = statuses
            replies["checksum"][part] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
            faults[part] = run.faults
        begin = end
    return Carried(replies, faults)


class _Run:
    """Neighbours on the disk, and the buffers of one call for all of them: payload, trailer, payload, trailer, …"""

    __slots__ = ("buffers", "faults", "rows", "slab")

    def __init__(self, slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview) -> None:
        self.slab = slab
        self.rows: list[_Row] = moves.view(_ROW).tolist()
        self.faults = [0] * len(self.rows)
        length = slab.file.slot_bytes
        self.buffers: list[memoryview] = []
        for at, (extent, offset, *_) in enumerate(self.rows):
            self.buffers.append(memory.view(extent)[offset : offset + length])
            self.buffers.append(pages[at * TRAILER_BYTES : (at + 1) * TRAILER_BYTES])

    def write(self, written_ms: int) -> tuple[list[MoveStatus], list[bytes]]:
        """Status and checksum of each block."""
        digests = [checksum(payload) for payload in self.buffers[::2]]
        for row, page, digest in zip(self.rows, self.buffers[1::2], digests, strict=True):
            write_trailer(page, _trailer(row, self.slab.file.slot_bytes, written_ms, digest))
        self._call(self.slab.write)
        return [MoveStatus.IO_ERROR if fault else MoveStatus.OK for fault in self.faults], digests

    def read(self) -> tuple[list[MoveStatus], list[bytes]]:
        """Status and checksum of each block."""
        self._call(self.slab.read)
        statuses: list[MoveStatus] = []
        digests: list[bytes] = []
        for at, (row, fault) in enumerate(zip(self.rows, self.faults, strict=True)):
            if fault:
                statuses.append(MoveStatus.IO_ERROR)
                digests.append(bytes(16))
                continue
            digests.append(checksum(self.buffers[2 * at]))
            found = read_trailer(self.buffers[2 * at + 1])
            whole = found is not None and found == _trailer(
                row, self.slab.file.slot_bytes, found.written_ms, digests[-1], like=found
            )
            statuses.append(MoveStatus.OK if whole else MoveStatus.CORRUPT)
        return statuses, digests

    def _call(self, call: Callable[[list[memoryview], int], int]) -> None:
        """Moves the run in as few calls as it takes, and notes the fault of each slot that did not go through."""
        stride = stride_bytes(self.slab.file.slot_bytes)
        at, most = 0, len(self.rows)
        while at < len(self.rows):
            end = min(at + most, len(self.rows))
            try:
                whole = call(self.buffers[2 * at : 2 * end], self.rows[at][2]) // stride
                fault = SHORT
            except OSError as error:
                whole, fault = 0, error.errno or SHORT
            if not whole and end - at > 1:
                most = 1
                continue
            if not whole:
                self.faults[at] = fault
            at += max(1, whole)


def _trailer(
    row: _Row, length: int, written_ms: int, digest: bytes, *, like: Trailer | None = None
) -> Trailer:
    """The trailer of a move. What a read does not know for certain, depth and parent, is taken from `like`."""
    _, _, offset, generation, depth, block_hash, parent, ns_digest = row
    return Trailer(
        generation,
        offset,
        length,
        depth if like is None else like.depth,
        written_ms,
        block_hash,
        parent if like is None else like.parent,
        ns_digest,
        digest,
    )
