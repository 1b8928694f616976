"""What waits for a tool stays ahead of what nobody said anything of, until the turn has ended."""

from __future__ import annotations

from pathlib import Path

from engine_adapter.base import Ending
from tests.support.daemon import small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS


def test_a_conversation_that_waits_for_a_tool_is_retained_until_its_turn_ends(tmp_path: Path) -> None:
    """No engine said how its answers ended: the message was there, and nobody sent it."""

    def ends(engine: Driver, name: str, ending: Ending) -> None:
        request = engine.enqueue(name, [5, *range(1, 6 * B + 2)])
        engine.fill(request, engine.admit(request).cached_tokens)
        engine.blocks.ended(request, ending)
        engine.release(request)
        engine.settle()

    with started(small_config(tmp_path)) as service, attached(service.socket, "engine") as engine:
        ends(engine, "first", Ending.TOOL_USE)
        wait_for("the hint", lambda: service.stats().counters["retained"] == 6)
        ends(engine, "next", Ending.END_TURN)
        engine.run("another", [6, *range(1, 2 * B + 2)])
        assert service.stats().counters["retained"] == 6
        assert service.faults() == []
