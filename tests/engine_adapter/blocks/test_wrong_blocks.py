"""What an engine reports as wrong, through the adapter: the block is a miss for everybody, in every tier."""

from __future__ import annotations

from pathlib import Path

from tests.support.daemon import small_config, started, wait_for
from tests.support.driver import attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS


def test_a_reported_block_is_computed_again_and_nothing_leaks(tmp_path: Path) -> None:
    with started(small_config(tmp_path)) as service, attached(service.socket, "engine") as engine:
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
