"""The GPU's runner with the twins of its parts: the same batches, staging and graphs' buffers, on the CPU."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_adapter.base import BlockManager
from engine_adapter.engine.cuda_runner import CudaRunner
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.graphs import graph_sizes, padded_size
from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.models.fused import FusedLlama, PassAttention, TorchElementwise
from engine_adapter.engine.passes import DecodeTensors, TorchPasses
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.request import Chunk
from engine_adapter.engine.runners import max_pages
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_shape
from engine_adapter.engine.step_buffers import StepBuffers
from engine_adapter.engine.streams import HostQueue
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import Sequences, random_tokens
from tests.engine_adapter.engine.test_engine import tokens_of

BLOCK = 16
PROMPTS = [random_tokens(n, seed=n) for n in (130, 32, 5, 64, 33, 1, 100, 47, 2, 90)]
TEN = SamplingParams(max_new_tokens=10)


@pytest.fixture(scope="module", params=["llama-tiny", "qwen3-tiny"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(find_shape(request.param), EngineSettings(threads=1))


def twin(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> CudaRunner:
    return CudaRunner(
        FusedLlama(loaded.model, TorchElementwise()),
        TorchPasses(loaded.model, pool),
        HostQueue(),
        settings,
        max_pages=max_pages(loaded, pool),
    )


def pages(loaded: LoadedModel, num_pages: int = 128) -> PrefixCacheBlocks:
    return PrefixCacheBlocks(
        num_pages=num_pages, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK
    )


def reference(
    loaded: LoadedModel, prompts: Sequence[list[int]], params: SamplingParams
) -> list[tuple[int, ...]]:
    blocks: BlockManager = PlainBlockManager(
        num_pages=256, page_bytes=loaded.config.page_bytes(BLOCK, 4), block_tokens=BLOCK
    )
    return tokens_of(Engine(loaded, blocks, EngineSettings()).generate(list(prompts), params))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("max_running", [3, 64])
def test_answers_are_those_of_the_flat_runner(loaded: LoadedModel, overlap: int, max_running: int) -> None:
    blocks = pages(loaded)
    settings = EngineSettings(overlap=overlap, max_running=max_running, chunk_tokens=50)
    engine = Engine(loaded, blocks, settings, make_runner=twin)
    engine.prepare()
    expected = reference(loaded, PROMPTS, TEN)
    assert tokens_of(engine.generate(PROMPTS, TEN)) == expected
    assert tokens_of(engine.generate(PROMPTS, TEN)) == expected
    blocks.check_integrity()


class Planned(TorchPasses):
    """Holds each pass of decode to the plan before it."""

    def __init__(self, loaded: LoadedModel, pool: Tensor) -> None:
        super().__init__(loaded.model, pool)
        self.contexts: list[list[int]] = []

    def plan_decode(self, context_lens: np.ndarray) -> None:
        self.contexts.append(context_lens.tolist())

    def decode(self, tensors: DecodeTensors) -> PassAttention:
        assert tensors.context_lens.tolist() == self.contexts[-1]
        return super().decode(tensors)


def test_each_decode_is_planned_with_the_contexts_on_the_device(loaded: LoadedModel) -> None:
    """For attention that cuts its work on the host: a graph that is replayed reads what was planned last."""
    made: list[Planned] = []

    def planned(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> CudaRunner:
        made.append(Planned(loaded, pool))
        fused = FusedLlama(loaded.model, TorchElementwise())
        return CudaRunner(fused, made[0], HostQueue(), settings, max_pages=max_pages(loaded, pool))

    engine = Engine(loaded, pages(loaded), EngineSettings(overlap=1, max_running=8), make_runner=planned)
    engine.generate(PROMPTS[:3], TEN)
    assert [0] * 4 in made[0].contexts, "a capture runs over padding rows"
    assert [*sorted([139, 41, 14]), 0] in [sorted(row[:3]) + row[3:] for row in made[0].contexts]


def test_answers_survive_preemption(loaded: LoadedModel) -> None:
    prompts = [random_tokens(40, seed=n) for n in range(6)]
    long = SamplingParams(max_new_tokens=50)
    blocks = pages(loaded, num_pages=14)
    engine = Engine(loaded, blocks, EngineSettings(overlap=1), make_runner=twin)
    assert tokens_of(engine.generate(prompts, long)) == reference(loaded, prompts, long)
    assert engine.stats().preemptions_total > 0


def test_draws_are_those_of_the_flat_runner(loaded: LoadedModel) -> None:
    drawn = SamplingParams(max_new_tokens=10, temperature=0.7, top_p=0.9, seed=3)
    engine = Engine(loaded, pages(loaded), EngineSettings(overlap=1), make_runner=twin)
    assert tokens_of(engine.generate(PROMPTS, drawn)) == reference(loaded, PROMPTS, drawn)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_logits_of_padded_decode_batches_are_those_of_the_flat_runner(loaded: LoadedModel, size: int) -> None:
    both = [Sequences(loaded.model, seed=1) for _ in range(2)]
    for sequences in both:
        for index in range(size):
            sequences.add(random_tokens(20 + index, seed=index))
        sequences.run(sequences.flat(), [(index, 19 + index) for index in range(size)])
    work = [(index, 20 + index) for index in range(size)]
    expected = both[0].run(both[0].flat(), work)
    runner = twin(loaded, both[1].pool, EngineSettings(max_running=8))
    untouched = both[1].pool.clone()
    chunks = [
        Chunk(request=both[1].requests[i], start=both[1].requests[i].num_computed, end=end) for i, end in work
    ]
    step = runner.launch(chunks, both[1].tables)
    step.wait()
    torch.testing.assert_close(step.logits(), expected, atol=1e-4, rtol=0)
    assert step.tokens() == expected.argmax(dim=-1).tolist()
    # Padding rows wrote nothing: only the new token's place of each sequence's last page differs.
    changed = {tuple(place) for place in torch.nonzero(_differs(both[1].pool, untouched))[:, [0, 4]].tolist()}
    last = {
        (int(both[1].tables[i][19 // BLOCK if i < 1 else (19 + i) // BLOCK]), (19 + i) % BLOCK)
        for i, _ in work
    }
    assert changed == last


def _differs(now: Tensor, before: Tensor) -> Tensor:
    return now.view(torch.int32) != before.view(torch.int32)


def test_only_block_tables_that_changed_are_sent() -> None:
    buffers = StepBuffers(HostQueue(), torch.device("cpu"), max_running=4, max_pages=6, depth=1)
    there = buffers.decode.block_tables

    def send(*tables: list[int], versions: list[object]) -> list[list[int]]:
        there.fill_(-1)
        buffers.send_tables(buffers.next_staging(), [np.array(t, np.int32) for t in tables], versions)
        return there[: len(tables)].tolist()

    nothing = [-1] * 6
    assert send([1, 2], [3], versions=["a2", "b1"]) == [[1, 2, -1, -1, -1, -1], [3, 0, -1, -1, -1, -1]]
    assert send([1, 2], [3], versions=["a2", "b1"]) == [nothing, nothing]
    assert send([1, 2], [3, 9], versions=["a2", "b2"]) == [nothing, [3, 9, -1, -1, -1, -1]]
    assert send([7], [3, 9], [8], versions=["c1", "b2", "d1"]) == [
        [7, *nothing[1:]],
        nothing,
        [8, *nothing[1:]],
    ]


def test_sizes_that_have_a_graph() -> None:
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert graph_sizes(1) == (1,)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(100)[-3:] == (80, 96, 100)
    for most in range(1, 300):
        sizes = graph_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        for count in range(1, most + 1):
            size = padded_size(sizes, count)
            assert count <= size <= max(count + 31, 2 * count)


def test_a_captured_step_leaves_what_the_step_before_chose(loaded: LoadedModel) -> None:
    """A graph is captured at its first use, and its rehearsal wrote over the tokens that the step is to read."""
    sequences = Sequences(loaded.model)
    sequences.add(random_tokens(20, seed=0))
    runner = twin(loaded, sequences.pool, EngineSettings(max_running=8))
    runner._buffers.chosen.copy_(torch.arange(8))
    runner._graph(4)
    assert np.array_equal(runner._buffers.chosen.numpy(), np.arange(8))


def test_preparing_writes_nothing(loaded: LoadedModel) -> None:
    sequences = Sequences(loaded.model)
    before = sequences.pool.clone()
    runner = twin(loaded, sequences.pool, EngineSettings(max_running=8, chunk_tokens=40))
    runner.prepare()
    assert not _differs(sequences.pool, before).any()
    assert sorted(runner._graphs) == [1, 2, 4, 8]
