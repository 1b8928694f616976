"""Where an export reads blocks: out of mapped DRAM, and out of the slab files. It holds nothing and asks nobody.

A slot's bytes do not change while it is SEALED under one generation, so a copy is good where its state words were the
same before and after. A block on disk is proved by its trailer, whatever the tables say by then. What has gone
meanwhile is passed over; what is still there and could not be read is looked for again, since it may have moved, and
then counted. Blocks: called in a thread, one call at a time, since calls share files and a page.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.client.memory import DramMemory
from kvstore.errors import KvstoreError
from kvstore.layout import NONE, Columns, PoolColumns, SlotState, Tier, states
from kvstore.tables.checksums import Checksums
from kvstore.transfer.archive import HEAD_BYTES, BlockHead, pack_head, payload_checksum
from kvstore.transfer.plan import DIGEST_BYTES, Planned
from tiers.nvme.slab import SlabFile, stride_bytes
from tiers.nvme.trailer import TRAILER_BYTES, checksum, read_trailer

__all__ = ["Batch", "SlabPlace", "SlabReader", "Source", "Unmapping", "pack_blocks"]

_MAX_OPEN_SLABS = 64
_ATTEMPTS = 3
_MOVED_S = 0.05  # for what a move, or new memory, is not seen of yet


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPlace:
    """The file that an extent of the disk tier is."""

    directory: Path
    number: int
    slot_bytes: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / SlabFile(number=self.number, slot_bytes=self.slot_bytes, nbytes=0).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Blocks as they stand in the file, and what became of the others."""

    packed: memoryview
    heads: list[bytes]
    gone: int
    """Left the store since the export was planned."""
    hbm_only: int
    """In the memory of a GPU, or its twin, alone."""
    unread: int
    """Still there, and could not be read: damaged, or on a disk that fails."""


class Unmapping:
    """Has an extent that leaves the store stay mapped until who copies out of it, and holds nothing, has ended."""

    def __init__(self) -> None:
        self.copying = threading.Lock()

    def register(self, address: int, nbytes: int) -> None:
        """See DramListener."""

    def unregister(self, address: int) -> None:  # noqa: ARG002
        """See DramListener: the extent counts as not mapped already, so no new copy begins."""
        with self.copying:
            pass


class Source:
    """One namespace of a running service."""

    def __init__(
        self,
        columns: Columns,
        dram: DramMemory,
        unmapping: Unmapping,
        ask_slabs: Callable[[], Mapping[int, SlabPlace]],
        *,
        namespace_digest: bytes,
        slot_bytes: int,
    ) -> None:
        """`ask_slabs`: those of now, by extent; `namespace_digest`: what the tables call it; blocks: one size.

        Raises KvstoreError where nobody says which slabs there are.
        """
        self._columns = columns
        self._dram = dram
        self._unmapping = unmapping
        self._ask_slabs = ask_slabs
        self._slabs = ask_slabs()
        self._slot_bytes = slot_bytes
        self._reader = SlabReader(namespace_digest, slot_bytes)

    def read(self, planned: Planned) -> Batch:
        """These blocks, in this order."""
        payloads = np.empty((len(planned), self._slot_bytes), dtype=np.uint8)
        good = np.zeros(len(planned), dtype=np.bool_)
        self._copy(planned, payloads, good)
        hbm_only, unread = self._left(planned, good)
        for _ in range(1, _ATTEMPTS):
            if not unread:
                break
            time.sleep(_MOVED_S)
            with contextlib.suppress(KvstoreError):  # the service has ended: its slabs are where they were
                self._slabs = self._ask_slabs()
            self._copy(planned, payloads, good)
            hbm_only, unread = self._left(planned, good)
        return pack_blocks(planned, payloads, good, hbm_only=hbm_only, unread=unread)

    def close(self) -> None:
        """Closes files."""
        self._reader.close()

    def _copy(self, planned: Planned, payloads: NDArray[np.uint8], good: NDArray[np.bool_]) -> None:
        """Reads the blocks that are not `good` [n] yet, and notes in it those that are now."""
        good |= self._from_dram(planned, payloads, ~good)
        for at in np.flatnonzero(~good).tolist():
            good[at] = self._from_disk(planned, at, payloads[at])

    def _left(self, planned: Planned, good: NDArray[np.bool_]) -> tuple[int, int]:
        """Of the blocks that were not read and are still in the store: those in HBM alone, and the others."""
        columns = self._columns
        below = (columns.dram[planned.rows] != NONE) | (columns.nvme[planned.rows] != NONE)
        there = ~good & (
            columns.state[planned.rows] == planned.words
        )  # last: what has gone by now was below before
        return int(np.count_nonzero(there & ~below)), int(np.count_nonzero(there & below))

    # -- DRAM

    def _from_dram(
        self, planned: Planned, payloads: NDArray[np.uint8], wanted: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """[n] which of the blocks that are `wanted` [n] were copied out of DRAM."""
        pool = self._columns.pool(Tier.DRAM)
        slots = self._columns.dram[planned.rows].copy()
        good = wanted & self._of_size(pool, slots)
        words = np.where(good, pool.state[np.where(good, slots, 0)], 0)
        good &= states(words) == SlotState.SEALED
        good &= self._still(planned, pool, slots, words, good)
        for at in np.flatnonzero(good).tolist():
            with self._unmapping.copying:
                good[at] = self._dram.mapped(slots[at : at + 1])  # else it is new here, or has just left
                if good[at]:
                    payloads[at] = self._dram.view(int(slots[at]))
        self._compare(slots, payloads, good)
        return good & self._still(planned, pool, slots, words, good)

    def _compare(
        self, slots: NDArray[np.uint32], payloads: NDArray[np.uint8], good: NDArray[np.bool_]
    ) -> None:
        """Of the copies that are `good` [n], those of a known checksum: whether they are what was stored."""
        copied = np.flatnonzero(good)
        table = Checksums(self._columns)
        for at in copied[table.known(slots[copied])].tolist():
            good[at] = table.of(slots[at : at + 1]).tobytes() == checksum(payloads[at].data)

    def _of_size(self, pool: PoolColumns, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        known = slots < len(pool.state)
        sizes = self._columns.extent_slot_bytes[pool.extent[np.where(known, slots, 0)]]
        good: NDArray[np.bool_] = known & (sizes == np.uint64(self._slot_bytes))
        return good

    def _still(
        self,
        planned: Planned,
        pool: PoolColumns,
        slots: NDArray[np.uint32],
        words: NDArray[np.uint64],
        asked: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """[n] whether slot and row are what they were, and name each other."""
        safe = np.where(asked, slots, 0)
        same: NDArray[np.bool_] = (pool.state[safe] == words) & (pool.row[safe] == planned.rows)
        same &= self._columns.state[planned.rows] == planned.words
        return same

    # -- disk

    def _from_disk(self, planned: Planned, at: int, payload: NDArray[np.uint8]) -> bool:
        """Whether the block was read from its slab, and is the one."""
        pool = self._columns.pool(Tier.NVME)
        slot = int(self._columns.nvme[planned.rows[at]])
        if slot >= len(pool.state):
            return False
        extent = int(pool.extent[slot])
        place = self._slabs.get(extent)
        if place is None or place.slot_bytes != self._slot_bytes:
            return False
        within = slot - int(self._columns.extent_slot_base[extent])
        return self._reader.read(place, within, planned.hashes[at].tobytes(), payload)


class SlabReader:
    """Reads blocks of one namespace and size out of slabs, and believes their trailers alone. One call at a time."""

    def __init__(self, namespace_digest: bytes, slot_bytes: int) -> None:
        self._ns_digest = namespace_digest[:DIGEST_BYTES]
        self._slot_bytes = slot_bytes
        self._page = mmap.mmap(-1, slot_bytes + TRAILER_BYTES)  # aligned, as O_DIRECT wants it
        self._files: dict[Path, int] = {}

    def read(self, place: SlabPlace, slot: int, block: bytes, payload: NDArray[np.uint8]) -> bool:
        """Whether this slot of a slab has the block with this hash; then its bytes are in `payload`."""
        try:
            fd = self._open(place.path)
            count = os.preadv(fd, [self._page], slot * stride_bytes(self._slot_bytes))
        except (OSError, OverflowError):
            return False
        if count != len(self._page):
            return False
        with memoryview(self._page) as whole:
            return self._proved(block, whole, payload)

    def close(self) -> None:
        """Closes files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._page.close()

    def _proved(self, block: bytes, whole: memoryview, payload: NDArray[np.uint8]) -> bool:
        trailer = read_trailer(whole[self._slot_bytes :])
        if trailer is None or trailer.length != self._slot_bytes:
            return False
        if trailer.hash != block or trailer.ns_digest != self._ns_digest:
            return False
        payload[:] = np.frombuffer(whole[: self._slot_bytes], dtype=np.uint8)
        return checksum(payload.data) == trailer.checksum

    def _open(self, path: Path) -> int:
        fd = self._files.get(path)
        if fd is None:
            while len(self._files) >= _MAX_OPEN_SLABS:
                os.close(self._files.pop(next(iter(self._files))))
            fd = self._files[path] = _open_past_the_cache(path)
        return fd


def pack_blocks(
    planned: Planned, payloads: NDArray[np.uint8], good: NDArray[np.bool_], *, hbm_only: int, unread: int
) -> Batch:
    """Those of the blocks that are `good`, with their payloads [n, slot_bytes], as they stand in the file."""
    slot_bytes = payloads.shape[1]
    heads: list[bytes] = []
    packed = memoryview(bytearray(int(good.sum()) * (HEAD_BYTES + slot_bytes)))
    for at in np.flatnonzero(good).tolist():
        head = pack_head(
            BlockHead(
                hash=planned.hashes[at].tobytes(),
                parent=planned.parents[at].tobytes(),
                depth=int(planned.depths[at]),
                touch=int(planned.touches[at]),
                checksum=payload_checksum(payloads[at].data),
            )
        )
        begin = len(heads) * (HEAD_BYTES + slot_bytes)
        packed[begin : begin + HEAD_BYTES] = head
        packed[begin + HEAD_BYTES : begin + HEAD_BYTES + slot_bytes] = payloads[at].data
        heads.append(head)
    gone = len(planned) - len(heads) - hbm_only - unread
    return Batch(packed=packed, heads=heads, gone=gone, hbm_only=hbm_only, unread=unread)


def _open_past_the_cache(path: Path) -> int:
    """A slab for reading, with O_DIRECT where the file system has it: an export must not push others out of memory."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, flags)
    with mmap.mmap(-1, TRAILER_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError:  # some refuse at the first read only
            os.close(fd)
            fd = os.open(path, flags)
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd
