"""The NVMe tier: carries out moves between mapped DRAM extents and slabs, with no copy in between.

A piece is what one thread does at a time: a run of slots that lie side by side on the disk, moved by one call, or of a
large batch several of them. Small slots gain by it; a slot of 2 MiB is a call by itself.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.errors import NotFound
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import REPLY
from tiers.base import MemoryTier, Moves, Replies
from tiers.nvme.capacity import require_room
from tiers.nvme.carry import MAX_RUN_SLOTS, NO_MEMORY, NO_SLOT, SHORT, Carried, Carry, carry
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.pieces import PIECE_BYTES, cut, runs
from tiers.nvme.slab import Slab, SlabFile, open_slab, remove_slab, sync_slabs
from tiers.nvme.trailer import TRAILER_BYTES

__all__ = ["NvmeTier"]

_NOTICE_INTERVAL_S = 10.0


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
        carry: Carry = carry,
        shares: int = 1,
        piece_bytes: int = PIECE_BYTES,
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        """A batch is cut into at least `shares` pieces where it has as many blocks, of `piece_bytes` at most."""
        self.slabs_bytes = 0
        """The most that all slabs may take, as `tiers.nvme.capacity` counts; 0: no bound. May change at any time."""
        self._directory = directory
        self._memory = memory
        self._direct = direct
        self._disk = disk
        self._clock_ms = clock_ms
        self._carry = carry
        self._shares = shares
        self._piece_bytes = piece_bytes
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
        self._synced_before = False
        """Whether what earlier movers wrote is on the medium; a write of theirs that was never synced may count."""
        self._thread = threading.local()

    @property
    def direct(self) -> bool:
        """Whether every open slab is read and written past the page cache."""
        return all(slab.direct for slab in self._slabs.values())

    def open_slab(self, extent: int, number: int, nbytes: int, slot_bytes: int) -> None:
        """See StorageTier."""
        self._unopened.add(extent)
        if self.slabs_bytes:
            file = SlabFile(number=number, slot_bytes=slot_bytes, nbytes=nbytes)
            if not self._disk.exists(self._directory / file.name):
                require_room(self._directory, self.slabs_bytes, nbytes, self._disk)
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
        """See StorageTier. Reads first."""
        return cut(moves, self._shares, self._piece_bytes)

    def calls(self, moves: Moves) -> int:
        """See StorageTier."""
        return sum(runs(piece) for piece in cut(moves, 1))

    def transfer(self, moves: Moves) -> Replies:
        """See StorageTier."""
        if not len(moves):
            return np.empty(0, dtype=REPLY)
        replies = self._transfer_piece(moves)
        if replies is not None:
            return replies
        found = [self._transfer_piece(piece) for piece in cut(moves, 1)]
        return np.concatenate([replies for replies in found if replies is not None])

    def deleted(self) -> dict[int, int]:
        """Numbers, by extent, of the slabs that somebody has deleted under us: what is read and written there is in no
        folder."""
        found = {}
        for extent in tuple(self._slabs):
            with self._files:  # which keeps `drop_slab` from closing it meanwhile
                slab = self._slabs.get(extent)
                if slab is not None and slab.is_deleted():
                    found[extent] = slab.file.number
        return found

    def sync(self) -> None:
        """See StorageTier. Also fails where a slab was deleted: the kernel syncs what no name leads to."""
        with self._syncs:
            if not self._synced_before:
                sync_slabs(self._directory, self._disk)
                self._synced_before = True
            with self._files:
                slabs = tuple(self._slabs.items())
            for extent, slab in slabs:
                if slab.dirty:
                    self._sync_slab(extent, slab)
        if self.deleted():  # last: what was deleted before the answer is not durable
            raise OSError(errno.ENOENT, "a slab was deleted")

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

    def _transfer_piece(self, moves: Moves) -> Replies | None:
        """None, with nothing done, where it is no piece."""
        slab = self._slabs.get(int(moves["nvme_extent"][0]))
        if slab is None:
            return self._without_slab(moves)
        carried = self._carry(slab, moves, self._memory, self._scratch(), self._clock_ms())
        if carried is None:
            return None
        if carried.failed:
            writes = int(moves["kind"][0]) == MoveKind.WRITE
            if not writes:
                self._judge_short(slab, carried)
            self._say(slab, carried, "write to" if writes else "read of")
        return carried.replies

    def _without_slab(self, moves: Moves) -> Replies | None:
        """Refuses moves of a slab that is not open. Without a notice where it could not be: its asker was told why."""
        extents = set(moves["nvme_extent"].tolist())
        if len(extents) > 1:
            return None
        if not extents & self._unopened:
            self._notice("range", f"a move names a slab that {self._directory} does not have; refused")
        replies = np.zeros(len(moves), dtype=REPLY)
        replies["id"], replies["status"] = moves["id"], MoveStatus.IO_ERROR
        return replies

    def _judge_short(self, slab: Slab, carried: Carried) -> None:
        """Blocks beyond the end of a slab that somebody cut short are gone: that is no fault of the disk."""
        short = carried.faults == SHORT
        if short.any() and slab.is_cut():
            carried.replies["status"][short] = MoveStatus.CORRUPT

    def _say(self, slab: Slab, carried: Carried, what: str) -> None:
        """Notices of what did not go through, one of each kind."""
        for fault in set(carried.faults.tolist()) - {0}:
            if fault == NO_SLOT:
                self._notice("range", f"a move names a slot that {self._directory} does not have; refused")
                continue
            if fault == NO_MEMORY:
                self._notice(
                    "dram", f"a move to or from {self._directory} names memory that is not mapped; refused"
                )
                continue
            reason = "came short" if fault == SHORT else f"failed: {os.strerror(fault)}"
            self._notice(f"{what} {reason}", f"a {what} {self._directory / slab.file.name} {reason}")
        corrupt = int((carried.replies["status"] == MoveStatus.CORRUPT).sum())
        if corrupt:
            self._notice("corrupt", f"{corrupt} blocks read from {self._directory} are not what was written")

    def _scratch(self) -> memoryview:
        """This thread's page-aligned trailers. An anonymous mapping, so pages that are never used take no memory."""
        scratch: memoryview | None = getattr(self._thread, "scratch", None)
        if scratch is None:
            scratch = memoryview(mmap.mmap(-1, MAX_RUN_SLOTS * TRAILER_BYTES))
            self._thread.scratch = scratch
        return scratch

    def _notice(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now - self._noticed.get(kind, -_NOTICE_INTERVAL_S) >= _NOTICE_INTERVAL_S:
            self._noticed[kind] = now
            self._notify(text)
