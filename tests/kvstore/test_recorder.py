"""The flight recorder: order, wrapping, torn records, a writer after another, and what a store notes."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import Corruption, InvalidArgument
from kvstore.layout import Tier
from kvstore.moves import MissCause
from kvstore.recorder import RING_RECORDS, Event, RingRecorder, describe, read_ring, ring_bytes
from tests.kvstore.store_rig import Rig, chain


def ring(records: int = 60) -> memoryview:
    """Memory of a ring."""
    return memoryview(bytearray(ring_bytes(records)))


class Clock:
    """A microsecond a call."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def test_records_come_back_in_order_with_all_their_numbers() -> None:
    memory = ring()
    recorder = RingRecorder(memory, Clock())
    recorder.note(Event.GRANT, 3, 5, 4, 1, 1 << 40, b"h" * 16)
    recorder.note(Event.DROP, Tier.DRAM, 7, 2, MissCause.CORRUPT)
    first, second = read_ring(memory)
    assert (first.number, first.time_us, second.number) == (1, 1, 2)
    expected = {"session": 3, "count": 5, "hits": 4, "fills": 1, "lease": 1 << 40, "block": "68" * 16}
    assert describe(first) == expected
    assert describe(second) == {"tier": "dram", "count": 7, "ended": 2, "cause": "corrupt"}


def test_the_last_ten_thousand_are_there() -> None:
    memory = ring(RING_RECORDS)
    recorder = RingRecorder(memory, Clock())
    for number in range(25_000):
        recorder.note(Event.GRANT, count=number)
    found = read_ring(memory)
    assert len(found) >= 10_000
    assert [record.count for record in found] == list(range(25_000 - len(found), 25_000))


def test_numbers_that_are_too_large_are_cut() -> None:
    memory = ring()
    RingRecorder(memory, Clock()).note(Event.GRANT, 1 << 20, 1 << 40, -1, 0, -1)
    (record,) = read_ring(memory)
    assert (record.who, record.count, record.a, record.c) == (0, 0, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


@pytest.mark.parametrize("written", [1, 8, 40, 63])
def test_a_record_that_its_writer_did_not_finish_is_passed_over(written: int) -> None:
    memory = ring(4)
    records = (len(memory) - 4096) // 64
    recorder = RingRecorder(memory, Clock())
    for number in range(records + 3):
        recorder.note(Event.SEAL, count=number)
    whole = bytes(memory)
    place = 4096 + 3 * 64  # the oldest: the next to be overwritten
    recorder.note(Event.SEAL, count=records + 3)
    new = bytes(memory[place : place + 64])
    memory[:] = whole
    memory[place : place + written] = new[:written]
    assert [record.count for record in read_ring(memory)] == list(range(4, records + 3))


def test_the_next_writer_goes_on_where_the_last_one_died() -> None:
    memory = ring(4)
    records = (len(memory) - 4096) // 64
    first = RingRecorder(memory, Clock())
    for number in range(records + 5):
        first.note(Event.SEAL, count=number)
    second = RingRecorder(memory, Clock())
    for number in range(records + 5, records + 9):
        second.note(Event.SEAL, count=number)
    assert [record.count for record in read_ring(memory)] == list(range(9, records + 9))


def test_memory_of_something_else_becomes_an_empty_ring_and_is_refused_by_readers() -> None:
    memory = memoryview(bytearray(b"\x5a" * ring_bytes(60)))
    with pytest.raises(Corruption):
        read_ring(memory)
    RingRecorder(memory, Clock())
    assert read_ring(memory) == []
    with pytest.raises(InvalidArgument):
        RingRecorder(memoryview(bytearray(4096)), Clock())


def test_an_event_of_a_newer_version_is_passed_over() -> None:
    memory = ring()
    recorder = RingRecorder(memory, Clock())
    recorder.note(999)  # type: ignore[arg-type]
    recorder.note(Event.READY)
    assert [record.event for record in read_ring(memory)] == [Event.READY]


def test_a_store_notes_one_record_a_call() -> None:
    rig = Rig()
    memory = ring(200)
    rig.store.watching.record_to(RingRecorder(memory, Clock()))
    session = rig.attach()
    hashes = chain(3)
    grant = rig.acquire(session, hashes, lease=9)
    rig.step(session, seals=rig.seals(session, hashes, grant.hbm_slots, grant.hbm_generations))
    rig.step(session, hbm=grant.hbm_slots)
    rig.store.clear(None)
    rig.store.dead(session, rig.now_ms)
    told = [(record.event, describe(record)) for record in read_ring(memory)]
    block = hashes[0].tobytes().hex()
    assert [event for event, _ in told] == [
        Event.ACTIVATE, Event.GRANT, Event.SEAL, Event.DROP, Event.CLEAR, Event.DEAD,
    ]  # fmt: skip
    assert told[1][1] == {
        "session": session, "count": 3, "hits": 0, "fills": 3, "lease": 9, "block": block,
    }  # fmt: skip
    assert told[2][1] == {"session": session, "count": 3, "published": 3, "block": block}
    assert told[3][1] == {"tier": "hbm", "count": 3, "ended": 3, "cause": "cleared", "block": block}


def test_moves_are_noted_when_they_begin_and_by_how_they_end() -> None:
    rig = Rig()
    session = rig.attach()
    hashes = chain(2)
    memory = ring(200)
    rig.write_through(session, hashes)
    rig.store.watching.record_to(RingRecorder(memory, Clock()))
    moves = rig.store.take_moves(0, 8)
    assert len(moves) == 2
    rig.store.moves_done(
        now_ms=rig.now_ms, path=0, ids=moves["id"], statuses=np.array([0, 2], dtype=np.uint8)
    )
    events = {record.event: describe(record) for record in read_ring(memory)}
    assert events[Event.MOVES_BEGIN]["writes"] == 2
    assert events[Event.MOVES_END]["ok"] == 1
    assert events[Event.MOVES_FAILED]["status"] == "io error"
