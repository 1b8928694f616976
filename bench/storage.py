"""The two sides of a disk leg: a real mover process over a slab, and one O_DIRECT call a block on a plain file."""

from __future__ import annotations

import errno
import os
import select
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.mover_link import MoverLink
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire import mover as wire
from kvstore.wire.packed import MOVE
from tiers.dram import DramTier
from tiers.nvme.slab import stride_bytes

__all__ = ["MoverSide", "PlainFile"]

_ANSWER_S = 120.0
_SYNC_ID = 1
_M = TypeVar("_M", bound=wire.Message)


class MoverSide:
    """A mover process, one DRAM extent full of blocks and one slab with as many slots. Bytes differ in each block."""

    def __init__(self, folder: Path, count: int, block_bytes: int, *, threads: int = 0) -> None:
        """Starts the mover; `threads` 0 is what its own probe chooses. Raises: KvstoreError when it cannot."""
        self._dram = DramTier()
        fd = self._dram.create(0, count * block_bytes)
        self._dram.populate(0)
        self._blocks = np.frombuffer(self._dram.view(0), dtype=np.uint64).reshape(count, -1)
        self._moves = _moves(count, block_bytes)
        self._fill()
        self._slab = (0, 1, count * stride_bytes(block_bytes), block_bytes)
        self._waiting: deque[wire.Message] = deque()
        directory = folder / "slabs"
        directory.mkdir(mode=0o700)
        self._link = MoverLink.start(wire.Config(directory=str(directory), threads=threads, nice=0))
        self._link.send_extent(0, count * block_bytes, fd)

    def __enter__(self) -> Self:
        try:
            self._link.send_slab(*self._slab)
            opened = self._await(wire.SlabOpened)
            self.direct = opened.direct
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def transfer(self, kind: MoveKind) -> None:
        """Moves every block, and makes it durable when it was written. Raises: KvstoreError when one fails."""
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


def _moves(count: int, block_bytes: int) -> NDArray[np.void]:
    """One move for each block, DRAM slot i and NVMe slot i."""
    index = np.arange(count, dtype=np.uint64)
    moves = np.zeros(count, dtype=MOVE)
    moves["id"] = index + np.uint64(1)
    moves["dram_slot"] = moves["nvme_slot"] = moves["depth"] = index
    moves["dram_offset"] = index * np.uint64(block_bytes)
    moves["nvme_offset"] = index * np.uint64(stride_bytes(block_bytes))
    moves["length"] = block_bytes
    moves["generation"] = 1
    moves["hash"] = moves["parent"] = moves["ns_digest"] = np.stack([index, ~index], axis=1)
    return moves
