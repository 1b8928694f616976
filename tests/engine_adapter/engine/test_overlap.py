"""The overlapped loop: a step stays in flight while the next one is scheduled and launched."""

import pytest

from engine_adapter.base import RequestId
from engine_adapter.engine.engine import Engine, Output
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.request import FinishReason
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from kvstore.errors import ConfigError
from tests.engine_adapter.engine.delayed import DelayedRunner
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import random_tokens
from tests.engine_adapter.engine.test_engine import BLOCK, TEN, Suspicious, cache, plain, tokens_of

OVERLAP = EngineSettings(overlap=1)
PROMPTS = [random_tokens(n, seed=n) for n in (130, 32, 5, 64, 33, 1, 100, 47)]
DRAWN = SamplingParams(max_new_tokens=12, temperature=0.9, top_k=20, seed=5, ignore_eos=True)


def overlapped(
    loaded: LoadedModel, blocks: PrefixCacheBlocks, settings: EngineSettings = OVERLAP
) -> tuple[Engine, DelayedRunner]:
    engine = Engine(loaded, blocks, settings, make_runner=DelayedRunner)
    assert isinstance(engine._runner, DelayedRunner)
    return engine, engine._runner


@pytest.mark.parametrize("chunk_tokens", [20, 512])
@pytest.mark.parametrize("params", [TEN, DRAWN], ids=["greedy", "drawn"])
def test_answers_are_those_without_overlap(
    tiny_model: LoadedModel, params: SamplingParams, chunk_tokens: int
) -> None:
    expected = tokens_of(Engine(tiny_model, plain(tiny_model), EngineSettings()).generate(PROMPTS, params))
    blocks = cache(tiny_model)
    engine, runner = overlapped(tiny_model, blocks, EngineSettings(overlap=1, chunk_tokens=chunk_tokens))
    assert tokens_of(engine.generate(PROMPTS, params)) == expected
    assert tokens_of(engine.generate(PROMPTS, params)) == expected  # behind cached prefixes
    assert runner.most_in_flight == 2 or params is DRAWN
    assert not engine.has_work
    assert not runner.in_flight
    assert not blocks.tables
    blocks.check_integrity()


def test_requests_that_draw_and_requests_that_do_not_go_together(tiny_model: LoadedModel) -> None:
    def answers(engine: Engine) -> dict[str, list[int]]:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, DRAWN if index % 3 == 0 else TEN, RequestId(str(index)))
        tokens: dict[str, list[int]] = {}
        for output in engine.run():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    expected = answers(Engine(tiny_model, plain(tiny_model), EngineSettings()))
    assert answers(overlapped(tiny_model, cache(tiny_model))[0]) == expected


def test_answers_survive_preemption(tiny_model: LoadedModel) -> None:
    prompts = [random_tokens(40, seed=n) for n in range(6)]
    long = SamplingParams(max_new_tokens=50, ignore_eos=True)
    expected = tokens_of(Engine(tiny_model, plain(tiny_model), EngineSettings()).generate(prompts, long))
    blocks = cache(tiny_model, num_pages=14)
    engine, _ = overlapped(tiny_model, blocks)
    squeezed = engine.generate(prompts, long)
    assert engine.stats().preemptions_total > 0
    assert tokens_of(squeezed) == expected
    assert not blocks.tables
    blocks.check_integrity()


def test_a_stop_takes_effect_one_step_late_and_what_was_too_much_is_dropped(tiny_model: LoadedModel) -> None:
    (greedy,) = Engine(tiny_model, plain(tiny_model), EngineSettings()).generate([PROMPTS[0]], TEN)
    eos = greedy.token_ids[4]
    first = greedy.token_ids.index(eos)
    config = tiny_model.config
    stopping = LoadedModel(
        config=type(config)(
            **{name: getattr(config, name) for name in config.__slots__} | {"eos_token_ids": (eos,)}
        ),
        model=tiny_model.model,
        tokenizer=tiny_model.tokenizer,
        max_tokens=tiny_model.max_tokens,
    )
    blocks = cache(tiny_model)
    engine, runner = overlapped(stopping, blocks)
    request = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=100))
    outputs: list[Output] = []
    while not (outputs and outputs[-1].finish):
        outputs += engine.step()
    assert outputs[-1].finish is FinishReason.STOP
    assert tuple(t for o in outputs for t in o.token_ids) == greedy.token_ids[:first]
    assert outputs[-1].stats is not None
    assert outputs[-1].stats.generated_tokens == first
    assert (
        len(runner.in_flight) == 1
    )  # computes a token that nobody wants, in pages that are still the request's
    assert set(blocks.tables) == {request}
    assert engine.has_work
    assert engine.step() == []
    assert not blocks.tables
    assert not engine.has_work
    blocks.check_integrity()


def test_no_step_is_launched_for_tokens_beyond_the_length_asked_for(tiny_model: LoadedModel) -> None:
    engine, runner = overlapped(tiny_model, cache(tiny_model))
    launches = 0
    launch = runner.launch

    def counted(*arguments: object) -> object:
        nonlocal launches
        launches += 1
        return launch(*arguments)  # type: ignore[arg-type]

    runner.launch = counted  # type: ignore[assignment, method-assign]
    engine.generate([[1, 2, 3]], TEN)
    assert launches == 10


def test_nothing_is_sealed_while_its_kernels_are_under_way(tiny_model: LoadedModel) -> None:
    """A process that dies between a launch and its event leaves nothing that anybody would take for KV."""
    page_bytes = tiny_model.config.page_bytes(BLOCK, 4)
    blocks = Suspicious(num_pages=64, page_bytes=page_bytes, block_tokens=BLOCK)
    engine, runner = overlapped(tiny_model, blocks, EngineSettings(overlap=1, chunk_tokens=36, max_running=4))
    engine.add_request(random_tokens(100, seed=1), TEN)
    engine.step()
    assert len(runner.in_flight) == 1
    assert not blocks.sealed
    engine.step()
    assert len(runner.in_flight) == 1
    assert len(blocks.sealed) == 40 // BLOCK  # the first step's, not the second's
    list(engine.run())
    assert blocks.seen > 100 // BLOCK


def test_pages_of_an_aborted_request_stay_until_its_step_has_ended(tiny_model: LoadedModel) -> None:
    """Elsewhere a block of an aborted request was given to another one while a kernel still wrote it."""
    blocks = cache(tiny_model)
    engine, runner = overlapped(tiny_model, blocks)
    request = engine.add_request(random_tokens(50, seed=1), TEN)
    for _ in range(3):
        engine.step()
    held = set(blocks.tables[request].pages)
    output = engine.abort(request)
    assert output is not None
    assert output.stats is not None
    assert output.stats.generated_tokens == 2  # the third is being chosen
    assert len(runner.in_flight) == 1
    assert set(blocks.tables[request].pages) == held
    assert not held & set(blocks.free)
    assert engine.has_work
    assert engine.step() == []
    assert not blocks.tables
    assert not engine.has_work
    blocks.check_integrity()


def test_a_name_can_be_used_again_at_once(tiny_model: LoadedModel) -> None:
    blocks = cache(tiny_model)
    engine, _ = overlapped(tiny_model, blocks)
    name, other = RequestId("name"), RequestId("other")
    engine.add_request(random_tokens(50, seed=1), TEN, name)
    engine.add_request(random_tokens(20, seed=3), TEN, other)
    engine.step()
    engine.step()
    engine.abort(name)
    engine.add_request(random_tokens(30, seed=2), TEN, name)
    tokens: dict[RequestId, list[int]] = {name: [], other: []}
    for output in engine.run():
        tokens[output.request_id] += output.token_ids
    reference = Engine(tiny_model, plain(tiny_model), EngineSettings())
    (expected,) = reference.generate([random_tokens(30, seed=2)], TEN)
    assert tuple(tokens[name]) == expected.token_ids
    assert len(tokens[other]) == 9  # the first came out of a step before
    blocks.check_integrity()


def test_overlap_is_one_step_at_most() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        EngineSettings(overlap=2)
