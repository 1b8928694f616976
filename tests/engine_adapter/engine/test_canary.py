"""The engine's canary: right blocks pass in every mode, a wrong one is found, reported, and ends its request."""

from __future__ import annotations

import numpy as np
import pytest

from engine_adapter.engine.engine import Engine
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.request import FinishReason
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from kvstore.errors import Corruption
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import random_tokens
from tests.engine_adapter.engine.test_engine import BLOCK, cache, tokens_of

SOME = SamplingParams(max_new_tokens=6, ignore_eos=True)
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])


def watched(model: LoadedModel, blocks: PrefixCacheBlocks, **settings: object) -> Engine:
    return Engine(model, blocks, EngineSettings(canary_every=1, **settings))  # type: ignore[arg-type]


def damage(blocks: PrefixCacheBlocks, prompt: list[int], block: int, element: int, value: float) -> None:
    """One element of a cached block is another."""
    page = blocks.sealed[tuple(prompt[: (block + 1) * BLOCK])]
    blocks.memory[page].view(np.float32)[element] = value


@MODES
def test_right_blocks_pass_and_answers_are_the_same(tiny_model: LoadedModel, deterministic: bool) -> None:
    prompts = [random_tokens(n, seed=n) for n in (130, 64, 47, 100)]
    blocks = cache(tiny_model)
    engine = watched(tiny_model, blocks, deterministic=deterministic, chunk_tokens=20)
    cold = engine.generate(prompts, SOME)
    assert engine._canary is not None
    assert engine._canary.checked_blocks == 0
    warm = engine.generate(prompts, SOME)
    assert engine._canary.checked_blocks == 4
    assert tokens_of(cold) == tokens_of(warm)
    assert blocks.wrong == []
    blocks.check_integrity()


@MODES
@pytest.mark.parametrize("value", [5.0, -1e30, float("nan"), float("inf")])
def test_a_wrong_block_ends_its_request_and_is_reported(
    tiny_model: LoadedModel, deterministic: bool, value: float
) -> None:
    prompt = random_tokens(70, seed=1)
    blocks = cache(tiny_model)
    engine = watched(tiny_model, blocks, deterministic=deterministic)
    right = engine.generate([prompt], SOME)
    damage(blocks, prompt, 3, 17, value)
    request = engine.add_request(prompt, SOME)
    outputs = list(engine.run())
    assert outputs[-1].request_id == request
    assert outputs[-1].finish is FinishReason.FAILED
    assert isinstance(outputs[-1].error, Corruption)
    assert [block for block, _ in blocks.wrong] == [3]
    again = engine.generate([prompt], SOME)
    assert tokens_of(again) == tokens_of(right), "it was computed anew"
    blocks.check_integrity()


def test_a_block_of_other_tokens_is_found(tiny_model: LoadedModel) -> None:
    """A whole, checksummed block under the wrong key: no checksum can see it."""
    one, other = random_tokens(40, seed=1), random_tokens(40, seed=2)
    blocks = cache(tiny_model)
    engine = watched(tiny_model, blocks)
    engine.generate([one, other], SOME)
    first, second = (blocks.sealed[tuple(prompt[: 2 * BLOCK])] for prompt in (one, other))
    blocks.memory[first] = blocks.memory[second]
    with pytest.raises(Corruption, match="block 1 of the cached prefix is wrong"):
        engine.generate([one], SOME)


def test_the_smallest_change_is_found_in_deterministic_mode(tiny_model: LoadedModel) -> None:
    prompt = random_tokens(70, seed=1)
    blocks = cache(tiny_model)
    engine = watched(tiny_model, blocks, deterministic=True)
    engine.generate([prompt], SOME)
    page = blocks.sealed[tuple(prompt[: 4 * BLOCK])]
    blocks.memory[page][8] ^= 1  # the last bit of a mantissa
    with pytest.raises(Corruption, match="1 of "):
        engine.generate([prompt], SOME)


def test_only_so_many_are_checked(tiny_model: LoadedModel) -> None:
    prompts = [random_tokens(40, seed=n) for n in range(9)]
    blocks = cache(tiny_model)
    engine = Engine(tiny_model, blocks, EngineSettings(canary_every=4))
    for _ in range(2):
        for prompt in prompts:
            engine.generate([prompt], SOME)
    assert engine._canary is not None
    assert engine._canary.checked_blocks == 3  # the first, the fifth and the ninth


def test_without_a_page_to_spare_nothing_is_checked(tiny_model: LoadedModel) -> None:
    prompt = random_tokens(40, seed=1)
    blocks = cache(tiny_model, num_pages=3)
    engine = watched(tiny_model, blocks)
    for _ in range(2):
        assert engine.generate([prompt], SOME)[0].finish is FinishReason.LENGTH
    assert engine._canary is not None
    assert engine._canary.checked_blocks == 0
    blocks.check_integrity()


@pytest.mark.parametrize("answered", [False, True])
def test_a_block_that_others_find_wrong_is_computed_again_or_ends_the_request(
    tiny_model: LoadedModel, answered: bool
) -> None:
    """What was computed with it, and what is still in flight, is not used; a half answer is not gone on with."""
    prompt = random_tokens(300, seed=1)
    blocks = cache(tiny_model)
    engine = Engine(tiny_model, blocks, EngineSettings(chunk_tokens=64, canary_every=0))
    right = engine.generate([prompt], SOME)
    blocks.take_back(prompt[: 3 * BLOCK])
    damage(blocks, prompt, 1, 17, 5.0)
    request = engine.add_request(prompt, SOME)
    outputs = engine.step()
    while answered and not outputs:
        outputs = engine.step()
    assert bool(outputs) is answered
    blocks.take_back(prompt[: 2 * BLOCK])
    blocks.found_wrong = [request]
    outputs = engine.step()
    blocks.found_wrong = []
    outputs += list(engine.run())
    if answered:
        assert isinstance(outputs[-1].error, Corruption)
        assert not any(output.token_ids for output in outputs)
    else:
        assert [tuple(token for output in outputs for token in output.token_ids)] == tokens_of(right)
    blocks.check_integrity()
