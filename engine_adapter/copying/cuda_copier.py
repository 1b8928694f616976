"""The copier of an engine on CUDA: batches on streams of its own, completed by events.

Each direction has its queue, its lanes and two threads: one cuts batches into portions and issues them, one waits until
a portion has come and completes its batch. So both directions run at once, nothing waits between two portions, and no
thread holds the GIL while it waits. Where nothing is under way `submit` itself issues the first portion, a small one:
no hand-over from thread to thread comes before the first byte. What is under way is bounded in bytes and portions; a
batch of which nothing has been issued can be taken back.

Order. A store's blocks were committed after the event of the step that wrote them, so nothing has to come before it; a
load is complete before `done`, a group of its layers before `group_done`, and no kernel that reads it is launched
before. A batch whose `after` names an event waits for it on the device. A kill at any point leaves the store without
the word of `done`: bytes that arrive later are nobody's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import CopierStats, CopyBatch, Direction, complete, complete_group, give_up
from engine_adapter.copying.cuda_driver import CudaDriver, SourceOrder, Waiting
from engine_adapter.copying.device_sums import MakesSums, Summing, Sums
from engine_adapter.copying.kernel import CopyKernel
from engine_adapter.copying.lanes import Lanes, MakesKernel
from engine_adapter.copying.pinned_host import PinnedHost
from engine_adapter.copying.portions import CopyLimits, Planner, Portion, host_side
from engine_adapter.copying.routes import DEFAULT_ROUTES, Route
from engine_adapter.copying.sum_kernel import SumKernel
from kvstore.errors import KvstoreError, Unavailable
from kvstore.faults import fault

__all__ = ["CopyLimits", "CudaCopier"]

U64 = NDArray[np.uint64]

_LOG = logging.getLogger("kvstore.copier")
_GRACE_S = 5.0
"""What is under way is bounded, milliseconds; a device that takes longer is broken."""


class CudaCopier:
    """Copier for one CUDA device, in its primary context, which callers need not have made current. Any thread."""

    def __init__(
        self,
        device_index: int,
        *,
        limits: CopyLimits | None = None,
        routes: Mapping[Direction, Route] = DEFAULT_ROUTES,
        driver: CudaDriver | None = None,
        kernel: MakesKernel = CopyKernel,
        sums: MakesSums = SumKernel,
    ) -> None:
        """Compiles what routes and checksums need. Raises: FailedPrecondition where there is no driver or device."""
        self._driver = driver or CudaDriver(device_index)
        self._host = PinnedHost(self._driver)
        limits = limits or CopyLimits()
        self._ways = tuple(
            _Way(self._driver, self._host, direction, routes[direction], limits, kernel, sums)
            for direction in Direction
        )

    def takes_sums(self, nbytes: int) -> bool:
        """See Copier."""
        return all(way.sums.take(nbytes) for way in self._ways)

    def register(self, address: int, nbytes: int) -> None:
        """Host memory was mapped that copies will touch: it is pinned ahead of them, or by the first of them."""
        self._host.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """Host memory is about to be unmapped. Also after `close`."""
        self._host.unregister(address)

    def pin(self, addresses: U64) -> None:
        """Returns once the registered memory with these addresses is pinned, or cannot be."""
        self._host.pin(addresses)

    def pin_ahead(self) -> None:
        """Has all registered memory pinned by a thread of its own. Without it, the first copy has that begin."""
        self._host.pin_ahead()

    def submit(self, batch: CopyBatch) -> bool:
        """See Copier. Raises: Unavailable once the device has failed; the engine cannot go on then either."""
        return self._ways[batch.direction].submit(batch)

    def cancel(self, batch: CopyBatch) -> bool:
        """See Copier."""
        return self._ways[batch.direction].cancel(batch)

    def computing(self, steps: int) -> None:
        """See Copier."""
        self._host.computing = steps > 0
        for way in self._ways:
            way.planner.computing = steps > 0

    def close(self, timeout_s: float = 10.0) -> None:
        """See Copier. What was not issued by then is dropped; what was issued is waited for, since it is under way."""
        deadline = time.monotonic() + timeout_s
        for way in self._ways:
            way.finish()
        for way in self._ways:
            way.close(deadline)
        self._host.close()

    def stats(self) -> CopierStats:
        """Counters now."""
        load, store = self._ways
        return CopierStats(
            loaded_blocks=load.copied_blocks,
            stored_blocks=store.copied_blocks,
            waiting_blocks=load.waiting_blocks + store.waiting_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """A portion under way. Its batch is complete with its last portion, a group of it with the last one of that."""

    batch: CopyBatch
    portion: Portion
    events: list[int]
    waiting: Waiting
    summing: Summing | None


class _Way:
    """One direction: see the module."""

    def __init__(
        self,
        driver: CudaDriver,
        host: PinnedHost,
        direction: Direction,
        route: Route,
        limits: CopyLimits,
        kernel: MakesKernel,
        sums: MakesSums,
    ) -> None:
        self._driver = driver
        self._host = host
        self._direction = direction
        self._route = route
        self._limits = limits
        self._lanes = Lanes(driver, host, direction, route, kernel)
        self.planner = Planner(host, direction, route, limits, self._lanes)
        self.sums = Sums.opened(
            driver,
            direction,
            places=limits.flight_portions + 2,
            most_blocks=limits.planned_portions * limits.portion_copies,
            from_bytes=limits.summed_from_bytes,
            kernel=sums,
        )
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # of the issuing thread: batches, room
        self._landing = threading.Condition(lock)  # of the finishing thread: flights
        self._queue: deque[CopyBatch] = deque()
        self._begun: tuple[CopyBatch, Iterator[Portion]] | None = (
            None  # by a caller; the rest is to be issued
        )
        self._claimed = False  # a caller issues just now: lanes belong to one thread at a time
        self._flights: deque[_Flight] = deque()
        self._open: set[CopyBatch] = set()  # taken, and neither complete nor given up
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

    # ------------------------------------------------------------ any thread

    def submit(self, batch: CopyBatch) -> bool:
        """See Copier."""
        count = len(batch.sources)
        # Pinning takes milliseconds an extent: the issuing thread's business, never the caller's.
        unpinned = self._host.pending(host_side(batch))
        with self._work:
            if self._failure is not None:
                raise Unavailable(f"the device cannot copy any more: {self._failure}")
            if self._finishing or (
                self.waiting_blocks and self.waiting_blocks + count > self._limits.max_blocks
            ):
                return False
            self.waiting_blocks += count
            self._open.add(batch)
            idle = not (unpinned or self._queue or self._claimed or self._begun or self._flights)
            if idle:
                self._claimed = True
            else:
                self._queue.append(batch)
                self._work.notify()
        if idle:
            self._begin(batch)
        return True

    def cancel(self, batch: CopyBatch) -> bool:
        """See Copier."""
        with self._work:
            if batch not in self._queue:
                return False
            self._queue.remove(batch)
            self._open.discard(batch)
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
            self._lanes.close()  # closing again is nothing
            self.sums.close()
            self._driver.destroy(
                streams=[], events=[event for pool in self._events.values() for event in pool]
            )
            self._events = {waiting: [] for waiting in Waiting}

    def _begin(self, batch: CopyBatch) -> None:
        """Issues the first portion on the caller's thread, which has claimed the lanes; leaves the rest."""
        rest = self.planner.portions(batch, self._limits.first_bytes)
        try:
            with self._driver.current():
                first = next(rest)
                self._follow(batch)
                self._issue(batch, first)
        except Exception as error:  # noqa: BLE001 (as in the thread that would have issued it)
            self._fail(error)
        finally:
            with self._work:
                self._claimed = False
                if self._failure is None and not first.last:
                    self._begun = batch, rest
                self._work.notify()

    # ------------------------------------------------------------ the issuing thread

    def _guarded(self, run: Callable[[], None]) -> None:
        """A thread's boundary: a failure of the device ends this direction, and `submit` says so."""
        try:
            self._driver.enter()
            run()
        except Exception as error:  # noqa: BLE001 (a thread's boundary: the other threads must learn of it)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _LOG.error("the copier failed: %s", error, exc_info=not isinstance(error, KvstoreError))
        with self._work:
            self._failure = error
            batches, self._open = self._open, set()
            self._work.notify()
        for batch in batches:
            give_up(batch)

    def _issue_all(self) -> None:
        try:
            while (work := self._next()) is not None:
                batch, rest = work
                for portion in rest:
                    if not self._room_for(portion.nbytes):
                        return
                    self._issue(batch, portion)
        finally:
            with self._landing:
                self._issued_all = True
                self._landing.notify()

    def _next(self) -> tuple[CopyBatch, Iterator[Portion]] | None:
        """What is to be issued next; None once finishing and empty."""
        with self._work:
            while self._claimed or not (self._begun or self._queue):
                if self._failure is not None or (self._finishing and not self._claimed):
                    return None
                self._work.wait()
            begun, self._begun = self._begun, None
            if begun is not None:
                return begun
            batch = self._queue.popleft()
        self._follow(batch)
        return batch, self.planner.portions(batch, self._limits.portion_bytes)

    def _follow(self, batch: CopyBatch) -> None:
        """What is issued from now on comes after the event that a batch names."""
        if batch.after is not None:
            self._lanes.wait(batch.after)
            if (sums := self.sums.of(batch)) is not None:
                sums.follow(batch.after)

    def _issue(self, batch: CopyBatch, portion: Portion) -> None:
        """Puts a portion, and events behind it, into streams."""
        # A request waits for the end of a load: a core for a millisecond or two. Nobody waits for anything else.
        spins = self._direction is Direction.LOAD and portion.left_bytes < self._limits.portion_bytes
        waiting = Waiting.SPIN if spins else Waiting.SLEEP
        events = [
            self._mark(
                lane.start(part, lane.lane.order if batch.after is None else SourceOrder.STREAM), waiting
            )
            for lane, part in portion.dealt()
        ]
        summing = self._sum(batch, portion, events, waiting)
        flight = _Flight(batch=batch, portion=portion, events=events, waiting=waiting, summing=summing)
        with self._landing:
            self._flights.append(flight)
            self._flight_bytes += portion.nbytes
            self._landing.notify()
        fault("copy.issued")

    def _sum(self, batch: CopyBatch, portion: Portion, events: list[int], waiting: Waiting) -> Summing | None:
        """Has blocks summed that a portion makes whole: what comes with it, behind one more of its events."""
        sums = self.sums.of(batch)
        if sums is None:
            return None
        if self._direction is Direction.LOAD:
            for event in events:
                sums.follow(event)
        if not portion.whole:
            return None
        summing, stream = sums.start(batch, portion.whole)
        events.append(self._mark(stream, waiting))
        return summing

    def _mark(self, stream: int, waiting: Waiting) -> int:
        """An event behind what is in the stream."""
        with self._work:
            event = self._events[waiting].pop() if self._events[waiting] else 0
        event = event or self._driver.create_event(waiting)
        self._driver.record(event, stream)
        return event

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

    # ------------------------------------------------------------ the finishing thread

    def _finish_all(self) -> None:
        while (flight := self._oldest()) is not None:
            portion = flight.portion
            for event in flight.events:
                self._driver.synchronize(event)
            if flight.summing is not None and (sums := self.sums.of(flight.batch)) is not None:
                sums.collect(flight.batch, flight.summing)
            with self._work:
                self._flights.popleft()
                self._flight_bytes -= portion.nbytes
                self._events[flight.waiting] += flight.events
                is_open = flight.batch in self._open
                if portion.last:
                    self._open.discard(flight.batch)
                    self.waiting_blocks -= len(flight.batch.sources)
                    self.copied_blocks += len(flight.batch.sources)
                self._work.notify()
            if portion.ends_group and is_open:
                complete_group(flight.batch, portion.group)
            if portion.last and is_open:
                complete(flight.batch)

    def _oldest(self) -> _Flight | None:
        """The portion that was issued first; None once all were issued and have come."""
        with self._landing:
            while not self._flights:
                if self._issued_all:
                    return None
                self._landing.wait()
            return self._flights[0]
