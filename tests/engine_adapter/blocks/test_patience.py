"""Who computes a prefix that many wait for: one request, however slow it is and whoever was to do it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engine_adapter.base import RequestId
from tests.support.daemon import DEADLINE_S, Service, small_config, started
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS
PATIENCE_S = 0.5
REQUESTS = 64


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


def admitted(engine: Driver, requests: list[RequestId], seconds: float) -> list[RequestId]:
    """Those of the requests that are admitted until so long after the first."""
    found: list[RequestId] = []
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        new = [r for r in requests if r not in found and engine.try_admit(r) is not None]
        if new and not found:
            until = time.monotonic() + seconds
        found += new
        engine.blocks.end_step()
        engine.blocks.wait(0.01)
    return found


def finish(engine: Driver, leader: RequestId, requests: list[RequestId]) -> None:
    """The leader computes; all others find what it has computed."""
    engine.fill(leader, 0)
    engine.blocks.end_step()
    cached = [engine.admit(r).cached_tokens for r in requests if r != leader]
    assert cached == [6 * B] * (REQUESTS - 1)
    for request in requests:
        engine.release(request)
    engine.await_nothing_used()


def test_a_chunk_slower_than_all_patience_is_computed_once(service: Service) -> None:
    """On a slow machine a chunk took longer than requests waited: all 64 then computed the same system prompt."""
    tokens = [1, *range(6 * B)]
    with attached(service.socket, "slow", patience_s=PATIENCE_S) as engine:
        requests = [engine.enqueue(f"r{i}", tokens) for i in range(REQUESTS)]
        leaders = admitted(engine, requests, 8 * PATIENCE_S)
        assert len(leaders) == 1, f"{len(leaders)} of {REQUESTS} compute one prompt"
        finish(engine, leaders[0], requests)
    assert service.faults() == []


def test_of_many_that_wait_for_a_process_that_does_nothing_one_computes(service: Service) -> None:
    """When another worker stood still, each of 64 requests that waited for it computed its prefix privately."""
    tokens = [2, *range(6 * B)]
    with (
        attached(service.socket, "still") as still,
        attached(service.socket, "waits", patience_s=PATIENCE_S) as engine,
    ):
        holder = still.enqueue("holder", tokens)
        still.admit(holder)  # and never computes
        requests = [engine.enqueue(f"r{i}", tokens) for i in range(REQUESTS)]
        leaders = admitted(engine, requests, 8 * PATIENCE_S)
        assert len(leaders) == 1, f"{len(leaders)} of {REQUESTS} compute one prompt"
        finish(engine, leaders[0], requests)
        still.release(holder)
        still.await_nothing_used()
    assert service.faults() == []


def test_who_would_compute_and_goes_leaves_it_to_the_next(service: Service) -> None:
    """The one request that computed a prefix was aborted: those that waited for it waited for ever."""
    tokens = [3, *range(6 * B)]
    with attached(service.socket, "next", patience_s=PATIENCE_S) as engine:
        requests = [engine.enqueue(f"r{i}", tokens) for i in range(3)]
        for left in (3, 2, 1):
            waiting = requests[-left:]
            leaders = admitted(engine, waiting, 2 * PATIENCE_S)
            assert len(leaders) == 1
            engine.release(leaders[0])
            requests.remove(leaders[0])
        engine.await_nothing_used()
