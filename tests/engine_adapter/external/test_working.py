"""A rank's half: every job ends once, whatever becomes of it, and nothing is believed that is not so."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction
from engine_adapter.external.jobs import CopyJob, StepPlan, StepReport
from engine_adapter.external.moving import Ticket
from engine_adapter.external.working import Working
from kvstore.errors import Unavailable

U32 = NDArray[np.uint32]


class Memory:
    """Slot n lies at n × 4096; `lost`: what is no longer the session's."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.away = False

    def address_of(self, slots: U32) -> NDArray[np.uint64]:
        if self.away:
            raise Unavailable("away")
        return slots.astype(np.uint64) * np.uint64(4096)

    def sealed(self, slots: U32, generations_: U32) -> NDArray[np.bool_]:
        return np.array([slot not in self.lost for slot in slots.tolist()])


class Mover:
    """Keeps tickets until a test lets them end."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.full = False

    def submit(self, ticket: Ticket) -> bool:
        if not self.full:
            self.tickets.append(ticket)
        return not self.full

    def cancel(self, ticket: Ticket) -> bool:
        if ticket not in self.tickets:
            return False
        self.tickets.remove(ticket)
        return True

    def close(self, timeout_s: float) -> None:
        pass

    def end(self) -> None:
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            ticket.done()

    def fail(self) -> None:
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            ticket.failed()


def job(number: int, request: str, pages: list[int], missing: tuple[int, ...] = ()) -> CopyJob:
    count = len(pages)
    return CopyJob(
        number=number,
        request=request,
        pages=np.array(pages, dtype=np.int64).reshape(count, 1),
        slots=np.arange(count, dtype=np.uint32),
        generations=np.zeros(count, dtype=np.uint32),
        missing=missing,
    )


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def mover() -> Mover:
    return Mover()


@pytest.fixture
def working(memory: Memory, mover: Mover) -> Working:
    return Working(memory, mover, part=1, part_bytes=8192)


def reported(working: Working) -> tuple[dict[int, int], set[int]]:
    report = working.report() or StepReport()
    return report.done, report.failed


def test_a_load_is_named_and_reported_when_it_has_ended(working: Working, mover: Mover) -> None:
    working.begin_loads(StepPlan(loads=(job(1, "a", [5, 6]),)))
    assert not working.received().requests
    assert reported(working) == ({}, set())
    (ticket,) = mover.tickets
    assert (ticket.direction, ticket.slots.tolist()) == (
        Direction.LOAD,
        [8192, 8192 + 4096],
    )  # this rank's part
    mover.end()
    found = working.received()
    assert (found.requests, found.failed_pages) == ({"a"}, frozenset())
    assert reported(working) == ({1: 1}, set())
    assert not working.received().requests


def test_a_load_whose_slots_are_gone_afterwards_is_not_believed(
    working: Working, memory: Memory, mover: Mover
) -> None:
    working.begin_loads(StepPlan(loads=(job(1, "a", [5, 6, 7], missing=(8,)),)))
    memory.lost = {1}
    mover.end()
    found = working.received()
    assert (found.failed_requests, found.failed_pages) == ({"a"}, {6, 8})
    assert reported(working) == ({1: 1}, {1})


def test_jobs_of_a_copier_that_fails_have_failed(working: Working, mover: Mover) -> None:
    """They never ended: an engine waited for the load, and at its next step for the store."""
    working.begin_loads(StepPlan(loads=(job(1, "a", [5, 6]),)))
    working.begin_stores(StepPlan(stores=(job(2, "b", [7]),)))
    mover.fail()
    found = working.received()
    assert (found.failed_requests, found.failed_pages) == ({"a"}, {5, 6})
    assert reported(working) == ({1: 1, 2: 1}, {1, 2})


def test_a_load_of_nothing_is_answered_at_once(working: Working) -> None:
    working.begin_loads(StepPlan(loads=(job(1, "a", [], missing=(3, 4)), job(2, "b", []))))
    found = working.received()
    assert (found.requests, found.failed_requests, found.failed_pages) == ({"a", "b"}, {"a"}, {3, 4})
    assert reported(working) == ({1: 1, 2: 1}, set())


def test_a_load_waits_for_room_and_a_store_does_not(working: Working, mover: Mover) -> None:
    mover.full = True
    working.begin_loads(StepPlan(loads=(job(1, "a", [5]),)))
    working.begin_stores(StepPlan(stores=(job(2, "b", [6]),)))
    assert working.loads_wait
    assert reported(working) == ({2: 1}, {2})
    mover.full = False
    working.begin_loads(StepPlan())
    mover.end()
    assert working.received().requests == {"a"}


def test_memory_that_does_not_come_is_a_failed_job(working: Working, memory: Memory) -> None:
    memory.away = True
    working.begin_loads(StepPlan(loads=(job(1, "a", [5]),)))
    working.begin_stores(StepPlan(stores=(job(2, "b", [6]),)))
    assert working.received().failed_pages == {5}
    assert reported(working) == ({1: 1, 2: 1}, {1, 2})


def test_what_a_load_did_not_bring_is_not_stored(working: Working) -> None:
    """vLLM has blocks whose load failed in the same step's list of what to save."""
    working.begin_stores(StepPlan(stores=(job(1, "a", [5, 6]), job(2, "b", [7]))), failed_pages={6})
    assert reported(working) == ({1: 1}, {1})


def test_before_a_step_stores_are_taken_back_or_waited_for(working: Working, mover: Mover) -> None:
    working.begin_stores(StepPlan(stores=(job(1, "a", [5]), job(2, "a", [6]))))
    mover.tickets.pop(0).done()
    working.before_step(StepPlan(before_step=(1, 2, 99)))
    assert not mover.tickets
    assert reported(working) == ({1: 1, 2: 1}, {2})


def test_pages_of_an_ended_request_are_held_until_nothing_reads_them(working: Working, mover: Mover) -> None:
    working.begin_stores(StepPlan(stores=(job(1, "a", [5]), job(2, "a", [6]))))
    working.begin_stores(StepPlan(held={"a": (1, 2), "b": (77,)}))
    assert working.sent() == {"b"}
    mover.tickets.pop(0).done()
    assert working.sent() == set()
    mover.end()
    assert working.sent() == {"a"}
    assert working.sent() == set()
    assert reported(working) == ({1: 1, 2: 1}, set())


def test_a_rank_with_the_very_same_kv_leaves_storing_to_another(memory: Memory, mover: Mover) -> None:
    working = Working(memory, mover, part=0, part_bytes=4096, stores=False)
    working.begin_stores(StepPlan(stores=(job(1, "a", [5]),)))
    assert not mover.tickets
    assert reported(working) == ({1: 1}, set())


def test_reports_of_ranks_add_up() -> None:
    one, two = StepReport(done={1: 1, 2: 1}, failed={2}), StepReport(done={2: 1})
    both = one.add(two)
    assert (both.done, both.failed) == ({1: 1, 2: 2}, {2})


def test_nothing_is_copied_once_the_engines_pages_go(working: Working, mover: Mover) -> None:
    """vLLM 0.33 says before it sleeps that its KV's memory goes; copies would read and write what is not there."""
    working.begin_loads(StepPlan(loads=(job(1, "a", [1, 2]),)))
    working.begin_stores(StepPlan(stores=(job(2, "b", [3]),)))
    mover.full = True
    working.begin_loads(StepPlan(loads=(job(3, "c", [4]),)))  # waits for the mover
    working.rest()
    assert not mover.tickets
    assert not working.loads_wait
    received = working.received()
    assert received.requests == received.failed_requests == {"a", "c"}
    assert working.report() == StepReport(done={1: 1, 2: 1, 3: 1}, failed={1, 2, 3})
    mover.full = False
    working.begin_stores(StepPlan(stores=(job(4, "b", [3]),)))  # awake
    mover.end()
    assert working.report() == StepReport(done={4: 1})
