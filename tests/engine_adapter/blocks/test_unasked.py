"""Requests that the engine asks for no more give way to those that it does ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_adapter.base import RequestId
from engine_adapter.blocks.entry import Entry, Phase
from engine_adapter.blocks.unasked import Unasked
from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from kvstore.identity import HashChain
from kvstore.units import MIB
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS
BLOCKS = 70
"""Of a document: HBM and DRAM have 128 slots each, so neither has room for two."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("kv")
    config = small_config(folder, nvme_bytes=64 * MIB, dram_bytes=2 * MIB, dram_extent_bytes=1 * MIB)
    with started(config) as service:
        yield service
        assert service.faults() == []


@pytest.fixture
def engine(service: Service, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """It waits for ever for what others load: whatever it is given came by another way."""
    with attached(service.socket, request.node.name[:60], pages=128, patience_s=10 * DEADLINE_S) as driver:
        yield driver


def documents(engine: Driver, first: int) -> list[list[int]]:
    """Three, all of them on the disk alone."""
    prompts = [[first + number, *range(1, BLOCKS * B + 1)] for number in range(5)]
    for number, prompt in enumerate(prompts):
        engine.run(f"fill {number}", prompt)
        assert engine.client.flush(DEADLINE_S).pending_blocks == 0
    return prompts[:3]


def ask_until(engine: Driver, request: RequestId, ready: Callable[[Entry], bool]) -> None:
    """The engine asks for it until it is as it should be, and then no more."""
    entry = engine.blocks._requests[request]

    def asked() -> bool:
        assert engine.try_admit(request) is None
        engine.blocks.end_step()
        return entry.phase is Phase.QUEUED and entry.grant is None and ready(entry)

    wait_for("an answer", asked)


def test_one_that_asked_before_and_is_asked_for_no_more_keeps_no_turn(engine: Driver) -> None:
    """A preempted request is the only one that the engine asks for once it was passed over often. It waited until its
    patience ended for room in DRAM that was given to one which had asked before it, and which was to run after it."""
    first, behind, last = documents(engine, 1000)
    told, not_told = engine.enqueue("behind", behind), engine.enqueue("last", last)
    ask_until(engine, told, lambda entry: entry.turn_at > 0.0)
    wait_for("its blocks", lambda: engine.blocks.end_step() or engine.blocks._requests[told].changed)
    ask_until(engine, not_told, lambda entry: entry.lacks_room and entry.retry_at > time.monotonic() + 1.0)
    head, lacking = engine.enqueue("first", first), engine.blocks._requests[not_told]
    assert engine.admit(head, 3.0).cached_tokens == BLOCKS * B
    assert lacking.turn_at == 0.0
    assert not lacking.lacks_room, "else others give way as soon as it is asked for again"
    engine.release(head)
    for request in (told, not_told):
        assert engine.admit(request, 3.0).cached_tokens == BLOCKS * B
        engine.release(request)
    engine.await_nothing_used()


def test_one_whose_answer_is_taken_back_keeps_no_turn_either(
    engine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had got was taken back, its turn was not: one whose answer had been complete, and whose turn was over so,
    waited for it as soon as it was asked for again. And they were announced again the last first, so that the disk read
    first what was to run last."""
    complete, partial, _ = documents(engine, 2000)
    waiting = [engine.enqueue("complete", complete), engine.enqueue("partial", partial)]
    entries = [engine.blocks._requests[request] for request in waiting]
    for request, entry in zip(waiting, entries, strict=True):
        ask_until(engine, request, lambda entry: entry.turn_at > 0.0)
        wait_for("its blocks", lambda entry=entry: engine.blocks.end_step() or entry.changed)
        assert engine.try_admit(request) is None
        wait_for("an answer", lambda entry=entry: entry.may_go_on)
    head = engine.enqueue("first", [2999, *range(1, 130 * B)])  # more than HBM has
    announced: list[Entry] = []
    monkeypatch.setattr(engine.blocks, "_announce", announced.append)
    entries[0].asked_at = entries[1].asked_at  # as in one step

    def taken_back() -> bool:
        assert engine.try_admit(head) is None
        engine.blocks.end_step()
        return all(entry.phase is Phase.QUEUED for entry in entries)

    wait_for("both", taken_back)
    assert [entry.turn_at for entry in entries] == [0.0, 0.0]
    assert [entry.lease for entry in announced] == [entry.lease for entry in entries]
    engine.release(head)
    for request in waiting:
        assert engine.admit(request, 3.0).cached_tokens == BLOCKS * B
        engine.release(request)
    engine.await_nothing_used()


def test_one_whose_load_has_not_begun_gives_its_slots_back(
    engine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copier was full when its load was to begin, and nobody asked for it any more: it kept its slots for good, and
    the only one that the engine asked for lacked them."""
    cached, _, _ = documents(engine, 3000)
    submit = TwinCopier.submit

    def full(copier: TwinCopier, batch: CopyBatch) -> bool:
        return batch.direction is not Direction.LOAD and submit(copier, batch)

    request = engine.enqueue("cached", cached)
    entry = engine.blocks._requests[request]
    with monkeypatch.context() as patch:
        patch.setattr(TwinCopier, "submit", full)
        wait_for("slots", lambda: engine.try_admit(request) or engine.blocks.end_step() or len(entry.slots))
    assert entry.load is not None
    assert not entry.load.begun
    head = engine.enqueue("first", [3999, *range(1, 100 * B)])
    engine.admit(head, 3.0)
    engine.release(head)
    assert engine.admit(request, 3.0).cached_tokens == BLOCKS * B
    engine.release(request)
    engine.await_nothing_used()


def made(lease: int, phase: Phase, asked_at: float, turn_at: float, *, lacks_room: bool) -> Entry:
    return Entry(
        lease=lease,
        chain=HashChain(bytes(32), B),
        cap_blocks=0,
        found=np.empty(0, dtype=np.uint8),
        phase=phase,
        asked_at=asked_at,
        turn_at=turn_at,
        lacks_room=lacks_room,
    )


@pytest.mark.parametrize(
    "asked_at, lacks_room, expected",
    [(100.0, True, [3, 4]), (100.0, False, []), (98.0, True, [])],
    ids=["it lacks room", "it lacks none", "it is not asked for either"],
)
def test_who_is_in_the_way_of_one_that_is_asked_for(
    asked_at: float, lacks_room: bool, expected: list[int]
) -> None:
    entries = [
        made(1, Phase.QUEUED, asked_at, 90.0, lacks_room=lacks_room),
        made(2, Phase.QUEUED, 99.9, 80.0, lacks_room=False),  # asked for as well
        made(3, Phase.LOADING, 99.0, 95.0, lacks_room=False),  # it has slots
        made(4, Phase.QUEUED, 99.0, 80.0, lacks_room=True),
        made(5, Phase.QUEUED, 99.0, 95.0, lacks_room=False),  # its turn is later
        made(6, Phase.ADMITTED, 99.0, 80.0, lacks_room=False),  # runs
        made(7, Phase.QUEUED, 0.0, 0.0, lacks_room=False),  # has never asked
    ]
    requests = {RequestId(str(each.lease)): each for each in entries}
    unasked = Unasked(requests, lambda: 100.0)
    assert [each.lease for each in unasked.in_the_way() if each.lease != 1] == expected
    assert unasked.in_the_way() == []  # looked at not long ago
