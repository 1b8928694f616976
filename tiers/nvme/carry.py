"""Carries out moves of one slab and one kind: compiled from kvstore/native/slab_io.c, or in Python.

Neighbours on the disk are one vectored call straight from or into their DRAM slots, with the trailers between them in
pages of the calling thread. A write's checksum is taken just before its call, a read's just behind it, and where calls
are queued, several at a time, while others are under way. A move that is `unread` has none taken: it is said by who
stored the block, and compared by who loads it. After a call
that got nowhere each slot is tried by itself: a kernel may fail a whole call for one bad sector in it, and a bad sector
costs its own block only. A move that names a place that is not there is refused by itself, too.

All do the same; the compiled ones need no interpreter for a whole batch. In Python a block costs 100 µs beside the
disk, which for 256 KiB is more than the disk takes; and what the interpreter needs is not in any cache any more when
some megabytes of blocks have passed, so that even what is left of it, once a piece, counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import NotFound
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import MOVE, REPLY
from tiers.base import MemoryTier, Moves, Replies
from tiers.nvme.slab import Slab, stride_bytes
from tiers.nvme.trailer import TRAILER_BYTES, Trailer, checksum, checksum_in, read_trailer, write_trailer

try:
    from kvstore._slab_io import is_queued as _is_queued
    from kvstore._slab_io import transfer as _transfer
except ImportError:  # built without a C compiler
    _is_queued = _transfer = None  # type: ignore[assignment]

__all__ = [
    "IS_COMPILED",
    "MAX_RUN_BYTES",
    "MAX_RUN_SLOTS",
    "NO_MEMORY",
    "NO_SLOT",
    "SHORT",
    "Carried",
    "Carry",
    "carry",
    "carry_in_python",
    "carry_in_turn",
    "is_queued",
]

IS_COMPILED = _transfer is not None
"""Whether the compiled one is in use. It releases the interpreter lock for the whole batch."""
MAX_RUN_SLOTS = 512
"""Most slots in one call: two buffers each, and IOV_MAX is 1024."""
MAX_RUN_BYTES = (4 << 20) + (64 << 10)
"""Most bytes in one call, but for a slot that is larger: two of 2 MiB with their trailers. More is no faster."""
SHORT = -1
"""The fault of a call that moved fewer bytes than a slot, and raised no error."""
NO_SLOT = -2
"""The fault of a move that names a place in the slab where no slot begins."""
NO_MEMORY = -3
"""The fault of a move that names memory that is not mapped."""
_WINDOW_BYTES = 48 << 20
"""What a thread may have under way where calls are queued. A disk was written at 0.94 of a plain loop's rate with 64
MiB and at 0.90 with 32: a thread comes late to its turn, and the disk must not be through with what it was given. A
read that comes beside writes waits for what the disk has: 8 MiB for 30 ms with 48 MiB in each of three threads, 43 ms
with 64. Smaller ones gain no processor time either: what a disk has just delivered is in no cache."""

# A move as a plain tuple: where numpy costs 100 µs a move, tuples cost 10.
_Row = tuple[int, int, int, int, int, bytes, bytes, bytes, int, bytes]
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
    "unread": "u1",
    "checksum": "V16",
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
    """What became of moves, one element for each. `faults`: 0, an errno, or one of the above; CORRUPT has none."""

    replies: Replies
    faults: NDArray[np.int32]
    failed: int
    """How many are not OK."""


class Carry(Protocol):
    """How moves are carried out."""

    def __call__(
        self, slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int, /
    ) -> Carried | None:
        """Blocks. None, with nothing done, where `moves` are not of one kind and slab by their places: cut them.

        `pages`: page-aligned scratch of the calling thread for `MAX_RUN_SLOTS` trailers.
        """
        ...


def carry(slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int) -> Carried | None:
    """See Carry: with several calls at a time, where the kernel has a queue for them. Else as `carry_in_turn`."""
    return _carry(slab, moves, memory, pages, written_ms, _WINDOW_BYTES)


def carry_in_turn(
    slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int
) -> Carried | None:
    """See Carry: one call after the other. Where there is nothing compiled, or another file, as `carry_in_python`."""
    return _carry(slab, moves, memory, pages, written_ms, 0)


def is_queued(fd: int, data: memoryview) -> bool:
    """Whether calls to an O_DIRECT file are under way when the kernel has taken them; else a queue gains nothing.

    Reads `data` (page-aligned; large, so that no disk is faster) from the start of the file.
    """
    return _is_queued is not None and _is_queued(fd, data)


def _carry(
    slab: Slab,
    moves: Moves,
    memory: MemoryTier,
    pages: memoryview,
    written_ms: int,
    window_bytes: int,
) -> Carried | None:
    if _transfer is None or slab.descriptor is None:
        return carry_in_python(slab, moves, memory, pages, written_ms)
    file = slab.file
    spans = memory.spans()
    replies = np.empty(len(moves), dtype=REPLY)
    faults = np.empty(len(moves), dtype=np.int32)
    failed = _transfer(
        slab.descriptor,
        file.slots,
        file.slot_bytes,
        np.ascontiguousarray(moves),
        spans.bases,
        spans.sizes,
        pages,
        written_ms,
        replies,
        faults,
        window_bytes,
    )
    if failed < 0:
        return None
    if int(moves["kind"][0]) == MoveKind.WRITE:
        slab.dirty = True  # after it: a sync between would take the mark away and not have the bytes
    return Carried(replies, faults, failed)


def carry_in_python(
    slab: Slab, moves: Moves, memory: MemoryTier, pages: memoryview, written_ms: int
) -> Carried | None:
    """See Carry."""
    if not _is_piece(moves):
        return None
    writes = int(moves["kind"][0]) == MoveKind.WRITE
    replies = np.zeros(len(moves), dtype=REPLY)
    replies["id"] = moves["id"]
    replies["status"] = MoveStatus.IO_ERROR
    faults = np.array([_missing(slab, move, memory) for move in moves], dtype=np.int32)
    for begin, end in _runs(slab, moves, faults):
        run = _Run(slab, moves[begin:end], memory, pages)
        statuses, digests = run.write(written_ms) if writes else run.read()
        replies["status"][begin:end] = statuses
        replies["checksum"][begin:end] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
        faults[begin:end] = run.faults
    return Carried(replies, faults, int((replies["status"] != MoveStatus.OK).sum()))


def _is_piece(moves: Moves) -> bool:
    alike = all(len(set(moves[name].tolist())) == 1 for name in ("kind", "nvme_extent", "length"))
    offsets = moves["nvme_offset"].tolist()
    return alike and offsets == sorted(offsets) and int(moves["kind"][0]) in set(MoveKind)


def _missing(slab: Slab, move: np.void, memory: MemoryTier) -> int:
    """The fault of a move that names what is not there; else 0."""
    stride = stride_bytes(slab.file.slot_bytes)
    offset, length = int(move["nvme_offset"]), int(move["length"])
    if length != slab.file.slot_bytes or offset % stride or offset // stride >= slab.file.slots:
        return NO_SLOT
    try:
        view = memory.view(int(move["dram_extent"]))
    except NotFound:
        return NO_MEMORY
    return NO_MEMORY if int(move["dram_offset"]) + length > len(view) else 0


def _runs(slab: Slab, moves: Moves, faults: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Neighbours that are there, as ranges, none larger than a call may be."""
    stride = stride_bytes(slab.file.slot_bytes)
    most = max(1, min(MAX_RUN_SLOTS, MAX_RUN_BYTES // stride))
    offsets = moves["nvme_offset"].tolist()
    found: list[tuple[int, int]] = []
    for at, (offset, fault) in enumerate(zip(offsets, faults.tolist(), strict=True)):
        if fault:
            continue
        begin, end = found[-1] if found else (0, 0)
        if end == at > 0 and at - begin < most and offset == offsets[at - 1] + stride:
            found[-1] = (begin, at + 1)
        else:
            found.append((at, at + 1))
    return found


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
        digests = [
            row[-1] if row[-2] else checksum(payload)
            for row, payload in zip(self.rows, self.buffers[::2], strict=True)
        ]
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
            page = self.buffers[2 * at + 1]
            digests.append(checksum_in(page) if row[-2] else checksum(self.buffers[2 * at]))
            found = read_trailer(page)
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
    _, _, offset, generation, depth, block_hash, parent, ns_digest, _, _ = row
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
