"""What an engine reports as wrong, through the adapter: the block is a miss for everybody, in every tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.driver import attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


def test_a_reported_block_is_computed_again_and_nothing_leaks(service: Service) -> None:
    with attached(service.socket, "engine") as engine:
        tokens = [7, *range(1, 10 * B + 2)]
        engine.run("cold", tokens)
        request = engine.enqueue("warm", tokens)
        assert engine.admit(request).cached_tokens == 10 * B
        engine.blocks.report_wrong(request, 6, "a recomputed block differs")
        wait_for("the report", lambda: service.stats().counters["wrong_blocks"] == 1)
        assert service.faults() == []
        engine.release(request)  # it held the block that was taken back
        engine.await_nothing_used()
        again = engine.run("again", tokens)
        assert again.cached_tokens == 6 * B
        assert engine.run("last", tokens).cached_tokens == 10 * B
        engine.await_nothing_used()
        assert service.faults() == []
        assert any("taken back" in warning for warning in service.stats().warnings)
    assert "engine: a recomputed block differs" in service.log.read_text()


def test_nothing_that_was_computed_with_a_wrong_block_is_published(service: Service) -> None:
    """It was: what a request had sealed stayed, and it went on sealing what it computed from the wrong block."""
    with attached(service.socket, "computes") as engine:
        prompt = [8, *range(1, 10 * B + 2)]
        engine.run("cold", prompt[: 6 * B + 1])
        request, other = engine.enqueue("warm", prompt), engine.enqueue("other", [9, *prompt])
        assert engine.admit(request).cached_tokens == 6 * B
        assert engine.admit(other).cached_tokens == 0
        engine.fill(request, 6 * B, 8 * B)
        engine.blocks.end_step()
        engine.settle()
        before = service.stats().counters.get("wrong_blocks", 0)
        assert engine.blocks.take_wrong() == []
        engine.blocks.report_wrong(request, 3, "a recomputed block differs")
        wait_for("the report", lambda: service.stats().counters["wrong_blocks"] > before)
        engine.fill(request, 8 * B)  # its kernels had been launched
        engine.blocks.end_step()
        engine.settle()
        assert engine.blocks.take_wrong() == [request]
        engine.release(request)
        assert engine.blocks.take_wrong() == []
        assert engine.run("again", prompt).cached_tokens == 3 * B
        assert engine.run("last", prompt).cached_tokens == 10 * B
        engine.release(other)
        engine.await_nothing_used()
        assert service.faults() == []


def test_a_block_found_wrong_between_its_grant_and_its_use(service: Service) -> None:
    """The answer to the acquire was on its way when the block was marked: the request is not admitted with it."""
    with attached(service.socket, "slow") as engine:
        prompt = [10, *range(1, 4 * B + 2)]
        engine.run("cold", prompt)
        request = engine.enqueue("warm", prompt)
        assert engine.try_admit(request) is None
        wait_for("the grant", engine.session.quiet)
        hashes = engine.chain(request).hashes[1:2]
        assert engine.session.report_wrong(engine.namespace, hashes, "differs") == 1
        assert engine.blocks.take_wrong() == []
        assert engine.admit(request).cached_tokens == B
        assert engine.blocks.take_wrong() == []
        engine.fill(request, B)
        engine.settle()
        engine.release(request)
        engine.await_nothing_used()
        assert service.faults() == []
