"""Device memory between a kernel there and large copies by an engine: for pieces that lie together on the host alone.

A load is a few large copies into a buffer, and a kernel that deals the pieces out at the speed of device memory; a
store is the reverse. All copies are in one stream and all kernels in another, with events between the two: the link
carries the copies one after another, and the kernel of one buffer runs beside the copies of the next. Were each buffer
a stream of its own, copies of both would share the link, end together, and leave it idle while both kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction
from engine_adapter.copying.cuda_driver import CudaDriver, SourceOrder
from engine_adapter.copying.pinned_host import PinnedHost
from engine_adapter.copying.plan import Pieces, lengths, runs

__all__ = ["Launches", "Staging"]

U64 = NDArray[np.uint64]

_ANY = 1 << 62


class Launches(Protocol):
    """A compiled kernel (`CopyKernel`)."""

    def launch(self, pieces: Pieces, stream: int) -> None:
        """Copies."""
        ...


class Staging:
    """Buffers of one lane, used in turns. One thread at a time."""

    def __init__(
        self,
        driver: CudaDriver,
        host: PinnedHost,
        direction: Direction,
        *,
        buffers: int,
        buffer_bytes: int,
        streams: Sequence[int],
    ) -> None:
        """`streams`: of copies and of kernels, the caller's. Raises: ResourceExhausted where memory is short."""
        self._driver = driver
        self._host = host
        self._direction = direction
        self._buffer_bytes = buffer_bytes
        self._copies, self._kernels = streams
        self._turn = 0
        self._buffers: list[int] = []
        self._filled = [0] * buffers
        self._freed = [0] * buffers  # events behind the last use; 0: not used so far
        try:
            for _ in range(buffers):
                self._buffers.append(driver.allocate(buffer_bytes))
        except BaseException:
            self.close()
            raise

    def holds(self, pieces: Pieces) -> bool:
        """Whether pieces of one size fit into a buffer."""
        return len(pieces) * int(pieces.sizes[0]) <= self._buffer_bytes

    def start(self, pieces: Pieces, kernel: Launches) -> int:
        """Puts at least one piece, of those that a buffer holds, through the next buffer; the stream of its end."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        nbytes = int(pieces.sizes[0])
        places = np.uint64(self._buffers[turn]) + np.arange(len(pieces), dtype=np.uint64) * np.uint64(nbytes)
        if self._direction is Direction.LOAD:
            self._await_free(turn, self._copies)
            self._copy(places, pieces.sources, pieces.sources, nbytes)
            self._follow(turn, self._copies, self._kernels)
            kernel.launch(Pieces(sources=places, targets=pieces.targets, sizes=pieces.sizes), self._kernels)
            return self._leave(turn, self._kernels)
        self._await_free(turn, self._kernels)
        kernel.launch(Pieces(sources=pieces.sources, targets=places, sizes=pieces.sizes), self._kernels)
        self._follow(turn, self._kernels, self._copies)
        self._copy(pieces.targets, places, pieces.targets, nbytes)
        return self._leave(turn, self._copies)

    def close(self) -> None:
        """Gives memory and events back; nothing is under way. Again: nothing."""
        buffers, self._buffers = self._buffers, []
        for address in buffers:
            self._driver.free(address)
        events = [event for event in (*self._filled, *self._freed) if event]
        self._filled, self._freed = [], []
        self._driver.destroy(streams=[], events=events)

    def _copy(self, targets: U64, sources: U64, host: U64, nbytes: int) -> None:
        """One copy for each run on the host's side, where a buffer has no gaps."""
        begins = runs(host, host, nbytes, borders=(self._host.starts,), max_run_bytes=_ANY)
        sizes = lengths(begins, len(host)).astype(np.uint64) * np.uint64(nbytes)
        self._driver.copy_batch(targets[begins], sources[begins], sizes, self._copies, SourceOrder.STREAM)

    def _await_free(self, turn: int, stream: int) -> None:
        """The stream goes on once what used the buffer before has."""
        if self._freed[turn]:
            self._driver.wait(stream, self._freed[turn])

    def _follow(self, turn: int, first: int, second: int) -> None:
        """The second stream goes on once the first has filled the buffer."""
        self._filled[turn] = self._filled[turn] or self._driver.create_event()
        self._driver.record(self._filled[turn], first)
        self._driver.wait(second, self._filled[turn])

    def _leave(self, turn: int, stream: int) -> int:
        """The buffer is free once the stream is here."""
        self._freed[turn] = self._freed[turn] or self._driver.create_event()
        self._driver.record(self._freed[turn], stream)
        return stream
