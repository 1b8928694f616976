"""The last leg of a prefetch: what is in DRAM comes into HBM before its request is scheduled, and hinders nobody."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine_adapter.base import RequestId
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.engine_adapter.blocks.test_manager import HeldCopier, prompt
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS
PAGES = 128
BLOCKS = 6


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service
        assert service.faults() == []


def in_dram(service: Service, *prompts: list[int]) -> None:
    """These are cached, and no HBM has them."""
    with attached(service.socket, "before") as engine:
        for number, tokens in enumerate(prompts):
            engine.run(f"cold {number}", tokens)
        engine.settle()
    service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")


def turn(engine: Driver) -> bool:
    """A step of an engine."""
    engine.blocks.end_step()
    engine.blocks.wait(0.01)
    return True


def prepared(engine: Driver, request: RequestId, blocks: int) -> None:
    """Its prefix is asked for until it is in HBM."""

    def there() -> bool:
        engine.blocks.prepare(request)
        turn(engine)
        return engine.copier.stats().loaded_blocks == blocks

    wait_for("the load ahead", there)


def test_a_prepared_request_finds_its_prefix_in_hbm(service: Service) -> None:
    tokens = prompt(BLOCKS * B + 1)
    in_dram(service, tokens)
    with attached(service.socket, "after", pages=PAGES) as engine:
        request = engine.enqueue("r", tokens)
        prepared(engine, request, BLOCKS)
        assert engine.blocks._ahead.pages == BLOCKS
        assert engine.admit(request).cached_tokens == BLOCKS * B
        assert engine.copier.stats().loaded_blocks == BLOCKS  # once
        assert engine.blocks._ahead.pages == 0
        engine.release(request)
        engine.await_nothing_used()


def test_a_request_that_runs_meanwhile_waits_for_that_one_copy(service: Service) -> None:
    tokens = prompt(BLOCKS * B + 1)
    in_dram(service, tokens)
    copier = HeldCopier()
    with attached(service.socket, "after", pages=PAGES, copier=copier) as engine:
        copier.go.clear()
        request = engine.enqueue("r", tokens)

        def begun() -> bool:
            engine.blocks.prepare(request)
            return turn(engine) and copier.began.is_set()

        wait_for("the copy", begun)
        assert engine.try_admit(request) is None
        copier.go.set()
        assert engine.admit(request).cached_tokens == BLOCKS * B
        assert copier.stats().loaded_blocks == BLOCKS
        engine.release(request)
        engine.await_nothing_used()


def test_an_aborted_request_gives_back_what_was_loaded_for_it(service: Service) -> None:
    tokens = prompt(BLOCKS * B + 1)
    in_dram(service, tokens)
    with attached(service.socket, "after", pages=PAGES) as engine:
        request = engine.enqueue("r", tokens)
        prepared(engine, request, BLOCKS)
        engine.release(request)
        engine.await_nothing_used()
        assert engine.run("again", tokens).cached_by_tier == {"hbm": BLOCKS * B}


def test_loads_ahead_take_a_part_of_the_pages(service: Service) -> None:
    prompts = [prompt(BLOCKS * B + 1) for _ in range(4)]
    in_dram(service, *prompts)
    with attached(service.socket, "after", pages=PAGES) as engine:
        requests = [engine.enqueue(f"r{number}", tokens) for number, tokens in enumerate(prompts)]
        for request in requests:
            engine.blocks.prepare(request)
        assert engine.blocks._ahead.pages == 2 * BLOCKS <= PAGES // 8
        for request in requests:
            assert engine.admit(request).cached_tokens == BLOCKS * B
            engine.release(request)
        engine.await_nothing_used()


def test_pages_held_ahead_go_to_who_runs(service: Service) -> None:
    """What is loaded for a request that waits must never cost a running one a page."""
    ahead = prompt(BLOCKS * B + 1)
    in_dram(service, ahead)
    with attached(service.socket, "after", pages=64) as engine:
        request = engine.enqueue("waits", ahead)
        prepared(engine, request, BLOCKS)
        running = engine.enqueue("runs", prompt(20 * B))
        engine.admit(running)
        engine.fill(running, 0)
        for token in range(42 * B):
            wait_for("a page", lambda token=token: turn(engine) and engine.decode(running, token))
        assert engine.blocks._ahead.pages == 0
        engine.release(running)
        assert engine.admit(request).cached_tokens == BLOCKS * B
        engine.release(request)
        engine.await_nothing_used()


def test_nothing_is_loaded_where_nothing_is_in_dram(service: Service) -> None:
    with attached(service.socket, "after", pages=PAGES) as engine:
        tokens = prompt(BLOCKS * B + 1)
        engine.run("cold", tokens)
        for name, of in (("in hbm", tokens), ("unknown", prompt(BLOCKS * B))):
            request = engine.enqueue(name, of)
            engine.blocks.prepare(request)
            assert engine.blocks._ahead.pages == 0
            engine.release(request)


def test_what_waits_is_told_to_the_store(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(service.socket, "after", pages=PAGES) as engine:
        tokens = prompt(BLOCKS * B + 1)
        engine.run("cold", tokens)
        said: list[int] = []

        def prefetch(_namespace: object, _lease: int, hashes: np.ndarray, *, deadline_ms: int) -> None:
            assert len(hashes) == BLOCKS
            said.append(deadline_ms)

        monkeypatch.setattr(engine.session, "prefetch", prefetch)
        for number, ahead in enumerate((0, 1, 10)):
            engine.blocks.enqueue(RequestId(f"r{number}"), tokens, ahead=ahead)
        engine.blocks.enqueue(RequestId("unknown"), prompt(BLOCKS * B), ahead=11)
        assert len(said) == 2  # the first asks at once, and of the last nothing is known
        assert 0 < said[0] < said[1]
        for request in ("r0", "r1", "r2", "unknown"):
            engine.blocks.release(RequestId(request))
        engine.await_nothing_used()
