"""The engine from prompt to text over block managers with and without a cache."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_adapter.base import Admission, RequestId
from engine_adapter.engine.engine import Completion, Engine, Output
from engine_adapter.engine.errors import InvalidRequest
from engine_adapter.engine.kv_pool import view_pages
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.request import FinishReason
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.serving.requests import Answer
from kvstore.errors import ConfigError, Unavailable
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import random_tokens
from tests.support.pages import pages_of

BLOCK = 16
TEN = SamplingParams(max_new_tokens=10, ignore_eos=True)


def cache(loaded: LoadedModel, num_pages: int = 128) -> PrefixCacheBlocks:
    return PrefixCacheBlocks(
        num_pages=num_pages, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK
    )


def plain(loaded: LoadedModel, num_pages: int = 128) -> PlainBlockManager:
    return PlainBlockManager(
        num_pages=num_pages, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK
    )


def tokens_of(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_answers_do_not_depend_on_cache_chunks_or_company(
    tiny_model: LoadedModel, deterministic: bool
) -> None:
    prompts = [random_tokens(n, seed=n) for n in (130, 32, 5, 64, 33, 1, 100, 47)]
    settings = EngineSettings(deterministic=deterministic)
    reference = [Engine(tiny_model, plain(tiny_model), settings).generate([p], TEN)[0] for p in prompts]
    small = EngineSettings(deterministic=deterministic, chunk_tokens=20)
    blocks = cache(tiny_model)
    engine = Engine(tiny_model, blocks, small)
    cold = engine.generate(prompts, TEN)
    warm = engine.generate(prompts, TEN)
    assert tokens_of(cold) == tokens_of(warm) == tokens_of(reference)
    assert [answer.text for answer in warm] == [answer.text for answer in reference]
    for prompt, answer in zip(prompts, warm, strict=True):
        assert answer.stats.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        assert sum(answer.stats.cached_by_tier.values()) == answer.stats.cached_tokens
        assert answer.stats.prompt_tokens == len(prompt)
    blocks.check_integrity()


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_answers_survive_preemption(tiny_model: LoadedModel, deterministic: bool) -> None:
    prompts = [random_tokens(40, seed=n) for n in range(6)]
    long = SamplingParams(max_new_tokens=50, temperature=0.8, seed=3, ignore_eos=True)
    settings = EngineSettings(deterministic=deterministic)
    reference = Engine(tiny_model, plain(tiny_model), settings).generate(prompts, long)
    blocks = cache(tiny_model, num_pages=14)
    engine = Engine(tiny_model, blocks, settings)
    squeezed = engine.generate(prompts, long)
    assert engine.stats().preemptions_total > 0
    assert sum(answer.stats.preemptions for answer in squeezed) == engine.stats().preemptions_total
    assert tokens_of(squeezed) == tokens_of(reference)
    blocks.check_integrity()


class Away(PlainBlockManager):
    """A block manager that has no pages for prompts beyond one block, ever."""

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        if num_tokens > BLOCK:
            raise Unavailable("the daemon is away")
        return super().admit(request, num_tokens)


def test_a_request_that_is_refused_ends_with_the_error_and_hinders_nobody(tiny_model: LoadedModel) -> None:
    """A request that could never be admitted waited for ever, and its client did not learn why."""
    blocks = Away(num_pages=64, page_bytes=tiny_model.config.page_bytes(BLOCK, 4), block_tokens=BLOCK)
    engine = Engine(tiny_model, blocks, EngineSettings())
    few = SamplingParams(max_new_tokens=3, ignore_eos=True)
    engine.add_request(random_tokens(2 * BLOCK, seed=1), few, RequestId("refused"))
    engine.add_request(random_tokens(4, seed=2), few, RequestId("runs"))
    last = {output.request_id: output for output in engine.run() if output.finish}
    assert last[RequestId("refused")].finish is FinishReason.FAILED
    assert last[RequestId("runs")].finish is FinishReason.LENGTH
    answer = Answer(accepted_at=0.0, prompt_tokens=2 * BLOCK)
    with pytest.raises(Unavailable, match="the daemon is away"):
        answer.add(last[RequestId("refused")], 1.0)
    with pytest.raises(Unavailable, match="the daemon is away"):
        engine.generate([random_tokens(2 * BLOCK, seed=1)], few)
    assert not engine.has_work


def test_a_conversation_hits_the_blocks_that_its_answer_filled(tiny_model: LoadedModel) -> None:
    blocks = cache(tiny_model)
    engine = Engine(tiny_model, blocks, EngineSettings(deterministic=True))
    prompt = random_tokens(50, seed=1)
    (first,) = engine.generate([prompt], SamplingParams(max_new_tokens=60, ignore_eos=True))
    follow_up = [*prompt, *first.token_ids, *random_tokens(9, seed=2)]
    (warm,) = engine.generate([follow_up], TEN)
    assert warm.stats.cached_tokens == (50 + 59) // BLOCK * BLOCK
    fresh = Engine(tiny_model, plain(tiny_model), EngineSettings(deterministic=True))
    assert tokens_of(fresh.generate([follow_up], TEN)) == [warm.token_ids]


def test_text_streams_and_adds_up(tiny_model: LoadedModel) -> None:
    engine = Engine(tiny_model, plain(tiny_model), EngineSettings())
    request = engine.add_request(
        "some prompt", SamplingParams(max_new_tokens=40, temperature=3.0, ignore_eos=True)
    )
    outputs: list[Output] = []
    while engine.has_work:
        step = engine.step()
        assert len(step) == 1
        outputs += step
    assert all(output.request_id == request for output in outputs)
    ids = [token for output in outputs for token in output.token_ids]
    assert len(ids) == 40
    assert "".join(output.text for output in outputs) == tiny_model.tokenizer.decode(ids)
    assert [output.finish for output in outputs] == [None] * 39 + [FinishReason.LENGTH]
    assert all(output.stats is None for output in outputs[:-1])


def test_an_end_of_turn_token_ends_the_answer_and_is_not_in_it(tiny_model: LoadedModel) -> None:
    engine = Engine(tiny_model, plain(tiny_model), EngineSettings())
    hot = SamplingParams(max_new_tokens=900, temperature=50.0, seed=1)
    (answer,) = engine.generate([[1, 2, 3]], hot)
    assert answer.finish is FinishReason.STOP
    assert 256 not in answer.token_ids
    assert answer.stats.generated_tokens == len(answer.token_ids)


def test_aborted_requests_give_everything_back(tiny_model: LoadedModel) -> None:
    """Elsewhere an aborted request kept its blocks pinned for ever: queued, prefilling or decoding."""
    blocks = cache(tiny_model)
    engine = Engine(tiny_model, blocks, EngineSettings(chunk_tokens=32, max_running=2))
    ids = [engine.add_request(random_tokens(100, seed=n), TEN) for n in range(4)]
    for _ in range(6):
        engine.step()
    assert engine.stats().waiting > 0
    for request_id in ids:
        output = engine.abort(request_id)
        assert output is not None
        assert output.finish is FinishReason.ABORTED
        assert engine.abort(request_id) is None
        blocks.check_integrity()
    assert not engine.has_work
    assert not blocks.tables
    assert not blocks.queued
    assert not blocks.refs.any()
    assert engine.step() == []


def test_requests_that_can_never_run_are_refused_at_once(tiny_model: LoadedModel) -> None:
    engine = Engine(tiny_model, plain(tiny_model, num_pages=4), EngineSettings(max_waiting=1))
    for prompt, message in (
        ([], "empty"),
        (random_tokens(64, seed=0), "at most 63"),
        ([300], "token ids"),
        ("", "empty"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(prompt, TEN)
    engine.add_request([1], TEN, RequestId("x"))
    with pytest.raises(InvalidRequest, match="running already"):
        engine.add_request([1], TEN, RequestId("x"))
    with pytest.raises(InvalidRequest, match="too many"):
        engine.add_request([1], TEN)
    with pytest.raises(InvalidRequest, match="other requests"):
        engine.generate([[1]], TEN)


def test_an_answer_ends_where_the_pool_does(tiny_model: LoadedModel) -> None:
    """A request that outgrows the whole pool would be preempted by itself for ever."""
    engine = Engine(tiny_model, plain(tiny_model, num_pages=4), EngineSettings())
    assert engine.max_tokens == 64
    (answer,) = engine.generate([[1] * 60], SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert (len(answer.token_ids), answer.finish) == (4, FinishReason.LENGTH)


def test_times_run_from_acceptance(tiny_model: LoadedModel) -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    engine = Engine(tiny_model, plain(tiny_model), EngineSettings(), clock)
    engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))
    now[0] = 150.0
    stats = list(engine.run())[-1].stats
    assert stats is not None
    assert stats.ttft_s == 50.0  # accepted at 101, first token at 151
    assert stats.total_s == 51.0
    assert stats.tokens_per_s == 4.0


class Slow(PlainBlockManager):
    """Admits at the fifth time of asking; counts the waits."""

    asked = 0
    waits = 0
    steps = 0

    def admit(self, request: RequestId, num_tokens: int) -> Admission | None:
        self.asked += 1
        return super().admit(request, num_tokens) if self.asked >= 5 else None

    def wait(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= 1
        self.waits += 1

    def end_step(self) -> None:
        self.steps += 1


def test_the_engine_waits_only_when_nothing_can_run(tiny_model: LoadedModel) -> None:
    """Elsewhere a decode step waited for the cache."""
    blocks = Slow(num_pages=8, page_bytes=tiny_model.config.page_bytes(BLOCK, 4), block_tokens=BLOCK)
    engine = Engine(tiny_model, blocks, EngineSettings())
    engine.generate([[1, 2, 3]], TEN)
    assert blocks.waits == 4
    assert blocks.steps == 4 + 10


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_the_block_manager_hears_of_steps_before_their_launch_and_when_there_are_no_more(
    tiny_model: LoadedModel, temperature: float
) -> None:
    """It heard of an end between every two steps that draw at random: kernels of copies began there, and held the next
    step up."""
    page_bytes = tiny_model.config.page_bytes(BLOCK, 4)
    blocks = PrefixCacheBlocks(num_pages=8, page_bytes=page_bytes, block_tokens=BLOCK)
    engine = Engine(tiny_model, blocks, EngineSettings())
    engine.generate([[1, 2, 3]], replace(TEN, temperature=temperature))
    assert blocks.under_way == [1] * 10 + [0]
    engine.add_request([1, 2, 3], TEN, RequestId("left"))
    engine.step()
    engine.abort(RequestId("left"))
    engine.step()
    assert blocks.under_way[-2:] == [1, 0]


class Suspicious(PrefixCacheBlocks):
    """Looks at the bytes of what is committed: pages begin as NaN, so what no kernel wrote is seen."""

    seen = 0

    def commit(self, request: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        pages = self.pages(request)[: num_tokens // BLOCK]
        assert len(token_ids) >= num_tokens
        assert np.isfinite(self.memory[pages].view(np.float32)).all()
        self.seen += len(pages)
        super().commit(request, token_ids, num_tokens)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_nothing_is_committed_before_its_kernels_have_run(
    tiny_model: LoadedModel, deterministic: bool
) -> None:
    """Elsewhere a block was sealed by the CPU before the kernel that writes it had run."""
    page_bytes = tiny_model.config.page_bytes(BLOCK, 4)
    assert page_bytes == tiny_model.config.kv_token_bytes(4) * BLOCK  # no padding, which nobody writes
    blocks = Suspicious(num_pages=64, page_bytes=page_bytes, block_tokens=BLOCK)
    engine = Engine(tiny_model, blocks, EngineSettings(deterministic=deterministic, chunk_tokens=40))
    engine.generate([random_tokens(n, seed=n) for n in (100, 48, 7)], TEN)
    assert blocks.seen > 100 // BLOCK


def test_pages_that_do_not_fit_the_model_are_refused(tiny_model: LoadedModel) -> None:
    wrong = PlainBlockManager(num_pages=8, page_bytes=4096, block_tokens=64)
    with pytest.raises(ValueError, match="cannot hold 64 tokens"):
        Engine(tiny_model, wrong, EngineSettings())
    with pytest.raises(ConfigError, match="chunk_tokens"):
        EngineSettings(chunk_tokens=0)


def test_the_pool_is_a_view_in_the_documented_order(tiny_model: LoadedModel) -> None:
    config = tiny_model.config
    pages = np.zeros((3, config.page_bytes(BLOCK, 4) + 4096), np.uint8)
    pool = view_pages(pages_of(pages), config, BLOCK, tiny_model.model.dtype)
    pool[2, 1, 1, 0, 5, 3] = 1.0
    payload = pages.view(np.float32)[:, : config.kv_token_bytes(4) * BLOCK // 4]
    index = np.ravel_multi_index((1, 1, 0, 5, 3), (2, 2, 2, BLOCK, 16))
    assert payload[2, index] == 1.0
    assert payload.sum() == 1.0


def test_what_a_client_needs_before_torch_does_not_load_it() -> None:
    script = (
        "import sys, engine_adapter.base, engine_adapter.engine.source, engine_adapter.engine.settings;"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60, check=False).returncode == 0
