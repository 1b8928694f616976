"""The sides of a disk leg: a real mover process over a slab, and plain O_DIRECT calls by one thread or by a pool."""

from __future__ import annotations

import errno
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.mover.link import MoverLink
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire import mover as wire
from kvstore.wire.packed import MOVE
from tiers.dram import DramTier
from tiers.nvme.slab import SlabFile, stride_bytes
from tiers.nvme.trailer import checksum as checksum_in_python

try:
    from kvstore._slab_io import checksum
except ImportError:  # built without a C compiler: the mover does the same
    checksum = checksum_in_python  # type: ignore[assignment]

__all__ = ["MoverSide", "PlainFile", "PlainPool", "Shape"]

_ANSWER_S = 120.0
_SYNC_ID = 1
_SLAB_NUMBER = 1
_M = TypeVar("_M", bound=wire.Message)
_Call = Callable[[int, Sequence[memoryview], int], int]
U64 = NDArray[np.uint64]


class MoverSide:
    """A mover process, one DRAM extent full of blocks and one slab with as many slots. Bytes differ in each block."""

    def __init__(
        self, folder: Path, count: int, block_bytes: int, *, threads: int = 0, slots: int | None = None
    ) -> None:
        """Starts the mover; `threads` 0 is what its own probe chooses, `slots` are those of the slab: `count` or more.

        Raises: KvstoreError when it cannot.
        """
        self._dram = DramTier()
        fd = self._dram.create(0, count * block_bytes)
        self._dram.populate(0)
        self._blocks = np.frombuffer(self._dram.view(0), dtype=np.uint64).reshape(count, -1)
        self._fill()
        index = np.arange(count, dtype=np.uint64)
        self.place(index, index)
        self._slab = (0, _SLAB_NUMBER, (slots or count) * stride_bytes(block_bytes), block_bytes)
        self._waiting: deque[wire.Message] = deque()
        directory = folder / "slabs"
        self.path = (
            directory / SlabFile(number=_SLAB_NUMBER, slot_bytes=block_bytes, nbytes=self._slab[2]).name
        )
        """The slab's file, which the mover makes."""
        directory.mkdir(mode=0o700)
        self._link = MoverLink.start(wire.Config(directory=str(directory), threads=threads, nice=0))
        self._link.send_extent(0, count * block_bytes, fd)

    def __enter__(self) -> Self:
        try:
            self._link.send_slab(*self._slab)
            self.threads = self._await(wire.Ready).threads
            self.direct = self._await(wire.SlabOpened).direct
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def place(self, dram_slots: U64, nvme_slots: U64) -> None:
        """[count] where each block lies on both sides from now on, in the order of the moves; at first slot i on each.

        What lies on the disk elsewhere is not found there: the next transfer is a write.
        """
        block_bytes = self._blocks.itemsize * self._blocks.shape[1]
        self._moves = _moves(dram_slots, nvme_slots, block_bytes)

    @property
    def count(self) -> int:
        """Blocks in DRAM: what a transfer moves."""
        return len(self._blocks)

    def cpu_s(self) -> float:
        """Processor seconds of the mover so far, user and system, all its threads."""
        # A process's clock by its id: clock_getcpuclockid(3), which Python has no name for.
        return time.clock_gettime((~self._link.pid << 3) | 2)

    def transfer(self, kind: MoveKind) -> None:
        """Moves every block, and makes it durable when it was written. Raises: KvstoreError when one fails.

        The mover takes the checksum of each.
        """
        self._moves["unread"] = 0
        self._transfer(kind)

    def transfer_unread(self, kind: MoveKind) -> None:
        """As `transfer`; the mover is told the checksums, which `learn` has taken, and looks at no block."""
        self._moves["unread"] = 1
        self._transfer(kind)

    def learn(self) -> None:
        """Takes the checksum of every block, as an engine does that stores them."""
        nbytes = self._blocks.itemsize * self._blocks.shape[1]
        memory = self.memory
        digests = [checksum(memory[begin : begin + nbytes]) for begin in self._moves["dram_offset"].tolist()]
        self._moves["checksum"] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)

    def _transfer(self, kind: MoveKind) -> None:
        self._moves["kind"] = kind
        sent = answered = 0
        while answered < len(self._moves):
            sent += self._link.send_moves(self._moves[sent:])
            replies = self._await(wire.Replies).replies
            if (replies["status"] != MoveStatus.OK).any():
                raise KvstoreError(f"{int((replies['status'] != MoveStatus.OK).sum())} moves failed")
            answered += len(replies)
        if kind is MoveKind.WRITE:
            self._link.send_sync(_SYNC_ID)
            if text := self._await(wire.Synced).text:
                raise KvstoreError(text)

    def checksum(self) -> None:
        """The checksum of every block, in the order of the moves, as the mover takes it."""
        nbytes = self._blocks.itemsize * self._blocks.shape[1]
        memory = self.memory
        for begin in self._moves["dram_offset"].tolist():
            checksum(memory[begin : begin + nbytes])

    @property
    def memory(self) -> memoryview:
        """All blocks, as they lie in DRAM."""
        return memoryview(self._dram.view(0))

    def scribble(self) -> None:
        """Overwrites the blocks in DRAM, so that only a read can bring them back."""
        self._blocks.fill(0)

    def check(self) -> None:
        """Raises KvstoreError unless DRAM holds what was written."""
        wrong = int((self._blocks[:, ::512] != self._pattern()[:, None]).any(axis=1).sum())
        if wrong:
            raise KvstoreError(f"{wrong} blocks are not what was written")

    def _fill(self) -> None:
        self._blocks[:] = self._pattern()[:, None]

    def _pattern(self) -> NDArray[np.uint64]:
        pattern: NDArray[np.uint64] = (
            np.arange(len(self._blocks), dtype=np.uint64) + np.uint64(1)
        ) * np.uint64(0x9E3779B97F4A7C15)
        return pattern

    def _await(self, kind: type[_M]) -> _M:
        """The next message of this kind; others are passed over. Raises KvstoreError when the mover ends or says no."""
        deadline = time.monotonic() + _ANSWER_S
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLIN)
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                if isinstance(message, wire.SlabFailed):
                    raise KvstoreError(message.text)
                if isinstance(message, kind):
                    return message
            if self._link.ended:
                raise KvstoreError("the mover ended")
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise DeadlineExceeded(f"the mover did not answer within {_ANSWER_S:g} s")
            self._waiting.extend(self._link.receive())

    def _close(self) -> None:
        self._link.stop()
        if self._link.reap(_ANSWER_S) is None:
            self._link.kill()
            self._link.reap(_ANSWER_S)
        del self._blocks
        self._dram.close()


class PlainFile:
    """A preallocated file of as many blocks as `memory` holds; one thread, a block a call, no page cache.

    `memory` is the mover's own: how contiguous its pages are changes the rate of a disk by half and more, and
    differs between any two buffers, so another one would be compared and not the mover.
    """

    def __init__(self, folder: Path, memory: memoryview, block_bytes: int) -> None:
        """Makes the file. `direct` is False where the file system refuses O_DIRECT, as the mover then also finds."""
        self._memory = memory
        self._block_bytes = block_bytes
        path, flags = folder / "plain", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, len(memory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self._memory.release()

    def write(self) -> None:
        """Every block, then fdatasync."""
        for at in range(0, len(self._memory), self._block_bytes):
            self._whole(os.pwrite(self._fd, self._memory[at : at + self._block_bytes], at))
        os.fdatasync(self._fd)

    def read(self) -> None:
        """Every block."""
        for at in range(0, len(self._memory), self._block_bytes):
            self._whole(os.preadv(self._fd, [self._memory[at : at + self._block_bytes]], at))

    def _whole(self, nbytes: int) -> None:
        if nbytes != self._block_bytes:
            raise KvstoreError(f"the plain file gave {nbytes} of {self._block_bytes} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a pool works: with how many threads, and how many neighbouring blocks it moves in one call at most."""

    threads: int
    blocks_a_call: int


class PlainPool:
    """Threads that read and write the payloads of a slab's slots, each with one O_DIRECT call after the other.

    Same file, same slots and same memory as the mover's, no checksum, no replies. Where a call spans several slots it
    carries the trailers between them as it found them, so what the mover wrote stays whole.
    """

    def __init__(
        self, mover: MoverSide, block_bytes: int, dram_slots: U64, nvme_slots: U64, *, most_threads: int
    ) -> None:
        """Opens the slab, in which the mover has written all of `nvme_slots`. Raises OSError."""
        self._stride = stride_bytes(block_bytes)
        self._block_bytes = block_bytes
        self._slots = list(zip(nvme_slots.tolist(), dram_slots.tolist(), strict=True))
        self._memory = mover.memory
        flags = os.O_RDWR | os.O_CLOEXEC
        self._fd = os.open(mover.path, flags | os.O_DIRECT if mover.direct else flags)
        gap = self._stride - block_bytes
        self._trailers = memoryview(mmap.mmap(-1, len(self._slots) * gap))
        self._gap_bytes = gap
        for at, (nvme_slot, _) in enumerate(self._slots):
            os.preadv(self._fd, [self._trailer(at)], nvme_slot * self._stride + block_bytes)
        self._pool = ThreadPoolExecutor(most_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        os.close(self._fd)
        self._memory.release()

    def calls(self, blocks_a_call: int) -> list[tuple[int, list[memoryview]]]:
        """Offset and buffers of each call, in the order of the blocks."""
        found: list[tuple[int, list[memoryview]]] = []
        begin = 0
        while begin < len(self._slots):
            first = self._slots[begin][0]
            end = begin + 1
            while (
                end < len(self._slots)
                and end - begin < blocks_a_call
                and self._slots[end][0] == first + end - begin
            ):
                end += 1
            buffers = [view for at in range(begin, end) for view in (self._payload(at), self._trailer(at))]
            found.append((first * self._stride, buffers[:-1]))
            begin = end
        return found

    def transfer(self, kind: MoveKind, shape: Shape) -> None:
        """Moves every block, and makes it durable when it was written. Raises: KvstoreError when a call comes short."""
        calls = deque(self.calls(shape.blocks_a_call))
        call = os.pwritev if kind is MoveKind.WRITE else os.preadv
        list(self._pool.map(partial(self._work, call, calls), range(shape.threads)))
        if kind is MoveKind.WRITE:
            os.fdatasync(self._fd)

    def _work(self, call: _Call, calls: deque[tuple[int, list[memoryview]]], _: int) -> None:
        while True:
            try:
                offset, buffers = calls.popleft()
            except IndexError:
                return
            wanted = sum(map(len, buffers))
            if (nbytes := call(self._fd, buffers, offset)) != wanted:
                raise KvstoreError(f"the plain loop moved {nbytes} of {wanted} bytes")

    def _payload(self, at: int) -> memoryview:
        begin = self._slots[at][1] * self._block_bytes
        return self._memory[begin : begin + self._block_bytes]

    def _trailer(self, at: int) -> memoryview:
        return self._trailers[at * self._gap_bytes : (at + 1) * self._gap_bytes]


def _moves(dram_slots: U64, nvme_slots: U64, block_bytes: int) -> NDArray[np.void]:
    """One move for each block."""
    count = len(dram_slots)
    index = np.arange(count, dtype=np.uint64)
    moves = np.zeros(count, dtype=MOVE)
    moves["id"] = index + np.uint64(1)
    moves["depth"] = index
    moves["dram_slot"], moves["nvme_slot"] = dram_slots, nvme_slots
    moves["dram_offset"] = dram_slots * np.uint64(block_bytes)
    moves["nvme_offset"] = nvme_slots * np.uint64(stride_bytes(block_bytes))
    moves["length"] = block_bytes
    moves["generation"] = 1
    moves["hash"] = moves["parent"] = moves["ns_digest"] = np.stack([index, ~index], axis=1)
    return moves
