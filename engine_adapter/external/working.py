"""A rank's half: copies what the scheduling process plans, between the engine's pages and DRAM.

Each job ends once and is reported, whatever becomes of it. A load is believed only if the slots were still the
session's when the copy had ended; what was not is named as failed, and the engine computes it. A store is never sealed
unless all of it was copied from pages that were still the request's.

The engine's worker thread calls; copies end on the mover's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction
from engine_adapter.external.jobs import CopyJob, StepPlan, StepReport
from engine_adapter.external.moving import BlockMover, StepEvent, Ticket
from kvstore.errors import KvstoreError

__all__ = ["Received", "SlotMemory", "Working"]

_LOG = logging.getLogger("kvstore.engine")
_STORE_ENDS_S = 30.0
"""A store that takes longer before a step is given up: it is never sealed, whatever it still reads."""

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class SlotMemory(Protocol):
    """What of `kvstore.client.dram_member.DramMember` is needed here."""

    def address_of(self, slots: U32) -> U64:
        """[n] addresses. Raises KvstoreError."""
        ...

    def sealed(self, slots: U32, generations_: U32) -> NDArray[np.bool_]:
        """[n] whether each still holds its block. Raises KvstoreError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Loads that have ended since the last call."""

    requests: frozenset[str]
    failed_requests: frozenset[str]
    failed_pages: frozenset[int]  # of the first group; nothing is in them


@dataclass(slots=True, eq=False)
class _Running:
    job: CopyJob
    ticket: Ticket | None = None  # None: not taken by the mover yet
    ended: bool = False
    failed_rows: NDArray[np.bool_] | None = field(default=None)  # [n]; None: all were copied
    given_up: bool = False


class Working:
    """See the module."""

    def __init__(
        self, memory: SlotMemory, mover: BlockMover, *, part: int, part_bytes: int, stores: bool = True
    ) -> None:
        """`part`: which part of a slot is this rank's. `stores` False: another rank has the very same KV and stores."""
        self._memory = memory
        self._mover = mover
        self._part_offset = np.uint64(part * part_bytes)
        self._stores = stores
        self._news = threading.Condition()
        self._running: dict[int, _Running] = {}
        self._loads: dict[int, _Running] = {}
        self._report = StepReport()
        self._held: dict[str, set[int]] = {}

    def before_step(self, plan: StepPlan) -> None:
        """Returns once no store that the plan names reads a page any more."""
        for number in plan.before_step:
            running = self._running.get(number)
            if running is not None and not running.ended:
                self._take_back(running)

    def begin_loads(self, plan: StepPlan, after: StepEvent | None = None) -> None:
        """Starts the plan's loads, and what the mover had no room for. `after`: what has to come before."""
        for job in plan.loads:
            self._loads[job.number] = self._running[job.number] = _Running(job)
        for running in self._loads.values():
            if running.ticket is None and not running.ended:
                self._begin(running, Direction.LOAD, after)

    @property
    def loads_wait(self) -> bool:
        """Whether some load is still to be taken by the mover."""
        return any(running.ticket is None and not running.ended for running in self._loads.values())

    def begin_stores(
        self, plan: StepPlan, failed_pages: Iterable[int] = (), after: StepEvent | None = None
    ) -> None:
        """Starts the plan's stores: the step has been computed, or will be at the event `after`.

        `failed_pages`: what a load did not bring is not stored either, wherever else it stands in the plan.
        """
        self._held.update({request: set(numbers) for request, numbers in plan.held.items()})
        failed = np.fromiter(failed_pages, dtype=np.int64)
        for job in plan.stores:
            running = self._running[job.number] = _Running(job)
            if not self._stores:
                self._end(running, failed=False)
            elif len(failed) and bool(np.isin(job.pages[:, 0], failed).any()):
                self._end(running, failed=True)
            else:
                self._begin(running, Direction.STORE, after)
                if running.ticket is None:  # no room: a store is not worth waiting for
                    self._end(running, failed=True)

    def received(self) -> Received:
        """Loads that have ended."""
        requests, failed_requests, failed_pages = set(), set(), set()
        with self._news:
            ended = [running for running in self._loads.values() if running.ended]
        for running in ended:
            job = running.job
            del self._loads[job.number]
            requests.add(job.request)
            failed = set(job.missing)
            if running.failed_rows is not None:
                failed |= set(job.pages[running.failed_rows, 0].tolist())
            if failed:
                failed_requests.add(job.request)
                failed_pages |= failed
        return Received(
            requests=frozenset(requests),
            failed_requests=frozenset(failed_requests),
            failed_pages=frozenset(failed_pages),
        )

    def sent(self) -> set[str]:
        """Ended requests whose pages nothing reads any more."""
        free = {request for request, numbers in self._held.items() if not self._reading(numbers)}
        for request in free:
            del self._held[request]
        return free

    def report(self) -> StepReport | None:
        """What has ended since the last call; None: nothing."""
        with self._news:
            for number, running in list(self._running.items()):
                if running.ended and number not in self._loads:
                    del self._running[number]
                    self._report.end(number, failed=running.failed_rows is not None or running.given_up)
        if not self._report.done:
            return None
        report, self._report = self._report, StepReport()
        return report

    def rest(self) -> None:
        """The engine's pages go, with what is in them: returns once nothing is copied. What could be is taken back."""
        with self._news:
            under_way = [running for running in self._running.values() if not running.ended]
        for running in under_way:
            if running.ticket is None:
                self._end(running, failed=True)
            else:
                self._take_back(running)

    def close(self, timeout_s: float) -> None:
        """Finishes what is under way; nothing is copied afterwards."""
        self._mover.close(timeout_s)

    # ------------------------------------------------------------ parts

    def _begin(self, running: _Running, direction: Direction, after: StepEvent | None) -> None:
        job = running.job
        if not len(job.slots):
            self._end(running, failed=False)
            return
        try:
            slots = self._memory.address_of(job.slots) + self._part_offset
        except KvstoreError as error:
            _LOG.warning("%d blocks cannot be copied: %s", len(job.slots), error)
            self._end(running, failed=True)
            return
        done, failed = partial(self._copied, running, direction), partial(self._failed, running)
        ticket = Ticket(direction, job.pages, slots, done, failed, after)
        running.ticket = ticket
        if not self._mover.submit(ticket):
            running.ticket = None

    def _copied(self, running: _Running, direction: Direction) -> None:
        """On the mover's thread."""
        good = None
        if direction is Direction.LOAD:
            try:
                good = self._memory.sealed(running.job.slots, running.job.generations)
            except KvstoreError:
                good = np.zeros(len(running.job.slots), dtype=np.bool_)
        with self._news:
            if good is not None and not good.all():
                running.failed_rows = ~good
            running.ended = True
            self._news.notify_all()

    def _failed(self, running: _Running) -> None:
        """On the mover's thread, or as it is begun: its copier has failed, and nothing of it counts."""
        self._end(running, failed=True)
        with self._news:
            self._news.notify_all()

    def _end(self, running: _Running, *, failed: bool) -> None:
        with self._news:
            running.failed_rows = np.ones(len(running.job.slots), dtype=np.bool_) if failed else None
            running.ended = True

    def _take_back(self, running: _Running) -> None:
        if running.ticket is not None and self._mover.cancel(running.ticket):
            self._end(running, failed=True)
            return
        with self._news:
            if not self._news.wait_for(lambda: running.ended, _STORE_ENDS_S):
                _LOG.error("a copy of %d blocks does not end: it is given up", len(running.job.slots))
                running.given_up = True

    def _reading(self, numbers: set[int]) -> bool:
        with self._news:
            return any(
                (running := self._running.get(number)) is not None and not running.ended for number in numbers
            )
