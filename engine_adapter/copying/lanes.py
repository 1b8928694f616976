"""A lane in use: its streams, its kernel, its staging memory, and how a portion of pieces is put into one of them.

What a kernel cannot copy goes by the copy engines, straight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction
from engine_adapter.copying.cuda_driver import CudaDriver, SourceOrder
from engine_adapter.copying.kernel import ALIGNMENT_BYTES, MAX_PIECES, KernelShape
from engine_adapter.copying.pinned_host import PinnedHost
from engine_adapter.copying.plan import Pieces
from engine_adapter.copying.routes import Lane, Route
from engine_adapter.copying.staging import Launches, Staging
from kvstore.errors import KvstoreError

__all__ = ["Lanes", "MakesKernel", "OpenLane"]

U64 = NDArray[np.uint64]

_LOG = logging.getLogger("kvstore.copier")
_ANY = 1 << 62

MakesKernel = Callable[[CudaDriver, KernelShape], Launches]


class OpenLane:
    """See the module. One thread at a time."""

    def __init__(
        self,
        driver: CudaDriver,
        host: PinnedHost,
        direction: Direction,
        lane: Lane,
        streams: Sequence[int],
        kernel: MakesKernel,
    ) -> None:
        """Compiles, allocates. Where either fails the lane goes by the copy engines, and the log says so.

        `streams`: at least `lane.streams`, the caller's, with nothing under way when the lane is closed.
        """
        self.lane = lane
        self._driver = driver
        self._host = host
        self._direction = direction
        self._streams = streams[: lane.streams]
        self._turn = 0
        self.kernel: Launches | None = None
        self._staging: Staging | None = None
        try:
            if lane.kernel is not None:
                self.kernel = kernel(driver, lane.kernel)
            if lane.staging_bytes and self.kernel is not None:
                self._staging = Staging(
                    driver,
                    host,
                    direction,
                    buffers=lane.staging_buffers,
                    buffer_bytes=lane.staging_bytes,
                    streams=self._streams,
                )
        except KvstoreError as error:
            _LOG.warning("small blocks go by the copy engines: %s", error)
            self.kernel = None
            self.close()

    @property
    def max_pieces(self) -> int:
        """Of one portion."""
        return MAX_PIECES if self.kernel is not None else _ANY

    @property
    def max_bytes(self) -> int:
        """Of one portion."""
        return self.lane.staging_bytes if self._staging is not None else _ANY

    def start(self, pieces: Pieces, order: SourceOrder) -> int:
        """Puts a portion of at least one piece into the next stream; that stream."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._streams)
        stream = self._streams[turn]
        if self.kernel is not None:
            if self._staging is not None:
                if self._staging.holds(pieces) and _aligned(pieces):
                    return self._staging.start(pieces, self.kernel)
            elif (seen := self._seen(pieces)) is not None:
                self.kernel.launch(seen, stream)
                return stream
        self._driver.copy_batch(pieces.targets, pieces.sources, pieces.sizes, stream, order)
        return stream

    def close(self) -> None:
        """Gives the staging memory back."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _seen(self, pieces: Pieces) -> Pieces | None:
        """The pieces with the addresses that kernels use; None where a kernel cannot copy them."""
        sources: U64 | None = pieces.sources
        targets: U64 | None = pieces.targets
        if self._direction is Direction.LOAD:
            sources = self._host.seen_by_kernels(pieces.sources)
        else:
            targets = self._host.seen_by_kernels(pieces.targets)
        if sources is None or targets is None:
            return None
        seen = Pieces(sources=sources, targets=targets, sizes=pieces.sizes)
        return seen if _aligned(seen) else None


class Lanes:
    """Those of one direction. One thread at a time.

    Lanes of different sizes of pieces have the same streams, and lanes that share portions have others: more streams
    than the device has queues would let one wait for another, or for the engine's.
    """

    def __init__(
        self, driver: CudaDriver, host: PinnedHost, direction: Direction, route: Route, kernel: MakesKernel
    ) -> None:
        self._driver = driver
        urgent = 1.0 if direction is Direction.LOAD else 0.0
        ways = (route.large, route.staged, route.small, route.beside)
        streams = [
            [driver.create_stream(urgent=urgent) for _ in range(max(lane.streams for lane in beside if lane))]
            for beside in zip_longest(*ways)
        ]
        self.large, self.staged, self.small, self.beside = (
            tuple(
                OpenLane(driver, host, direction, lane, own, kernel)
                for lane, own in zip(lanes, streams, strict=False)
            )
            for lanes in ways
        )
        self._streams = [stream for own in streams for stream in own]

    def wait(self, event: int) -> None:
        """What is started from now on comes after the event."""
        for stream in self._streams:
            self._driver.wait(stream, event)

    def close(self) -> None:
        """Ends them; nothing is under way. Again: nothing."""
        streams, self._streams = self._streams, []
        self._driver.destroy(streams=streams, events=[])
        for lane in (*self.large, *self.staged, *self.small, *self.beside):
            lane.close()


def _aligned(pieces: Pieces) -> bool:
    """Whether kernels can copy pieces of one size at these addresses."""
    bits = np.bitwise_or.reduce(pieces.sources) | np.bitwise_or.reduce(pieces.targets) | pieces.sizes[0]
    return not bits % np.uint64(ALIGNMENT_BYTES)
