"""A pool that is too small: requests grow, are preempted while their blocks are stored and loaded, and say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.daemon import started
from tests.vllm.processes import Vllm, await_slots_back, connector, service_config

BLOCK = 32
NEAR_TIE = 1e-3
MAX_TOKENS = 128  # five that run grow over what the sixth leaves them
HOLD_S = 60.0


def test_six_growing_requests_in_forty_blocks(place: Path, prompt: Callable[[int, int], list[int]]) -> None:
    """Equal but for near ties: where the reference's two best tokens are that close the shape of a batch decides."""
    system = prompt(0, 2 * BLOCK)
    prompts = [system + prompt(seed, 3 * BLOCK + seed) for seed in range(1, 7)]
    with Vllm(place / "reference.log", num_gpu_blocks_override=128) as vllm:
        expected = vllm.generate(*prompts, max_tokens=MAX_TOKENS)
    config = service_config(place)
    with (
        started(config) as service,
        Vllm(place / "vllm.log", connector=connector(config), num_gpu_blocks_override=40) as vllm,
    ):
        assert vllm.call("attached")
        assert not any(vllm.call("preemptions").values())
        # However fast machine and copies are: a store, and later a load, lasts until something is preempted.
        vllm.call("hold_copies", "STORE", HOLD_S, 1)
        first = vllm.generate(*prompts, max_tokens=MAX_TOKENS)
        cold = vllm.call("preemptions")
        assert cold["during_stores"] > 0
        vllm.reset()
        vllm.call("delay_last", len(prompts))
        vllm.call("hold_copies", "LOAD", HOLD_S, len(prompts) - 1)
        second = vllm.generate(*prompts, max_tokens=MAX_TOKENS)
        assert vllm.call("stats")["loaded_blocks"] > 0
        assert vllm.call("preemptions")["during_loads"] > cold["during_loads"]
        ties = 0
        for answers in (first, second):
            for answer, right in zip(answers, expected, strict=True):
                assert answer.finish == "length"
                at = next(
                    (
                        i
                        for i, pair in enumerate(zip(answer.tokens, right.tokens, strict=True))
                        if pair[0] != pair[1]
                    ),
                    None,
                )
                if at is not None:
                    ties += 1
                    assert right.gaps[at] < NEAR_TIE, (
                        f"token {at} differs, and the two best were {right.gaps[at]} apart"
                    )
        print(f"{ties} of {2 * len(prompts)} answers part from the reference at a near tie")
        assert vllm.call("stats")["requests"] == 0
        assert service.faults() == []
        await_slots_back(service, vllm)
