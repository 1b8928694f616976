"""The copier of an engine on CUDA: batches on streams of its own, completed by events.

Each direction has its queue, its streams and two threads: one cuts batches into portions and issues them, one waits
until a portion has come and completes its batch. So both directions run at once, nothing waits between two portions,
and no thread holds the GIL while it waits. What is under way is bounded in bytes and portions; what has not been issued
can be taken back.

Order. A store's blocks were committed after the event of the step that wrote them, so nothing has to come before it; a
load is complete before `done`, and its request is admitted only then. A batch whose `after` names an event waits for it
on the device. A kill at any point leaves the store without the word of `done`: bytes that arrive later are nobody's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copier import CopierStats, CopyBatch, Direction, complete
from engine_adapter.copy_kernel import ALIGNMENT_BYTES, MAX_PIECES, CopyKernel, KernelShape
from engine_adapter.copy_plan import Pieces, portions, runs, shares, split
from engine_adapter.copy_routes import DEFAULT_ROUTES, Lane, Route
from engine_adapter.cuda_driver import CudaDriver, SourceOrder, Waiting
from engine_adapter.pinned_host import PinnedHost
from kvstore.errors import KvstoreError, Unavailable
from kvstore.faults import fault

__all__ = ["CopyLimits", "CudaCopier", "Launches"]

U64 = NDArray[np.uint64]

_LOG = logging.getLogger("kvstore.copier")
_GRACE_S = 5.0
"""What is under way is bounded, milliseconds; a device that takes longer is broken."""


class Launches(Protocol):
    """A compiled kernel (`CopyKernel`)."""

    def launch(self, pieces: Pieces, stream: int) -> None:
        """Copies."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Of one direction."""

    max_blocks: int = 16384
    """Most blocks taken and not complete; a batch that finds none is always taken."""
    portion_bytes: int = 64 << 20
    """What is issued at once, and has an event: 1.2 ms at 55 GB/s."""
    portion_copies: int = 256
    """Most copies of a portion that the copy engines carry out."""
    flight_bytes: int = 256 << 20
    """Most bytes issued and not complete."""
    flight_portions: int = 8
    run_bytes: int = 32 << 20
    """Longest run that is one copy."""


class CudaCopier:
    """Copier for one CUDA device, in its primary context, which callers need not have made current. Any thread."""

    def __init__(
        self,
        device_index: int,
        *,
        limits: CopyLimits | None = None,
        routes: Mapping[Direction, Route] = DEFAULT_ROUTES,
        driver: CudaDriver | None = None,
        kernel: Callable[[CudaDriver, KernelShape], Launches] = CopyKernel,
    ) -> None:
        """Compiles what the routes need. Raises: FailedPrecondition where there is no driver or no such device."""
        self._driver = driver or CudaDriver(device_index)
        self._host = PinnedHost(self._driver)
        limits = limits or CopyLimits()
        self._ways = tuple(
            _Way(self._driver, self._host, direction, routes[direction], limits, kernel)
            for direction in Direction
        )

    def register(self, address: int, nbytes: int) -> None:
        """Host memory was mapped that copies will touch: pins it. Also after `close`."""
        self._host.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """Host memory is about to be unmapped. Also after `close`."""
        self._host.unregister(address)

    def submit(self, batch: CopyBatch) -> bool:
        """See Copier. Raises: Unavailable once the device has failed; the engine cannot go on then either."""
        return self._ways[batch.direction].submit(batch)

    def cancel(self, batch: CopyBatch) -> bool:
        """See Copier."""
        return self._ways[batch.direction].cancel(batch)

    def close(self, timeout_s: float = 10.0) -> None:
        """See Copier. What was not issued by then is dropped; what was issued is waited for, since it is under way."""
        deadline = time.monotonic() + timeout_s
        for way in self._ways:
            way.finish()
        for way in self._ways:
            way.close(deadline)

    def stats(self) -> CopierStats:
        """Counters now."""
        load, store = self._ways
        return CopierStats(
            loaded_blocks=load.copied_blocks,
            stored_blocks=store.copied_blocks,
            waiting_blocks=load.waiting_blocks + store.waiting_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenLane:
    """A lane with its stream and its kernel."""

    lane: Lane
    stream: int
    kernel: Launches | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """A portion under way. Its batch is complete with its last portion."""

    batch: CopyBatch
    nbytes: int
    events: list[int]
    waiting: Waiting
    last: bool


class _Way:
    """One direction: see the module."""

    def __init__(
        self,
        driver: CudaDriver,
        host: PinnedHost,
        direction: Direction,
        route: Route,
        limits: CopyLimits,
        kernel: Callable[[CudaDriver, KernelShape], Launches],
    ) -> None:
        self._driver = driver
        self._host = host
        self._direction = direction
        self._route = route
        self._limits = limits
        self._large = [self._open(lane, kernel) for lane in route.large]
        self._small = [self._open(lane, kernel) for lane in route.small]
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # of the issuing thread: batches, room
        self._landing = threading.Condition(lock)  # of the finishing thread: flights
        self._queue: deque[CopyBatch] = deque()
        self._flights: deque[_Flight] = deque()
        self._events: dict[Waiting, list[int]] = {waiting: [] for waiting in Waiting}
        self._flight_bytes = 0
        self._finishing = self._dropping = self._issued_all = False
        self._failure: Exception | None = None
        self.waiting_blocks = 0
        self.copied_blocks = 0
        name = direction.name.lower()
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"kvstore-{name}-{part}", daemon=True)
            for part, run in (("issue", self._issue_all), ("finish", self._finish_all))
        ]
        for thread in self._threads:
            thread.start()

    def _open(self, lane: Lane, kernel: Callable[[CudaDriver, KernelShape], Launches]) -> _OpenLane:
        stream = self._driver.create_stream(urgent=1.0 if self._direction is Direction.LOAD else 0.0)
        made: Launches | None = None
        if lane.kernel is not None:
            try:
                made = kernel(self._driver, lane.kernel)
            except KvstoreError as error:
                _LOG.warning("small blocks go by the copy engines: %s", error)
        return _OpenLane(lane=lane, stream=stream, kernel=made)

    # ------------------------------------------------------------ any thread

    def submit(self, batch: CopyBatch) -> bool:
        """See Copier."""
        count = len(batch.sources)
        with self._work:
            if self._failure is not None:
                raise Unavailable(f"the device cannot copy any more: {self._failure}")
            if self._finishing or (
                self.waiting_blocks and self.waiting_blocks + count > self._limits.max_blocks
            ):
                return False
            self.waiting_blocks += count
            self._queue.append(batch)
            self._work.notify()
        return True

    def cancel(self, batch: CopyBatch) -> bool:
        """See Copier."""
        with self._work:
            if batch not in self._queue:
                return False
            self._queue.remove(batch)
            self.waiting_blocks -= len(batch.sources)
        return True

    def finish(self) -> None:
        """Takes nothing more."""
        with self._work:
            self._finishing = True
            self._work.notify()

    def close(self, deadline: float) -> None:
        """Ends both threads, and what they used once they are gone. `deadline`: of time.monotonic."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._work:
            self._dropping = True
            dropped = len(self._queue)
            self._queue.clear()
            self._work.notify()
        if dropped:
            _LOG.warning("%d batches were not copied before the deadline", dropped)
        for thread in self._threads:
            thread.join(_GRACE_S)
        if any(thread.is_alive() for thread in self._threads):
            _LOG.error("the device does not complete its copies")
        elif self._failure is None:
            streams = [lane.stream for lane in (*self._large, *self._small)]
            self._driver.destroy(
                streams=streams, events=[event for pool in self._events.values() for event in pool]
            )
            self._large, self._small = [], []  # closing again is nothing
            self._events = {waiting: [] for waiting in Waiting}

    # ------------------------------------------------------------ the issuing thread

    def _guarded(self, run: Callable[[], None]) -> None:
        """A thread's boundary: a failure of the device ends this direction, and `submit` says so."""
        try:
            self._driver.enter()
            run()
        except Exception as error:  # noqa: BLE001 (a thread's boundary: the other threads must learn of it)
            _LOG.error("the copier failed: %s", error, exc_info=not isinstance(error, KvstoreError))
            with self._work:
                self._failure = error
                self._work.notify()

    def _issue_all(self) -> None:
        try:
            while (batch := self._next()) is not None:
                if batch.after is not None:
                    for lane in (*self._large, *self._small):
                        self._driver.wait(lane.stream, batch.after)
                if not self._issue(batch):
                    return
        finally:
            with self._landing:
                self._issued_all = True
                self._landing.notify()

    def _next(self) -> CopyBatch | None:
        """The next batch; None once finishing and empty."""
        with self._work:
            while not self._queue:
                if self._finishing or self._failure is not None:
                    return None
                self._work.wait()
            return self._queue.popleft()

    def _issue(self, batch: CopyBatch) -> bool:
        """Issues every portion as room comes; False where the rest was given up."""
        planned = list(self._portions(batch))
        for place, (lanes, pieces) in enumerate(planned, 1):
            nbytes = pieces.nbytes
            if not self._room_for(nbytes):
                return False
            last = place == len(planned)
            # A request waits for the end of a load: a core for a millisecond. Nobody waits for anything else.
            waiting = Waiting.SPIN if last and self._direction is Direction.LOAD else Waiting.SLEEP
            events = [self._start(batch, lane, part, waiting) for lane, part in _dealt(lanes, pieces)]
            flight = _Flight(batch=batch, nbytes=nbytes, events=events, waiting=waiting, last=last)
            with self._landing:
                self._flights.append(flight)
                self._flight_bytes += nbytes
                self._landing.notify()
            fault("copy.issued")
        return True

    def _portions(self, batch: CopyBatch) -> Iterator[tuple[list[_OpenLane], Pieces]]:
        """What is issued at once, and by which lanes. At least one portion, which is empty for an empty batch."""
        limits = self._limits
        begins = runs(
            batch.sources,
            batch.targets,
            batch.nbytes,
            borders=(self._host.starts,),
            max_run_bytes=limits.run_bytes,
        )
        large, small = split(
            batch.sources,
            batch.targets,
            batch.nbytes,
            begins,
            large_from_bytes=self._route.large_from_bytes,
        )
        for lanes, pieces in ((self._large, large), (self._small, small)):
            by_kernels = all(lane.kernel for lane in lanes)
            most = MAX_PIECES if by_kernels else limits.portion_copies * len(lanes)
            for portion in portions(pieces, max_bytes=limits.portion_bytes, max_pieces=most):
                yield lanes, portion
        if not len(batch.sources):
            yield self._large, large

    def _room_for(self, nbytes: int) -> bool:
        """Waits until so much more may be under way; False where nothing more is to be issued."""
        limits = self._limits
        with self._work:
            while self._flights and (
                len(self._flights) >= limits.flight_portions
                or self._flight_bytes + nbytes > limits.flight_bytes
            ):
                if self._dropping or self._failure is not None:
                    return False
                self._work.wait()
            return not self._dropping and self._failure is None

    def _start(self, batch: CopyBatch, lane: _OpenLane, pieces: Pieces, waiting: Waiting) -> int:
        """Puts copies and an event behind them into a lane's stream; the event."""
        driver = self._driver
        for_kernel = self._for_kernel(pieces) if lane.kernel is not None else None
        if lane.kernel is not None and for_kernel is not None:
            lane.kernel.launch(for_kernel, lane.stream)
        else:
            order = lane.lane.order if batch.after is None else SourceOrder.STREAM
            driver.copy_batch(pieces.targets, pieces.sources, pieces.sizes, lane.stream, order)
        with self._work:
            event = self._events[waiting].pop() if self._events[waiting] else 0
        event = event or driver.create_event(waiting)
        driver.record(event, lane.stream)
        return event

    def _for_kernel(self, pieces: Pieces) -> Pieces | None:
        """The pieces with the addresses that kernels use; None where a kernel cannot copy them."""
        sources: U64 | None = pieces.sources
        targets: U64 | None = pieces.targets
        if self._direction is Direction.LOAD:
            sources = self._host.seen_by_kernels(pieces.sources)
        else:
            targets = self._host.seen_by_kernels(pieces.targets)
        if sources is None or targets is None:
            return None
        bits = np.bitwise_or.reduce(sources) | np.bitwise_or.reduce(targets) | pieces.sizes[0]
        if bits % np.uint64(ALIGNMENT_BYTES):
            return None
        return Pieces(sources=sources, targets=targets, sizes=pieces.sizes)

    # ------------------------------------------------------------ the finishing thread

    def _finish_all(self) -> None:
        while (flight := self._oldest()) is not None:
            for event in flight.events:
                self._driver.synchronize(event)
            with self._work:
                self._flights.popleft()
                self._flight_bytes -= flight.nbytes
                self._events[flight.waiting] += flight.events
                if flight.last:
                    self.waiting_blocks -= len(flight.batch.sources)
                    self.copied_blocks += len(flight.batch.sources)
                self._work.notify()
            if flight.last:
                complete(flight.batch)

    def _oldest(self) -> _Flight | None:
        """The portion that was issued first; None once all were issued and have come."""
        with self._landing:
            while not self._flights:
                if self._issued_all:
                    return None
                self._landing.wait()
            return self._flights[0]


def _dealt(lanes: list[_OpenLane], pieces: Pieces) -> Iterator[tuple[_OpenLane, Pieces]]:
    """A portion's part of each lane that gets one."""
    parts = shares(pieces, [lane.lane.weight for lane in lanes])
    return ((lane, part) for lane, part in zip(lanes, parts, strict=True) if len(part))
