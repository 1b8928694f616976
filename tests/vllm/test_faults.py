"""Known faults of vLLM's connector interface, each against the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.daemon import started
from tests.vllm.processes import Vllm, await_slots_back, connector, service_config

BLOCK, STEPS = 32, 60
Prompt = Callable[[int, int], list[int]]


def test_a_load_that_fails_or_finds_nothing_is_computed(place: Path, prompt: Prompt) -> None:
    """Under `recompute`: blocks that vanish between lookup and load, a load that fails in part, an abort during one."""
    config = service_config(place)
    tokens = prompt(1, 8 * BLOCK + 5)
    with started(config) as service, Vllm(place / "vllm.log", connector=connector(config)) as vllm:
        assert vllm.call("attached")
        vllm.generate(tokens)
        local = vllm.generate(tokens)[0]
        vllm.reset()
        vllm.call("fail_loads", 3)
        failed = vllm.generate(tokens)[0]
        assert failed.tokens == local.tokens
        assert failed.finish == "length"
        vllm.reset()
        again = vllm.generate(tokens)[
            0
        ]  # what was computed instead is right, and was not stored over what is there
        assert (again.cached, again.said) == (8 * BLOCK, local.said)
        vllm.reset()
        left = vllm.call("abort_during_load", tokens)
        assert left == {"loading": True, "held": True, "freed": True, "requests": 0, "copying": 0}
        vllm.reset()
        assert vllm.generate(tokens)[0].said == local.said
        vllm.reset()
        before = vllm.call("stats")["given_up_blocks"]
        vllm.call("vanish", config.socket)
        gone = vllm.generate(tokens)[0]
        assert (gone.tokens, gone.finish) == (local.tokens, "length")
        assert vllm.call("stats")["given_up_blocks"] == before + 8
        vllm.reset()
        assert vllm.generate(tokens)[0].cached == 8 * BLOCK  # it was stored again
        salted = vllm.generate(tokens, salts=["one"])[0]
        assert (salted.cached, salted.tokens) == (0, local.tokens)
        vllm.reset()
        assert [
            one.cached
            for one in (vllm.generate(tokens, salts=["one"])[0], vllm.generate(tokens, salts=["two"])[0])
        ] == [8 * BLOCK, 0]
        vllm.reset(connector=True)  # as after new weights
        assert vllm.generate(tokens)[0].cached == 0
        assert service.faults() == []
        await_slots_back(service, vllm)


def test_a_load_that_fails_ends_its_request_where_vllm_is_told_so(place: Path, prompt: Prompt) -> None:
    """Under `fail`, which is vLLM's default: that request alone ends, with an error."""
    config = service_config(place)
    tokens, other = prompt(1, 4 * BLOCK + 5), prompt(2, 2 * BLOCK + 1)
    with (
        started(config) as service,
        Vllm(place / "vllm.log", connector=connector(config), policy="fail", events=True) as vllm,
    ):
        assert vllm.call("attached")
        vllm.call("record_events")
        vllm.generate(tokens)
        assert vllm.call("recorded_events") == [
            {"blocks": 4, "first": True, "tokens": 4 * BLOCK, "medium": "CPU"}
        ]
        local = vllm.generate(tokens)[0]
        vllm.reset()
        vllm.call("fail_loads", 2)
        failed, beside = vllm.generate(tokens, other)
        assert failed.finish == "error"
        assert beside.finish == "length"
        vllm.reset()
        again = vllm.generate(tokens)[0]
        assert (again.cached, again.tokens) == (4 * BLOCK, local.tokens)
        assert service.faults() == []
        await_slots_back(service, vllm)


def test_a_step_with_nothing_to_do_costs_little_and_sends_nothing(place: Path, prompt: Prompt) -> None:
    """And where an attention backend can have a block of all layers in one piece, vLLM is asked for that."""
    config = service_config(place)
    with started(config), Vllm(place / "vllm.log", connector=connector(config)) as vllm:
        assert vllm.call("layout_of", ["LBHNC", "BLHNC"]) == "BLHNC"
        assert vllm.call("layout_of", ["LBHNC"]) == "LBHNC"
        assert vllm.call("attached")
        vllm.generate(prompt(1, BLOCK))
        found = vllm.call("time_steps", prompt(2, 3 * BLOCK + 1), STEPS)
        print(found)
        assert found["steps"] == STEPS
        assert found["sent"] == 0
        assert found["p50_us"] < 1000
