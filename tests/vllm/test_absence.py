"""vLLM serves whatever becomes of the daemon: without it there is no cache, and it is picked up again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.daemon import started
from tests.vllm.processes import Vllm, await_slots_back, connector, service_config

BLOCK = 32
RETURN_S = 10.0  # so long the one prompt is held back that is asked for after the daemon has gone for good


def test_a_daemon_that_is_down_at_the_start_dies_in_the_middle_and_comes_back(
    place: Path, prompt: Callable[[int, int], list[int]]
) -> None:
    config = service_config(place)
    tokens = prompt(1, 5 * BLOCK + 3)
    options = connector(
        config, breaker_s=0.3, lookup_patience_s=RETURN_S, return_patience_s=RETURN_S, timeout_s=5.0
    )
    with Vllm(place / "vllm.log", connector=options) as vllm:
        assert not vllm.call("attached", 0.5)
        alone = vllm.generate(tokens)[0]
        vllm.reset()
        with started(config) as service:
            assert vllm.call("attached")
            assert vllm.generate(tokens)[0].cached == 0  # what was computed without a store is not in it
            vllm.reset()
            hit = vllm.generate(tokens)[0]
            assert (hit.cached, hit.tokens) == (5 * BLOCK, alone.tokens)
            assert service.faults() == []
        vllm.reset()
        without = vllm.generate(tokens)[0]
        assert (without.cached, without.tokens) == (0, alone.tokens)
        with started(config) as service:  # nothing is left of the session: vLLM attaches anew
            assert vllm.call("attached")
            vllm.reset()
            vllm.generate(tokens)
            vllm.reset()
            assert vllm.generate(tokens)[0].cached == 5 * BLOCK
            assert service.faults() == []
            await_slots_back(service, vllm)
        assert vllm.call("stats")["requests"] == 0
