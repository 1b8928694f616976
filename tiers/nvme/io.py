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
from numpy.typing import NDArray

from kvstore.errors import NotFound
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import REPLY
from tiers.base import MemoryTier, Moves, Replies
from tiers.nvme.slab import Slab, open_slab, remove_slab, stride_bytes
from tiers.nvme.trailer import (
    TRAILER,
    TRAILER_BYTES,
    checksum,
    checksums_of,
    fill_trailers,
    matches,
)

__all__ = ["NvmeTier"]

_MAX_RUN_SLOTS = 512  # two buffers a slot, IOV_MAX is 1024
_MAX_RUN_BYTES = 2 << 20  # larger calls are no faster, and starve the other threads
_NOTICE_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A piece with what it needs: `buffers` are payload, trailer, payload, trailer, …"""

    slab: Slab
    moves: Moves
    buffers: list[memoryview]
    pages: NDArray[np.void]  # TRAILER[n], what the trailer buffers view

    @property
    def payloads(self) -> list[memoryview]:
        return self.buffers[::2]


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
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._direct = direct
        self._notify = notify
        self._noticed: dict[str, float] = {}
        self._slabs: dict[int, Slab] = {}  # by extent
        self._files = threading.Lock()  # a sync never meets a descriptor that is being closed
        self._thread = threading.local()

    @property
    def direct(self) -> bool:
        """Whether every open slab is read and written past the page cache."""
        return all(slab.direct for slab in self._slabs.values())

    def open_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int) -> None:
        """See StorageTier."""
        slab = open_slab(self._directory, number, nbytes, slot_bytes, direct=self._direct)
        if self._direct and not slab.direct:
            self._notice("direct", f"{self._directory} refuses O_DIRECT: blocks go through the page cache")
        with self._files:
            old = self._slabs.pop(extent, None)
            if old is not None:
                old.close()
            self._slabs[extent] = slab

    def drop_slab(self, extent: int) -> None:
        """See StorageTier."""
        with self._files:
            slab = self._slabs.pop(extent, None)
            if slab is None:
                raise NotFound(f"no slab is open as extent {extent}")
            slab.close()
        remove_slab(self._directory, slab.file)

    def pieces(self, moves: Moves) -> Sequence[Moves]:
        """See StorageTier. Reads first. O(n log n), no Python per move."""
        if len(moves) == 0:
            return []
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
        with self._files:
            for slab in self._slabs.values():
                slab.sync()

    def close(self) -> None:
        """See StorageTier."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    def _transfer_piece(self, moves: Moves) -> Replies:
        replies = np.zeros(len(moves), dtype=REPLY)
        replies["id"] = moves["id"]
        replies["status"] = MoveStatus.IO_ERROR
        run = self._prepare(moves)
        if run is None:
            return replies
        if int(moves["kind"][0]) == MoveKind.WRITE:
            self._write(run, replies)
        else:
            self._read(run, replies)
        return replies

    def _prepare(self, moves: Moves) -> _Run | None:
        """Buffers of a piece; None, with a notice, where a move names bytes outside of what is mapped and open."""
        slab = self._slabs.get(int(moves["nvme_extent"][0]))
        length = int(moves["length"][0])
        stride = stride_bytes(length)
        first, last = int(moves["nvme_offset"][0]), int(moves["nvme_offset"][-1])
        if (
            slab is None
            or length != slab.file.slot_bytes
            or first % stride
            or last // stride >= slab.file.slots
        ):
            self._notice("range", f"a move names a slot that {self._directory} does not have; refused")
            return None
        scratch = self._scratch()
        buffers: list[memoryview] = []
        try:
            for i, (extent, offset) in enumerate(
                zip(moves["dram_extent"].tolist(), moves["dram_offset"].tolist(), strict=True)
            ):
                payload = self._memory.view(extent)[offset : offset + length]
                if len(payload) != length:
                    raise NotFound(f"dram extent {extent} is too short")
                buffers.append(payload)
                buffers.append(scratch[i * TRAILER_BYTES : (i + 1) * TRAILER_BYTES])
        except NotFound as error:
            self._notice("dram", f"a move to or from {self._directory} was refused: {error.message}")
            return None
        pages = np.frombuffer(scratch, dtype=TRAILER, count=len(moves))
        return _Run(slab=slab, moves=moves, buffers=buffers, pages=pages)

    def _write(self, run: _Run, replies: Replies) -> None:
        checksums = checksums_of([checksum(payload) for payload in run.payloads])
        fill_trailers(run.pages, run.moves, checksums, time.time_ns() // 1_000_000)
        done = self._vectored(run, run.slab.write, "write to")
        replies["status"][done] = MoveStatus.OK
        replies["checksum"] = checksums

    def _read(self, run: _Run, replies: Replies) -> None:
        done = self._vectored(run, run.slab.read, "read of")
        digests = [
            checksum(payload) if good else bytes(16)
            for payload, good in zip(run.payloads, done.tolist(), strict=True)
        ]
        checksums = checksums_of(digests)
        whole = matches(run.pages, run.moves, checksums)
        replies["status"] = np.where(
            done, np.where(whole, MoveStatus.OK, MoveStatus.CORRUPT), MoveStatus.IO_ERROR
        )
        replies["checksum"] = checksums
        corrupt = int((done & ~whole).sum())
        if corrupt:
            self._notice("corrupt", f"{corrupt} blocks read from {self._directory} are not what was written")

    def _vectored(
        self, run: _Run, call: Callable[[Sequence[memoryview], int], int], what: str
    ) -> NDArray[np.bool_]:
        """Moves the run in as few calls as it takes: which of its slots went through in full: [n].

        After an error or a short count the next call begins at the slot that did not end; one that makes no progress
        at all is given up and the rest still tried, so a bad sector costs its own block only.
        """
        done = np.zeros(len(run.moves), dtype=np.bool_)
        stride = stride_bytes(run.slab.file.slot_bytes)
        at = 0
        while at < len(done):
            try:
                slots = call(run.buffers[2 * at :], int(run.moves["nvme_offset"][at])) // stride
                reason = "came short"
            except OSError as error:
                slots, reason = 0, f"failed: {error.strerror}"
            done[at : at + slots] = True
            if slots == 0:
                name = self._directory / run.slab.file.name
                self._notice(f"{what} {reason}", f"a {what} {name} {reason}")
                slots = 1
            at += slots
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
