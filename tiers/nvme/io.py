"""The NVMe tier: carries out moves between mapped DRAM extents and slabs, with no copy in between.

A piece is a run of slots that lie side by side on the disk, moved by one vectored call straight from or into their
DRAM slots, trailers into a page buffer of the thread. Small slots gain by it; a slot of 2 MiB is a call by itself.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import NotFound
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import MOVE, REPLY
from tiers.base import MemoryTier, Moves, Replies
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.slab import Slab, open_slab, remove_slab, stride_bytes
from tiers.nvme.trailer import TRAILER_BYTES, Trailer, checksum, read_trailer, write_trailer

__all__ = ["NvmeTier"]

_MAX_RUN_SLOTS = 512  # two buffers a slot, IOV_MAX is 1024
_MAX_RUN_BYTES = (4 << 20) + (64 << 10)
"""Two slots of 2 MiB with their trailers. At half of it a disk of 4.6 GB/s was written at 0.77 to 0.9 of a plain loop
(two cores): what a call and its reply cost had no time to hide. Larger calls are no faster and starve other threads."""
_NOTICE_INTERVAL_S = 10.0

# A move as a plain tuple. A piece is mostly one large slot, where numpy costs 100 µs a move and tuples cost 10.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A piece with what it needs."""

    slab: Slab
    rows: list[_Row]
    buffers: list[memoryview]  # payload, trailer, payload, trailer, …

    @property
    def offset(self) -> int:
        """Where it begins in the slab."""
        return self.rows[0][2]


class NvmeTier:
    """StorageTier of one directory. `notify` gets one line for a person, at most one in 10 s of each kind.

    The directory must be locked by the caller (`tiers.nvme.directory`).
    """

    def __init__(
        self,
        directory: Path,
        memory: MemoryTier,
        *,
        direct: bool = True,
        disk: Disk = SYSTEM_DISK,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._direct = direct
        self._disk = disk
        self._clock_ms = clock_ms
        self._notify = notify
        self._noticed: dict[str, float] = {}
        self._slabs: dict[int, Slab] = {}  # by extent
        self._unopened: set[int] = set()  # extents whose slab could not be opened, which has been said
        self._files = (
            threading.Lock()
        )  # guards the next and `_slabs` where they change; never held over a disk's answer
        self._in_sync: Slab | None = None  # closed by its sync, not by whoever drops it meanwhile
        self._syncs = (
            threading.Lock()
        )  # one at a time: a second would take what the first has not ended for done
        self._thread = threading.local()

    @property
    def direct(self) -> bool:
        """Whether every open slab is read and written past the page cache."""
        return all(slab.direct for slab in self._slabs.values())

    def open_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int) -> None:
        """See StorageTier."""
        self._unopened.add(extent)
        slab = open_slab(self._directory, number, nbytes, slot_bytes, direct=self._direct, disk=self._disk)
        self._unopened.discard(extent)
        if self._direct and not slab.direct:
            self._notice("direct", f"{self._directory} refuses O_DIRECT: blocks go through the page cache")
        with self._files:
            self._close(self._slabs.pop(extent, None))
            self._slabs[extent] = slab

    def drop_slab(self, extent: int) -> None:
        """See StorageTier."""
        with self._files:
            slab = self._slabs.pop(extent, None)
            self._close(slab)
        if slab is None:
            raise NotFound(f"no slab is open as extent {extent}")
        remove_slab(self._directory, slab.file, self._disk)

    def _close(self, slab: Slab | None) -> None:
        if slab is not None and slab is not self._in_sync:
            slab.close()

    def pieces(self, moves: Moves) -> Sequence[Moves]:
        """See StorageTier. Reads first. O(n log n), no Python per move."""
        if len(moves) <= 1:
            return [moves] if len(moves) else []
        moves = moves[np.lexsort((moves["nvme_offset"], moves["nvme_extent"], moves["kind"]))]
        strides = moves["length"].astype(np.uint64) + np.uint64(TRAILER_BYTES)
        follows = moves["nvme_offset"][1:] == moves["nvme_offset"][:-1] + strides[:-1]
        for name in ("kind", "nvme_extent", "length"):
            follows &= moves[name][1:] == moves[name][:-1]
        starts = np.flatnonzero(np.concatenate(([True], ~follows)))
        ends = np.append(starts[1:], len(moves))
        pieces: list[Moves] = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            step = max(1, min(_MAX_RUN_SLOTS, _MAX_RUN_BYTES // int(strides[start])))
            pieces.extend(moves[at : min(at + step, end)] for at in range(start, end, step))
        return pieces

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier."""
        answers = [self._transfer_piece(piece) for piece in self.pieces(moves)]
        return np.concatenate(answers) if answers else np.empty(0, dtype=REPLY)

    def sync(self) -> None:
        """See StorageTier."""
        with self._syncs:
            with self._files:
                slabs = tuple(self._slabs.items())
            for extent, slab in slabs:
                if slab.dirty:
                    self._sync_slab(extent, slab)

    def _sync_slab(self, extent: int, slab: Slab) -> None:
        with self._files:
            if self._slabs.get(extent) is not slab:
                return  # dropped since
            self._in_sync = slab
        try:
            slab.sync()
        finally:
            with self._files:
                self._in_sync = None
                if self._slabs.get(extent) is not slab:
                    slab.close()

    def close(self) -> None:
        """See StorageTier."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    def _transfer_piece(self, moves: Moves) -> Replies:
        replies = np.zeros(len(moves), dtype=REPLY)
        replies["id"] = moves["id"]
        run = self._prepare(moves)
        if run is None:
            replies["status"] = MoveStatus.IO_ERROR
            return replies
        is_write = int(moves["kind"][0]) == MoveKind.WRITE
        statuses, checksums = self._write(run) if is_write else self._read(run)
        replies["status"] = statuses
        replies["checksum"] = np.frombuffer(b"".join(checksums), dtype="<u8").reshape(-1, 2)
        return replies

    def _prepare(self, moves: Moves) -> _Run | None:
        """Buffers of a piece; None, with a notice, where a move names bytes outside of what is mapped and open.

        Without one where its slab could not be opened: whoever asked for that was told why.
        """
        nvme_extent = int(moves["nvme_extent"][0])
        slab = self._slabs.get(nvme_extent)
        length = int(moves["length"][0])
        stride = stride_bytes(length)
        rows: list[_Row] = moves.view(_ROW).tolist()
        if (
            slab is None
            or length != slab.file.slot_bytes
            or rows[0][2] % stride
            or rows[-1][2] // stride >= slab.file.slots
        ):
            if nvme_extent not in self._unopened:
                self._notice("range", f"a move names a slot that {self._directory} does not have; refused")
            return None
        scratch = self._scratch()
        buffers: list[memoryview] = []
        try:
            for at, (extent, offset, *_) in enumerate(rows):
                payload = self._memory.view(extent)[offset : offset + length]
                if len(payload) != length:
                    raise NotFound(f"dram extent {extent} is too short")
                buffers.append(payload)
                buffers.append(scratch[at * TRAILER_BYTES : (at + 1) * TRAILER_BYTES])
        except NotFound as error:
            self._notice("dram", f"a move to or from {self._directory} was refused: {error.message}")
            return None
        return _Run(slab=slab, rows=rows, buffers=buffers)

    def _write(self, run: _Run) -> tuple[list[int], list[bytes]]:
        """Status and checksum of each block."""
        now_ms = self._clock_ms()
        checksums = [checksum(payload) for payload in run.buffers[::2]]
        for row, page, digest in zip(run.rows, run.buffers[1::2], checksums, strict=True):
            write_trailer(page, _trailer(row, run.slab.file.slot_bytes, now_ms, digest))
        done = self._vectored(run, run.slab.write, "write to")
        return [MoveStatus.OK if good else MoveStatus.IO_ERROR for good in done], checksums

    def _read(self, run: _Run) -> tuple[list[int], list[bytes]]:
        """Status and checksum of each block."""
        done = self._vectored(run, run.slab.read, "read of")
        statuses: list[int] = []
        checksums: list[bytes] = []
        for at, (row, good) in enumerate(zip(run.rows, done, strict=True)):
            if not good:
                statuses.append(MoveStatus.IO_ERROR)
                checksums.append(bytes(16))
                continue
            checksums.append(checksum(run.buffers[2 * at]))
            found = read_trailer(run.buffers[2 * at + 1])
            whole = found is not None and found == _trailer(
                row, run.slab.file.slot_bytes, found.written_ms, checksums[-1], like=found
            )
            statuses.append(MoveStatus.OK if whole else MoveStatus.CORRUPT)
        corrupt = statuses.count(MoveStatus.CORRUPT)
        if corrupt:
            self._notice("corrupt", f"{corrupt} blocks read from {self._directory} are not what was written")
        return statuses, checksums

    def _vectored(self, run: _Run, call: Callable[[Sequence[memoryview], int], int], what: str) -> list[bool]:
        """Moves the run in as few calls as it takes: which of its slots went through in full.

        After an error or a short count the next call begins at the slot that did not end; one that makes no progress
        at all is given up and the rest still tried, so a bad sector costs its own block only.
        """
        stride = stride_bytes(run.slab.file.slot_bytes)
        done: list[bool] = []
        while len(done) < len(run.rows):
            try:
                count = call(run.buffers[2 * len(done) :], run.offset + len(done) * stride)
                reason = "came short"
            except OSError as error:
                count, reason = 0, f"failed: {error.strerror}"
            done += [True] * (count // stride)
            if count < stride:
                name = self._directory / run.slab.file.name
                self._notice(f"{what} {reason}", f"a {what} {name} {reason}")
                done.append(False)
        return done

    def _scratch(self) -> memoryview:
        """This thread's page-aligned trailers. An anonymous mapping, so pages that are never used take no memory."""
        scratch: memoryview | None = getattr(self._thread, "scratch", None)
        if scratch is None:
            scratch = memoryview(mmap.mmap(-1, _MAX_RUN_SLOTS * TRAILER_BYTES))
            self._thread.scratch = scratch
        return scratch

    def _notice(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now - self._noticed.get(kind, -_NOTICE_INTERVAL_S) >= _NOTICE_INTERVAL_S:
            self._noticed[kind] = now
            self._notify(text)


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
