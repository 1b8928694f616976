"""The engine on a GPU: its logits against float32 on the CPU, graphs, cached prefixes, and deterministic mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import numpy as np  # noqa: E402
from torch import Tensor  # noqa: E402

from engine_adapter.base import Pages  # noqa: E402
from engine_adapter.engine import runners  # noqa: E402
from engine_adapter.engine.attention.sdpa import SdpaAttention  # noqa: E402
from engine_adapter.engine.cuda_runner import CudaRunner  # noqa: E402
from engine_adapter.engine.engine import Completion, Engine  # noqa: E402
from engine_adapter.engine.loader import LoadedModel, load_model  # noqa: E402
from engine_adapter.engine.models.fused import FusedLlama  # noqa: E402
from engine_adapter.engine.models.llama import Llama  # noqa: E402
from engine_adapter.engine.plain import PlainBlockManager  # noqa: E402
from engine_adapter.engine.request import Chunk  # noqa: E402
from engine_adapter.engine.runner import Runner  # noqa: E402
from engine_adapter.engine.sampler import SamplingParams  # noqa: E402
from engine_adapter.engine.settings import EngineSettings  # noqa: E402
from engine_adapter.engine.source import find_shape  # noqa: E402
from engine_adapter.engine.streams import CudaQueue  # noqa: E402
from engine_adapter.engine.triton_passes import TritonElementwise, TritonPasses  # noqa: E402
from engine_adapter.engine.weights import convert_weights  # noqa: E402
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks  # noqa: E402
from tests.engine_adapter.engine.harness import Sequences, random_tokens  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
BLOCK = 32
SETTINGS = EngineSettings(device=DEVICE, overlap=1, chunk_tokens=2048, max_running=32, max_tokens=4096)
IN_CHUNKS = replace(SETTINGS, chunk_tokens=256)
FORTY = SamplingParams(max_new_tokens=40)
CLOSE = 0.03
"""Of logits, relative: bfloat16 keeps 8 bits, and a few layers add up."""


@pytest.fixture(scope="module", params=["llama-tiny", "qwen3-tiny"])
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(find_shape(request.param), SETTINGS)


@pytest.fixture(scope="module")
def one_billion() -> LoadedModel:
    return load_model(find_shape("llama-3.2-1b"), SETTINGS)


class DeviceCache(PrefixCacheBlocks):
    """The prefix cache of the CPU tests, over pages on the GPU, which hold NaN until they are written."""

    def __init__(self, loaded: LoadedModel, num_pages: int) -> None:
        super().__init__(num_pages=num_pages, page_bytes=1, block_tokens=BLOCK)
        self.on_device = torch.full(
            (num_pages, loaded.config.page_bytes(BLOCK, 2)), 0xFF, dtype=torch.uint8, device=DEVICE
        )

    def kv_pages(self) -> Pages:
        count, page_bytes = self.on_device.shape
        address = self.on_device.data_ptr()
        return Pages(address=address, count=count, page_bytes=page_bytes, device=DEVICE, owner=self.on_device)


@dataclass(frozen=True)
class OnDevice:
    """Sequences over a pool on the GPU, run through a runner of the engine."""

    sequences: Sequences
    runner: Runner

    def run(self, work: Sequence[tuple[int, int]]) -> Tensor:
        """Compute up to token `end` of each (sequence, end); logits of those whose tokens are all computed."""
        requests = self.sequences.requests
        chunks = [Chunk(request=requests[i], start=requests[i].num_computed, end=end) for i, end in work]
        step = self.runner.launch(chunks, [self.sequences.tables[i] for i, _ in work])
        step.wait()
        for i, end in work:
            requests[i].num_computed = end
        return step.logits().float().clone()


def on_device(loaded: LoadedModel, make: Callable[[LoadedModel, Tensor, EngineSettings], Runner]) -> OnDevice:
    sequences = Sequences(loaded.model, block_tokens=BLOCK, num_pages=512)
    sequences.pool = sequences.pool.to(DEVICE)
    return OnDevice(sequences, make(loaded, sequences.pool, SETTINGS))


class EagerQueue(CudaQueue):
    """Runs a graph's body each time instead of capturing it."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body


def eager(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
    passes = TritonPasses(
        loaded.model,
        pool,
        max_rows=settings.chunk_tokens + settings.max_running,
        max_sequences=settings.max_running,
    )
    queue = EagerQueue(pool.device)
    pages = runners.max_pages(loaded, pool)
    return CudaRunner(FusedLlama(loaded.model, TritonElementwise()), passes, queue, settings, max_pages=pages)


def deterministic(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
    return runners.make_runner(loaded, pool, replace(settings, deterministic=True, overlap=0))


def reference(model: Llama, dtype: torch.dtype, tokens: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Logits at the last token of `tokens[:end]` for each of `ends`, in one pass on the CPU."""
    on_cpu = Llama(model.config, convert_weights(model.weights, dtype, "cpu"), 4096)
    sequences = Sequences(on_cpu, block_tokens=BLOCK, num_pages=-(-len(tokens) // BLOCK) + 1)
    sequences.add(tokens)
    (logits,) = sequences.forward(SdpaAttention(sequences.pool), [(0, len(tokens))])
    return logits[[end - 1 for end in ends]].float()


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, of all logits together."""
    difference = actual.cpu() - expected.cpu()
    return float(difference.norm() / expected.cpu().norm())


def check_against_the_cpu(loaded: LoadedModel, length: int, close: float) -> None:
    """A whole prefill, then decoded tokens."""
    vocab = loaded.config.vocab_size
    tokens = random_tokens(length, seed=1, vocab=vocab)
    ends = [length - 3, length - 2, length - 1, length]
    device = on_device(loaded, runners.make_runner)
    index = device.sequences.add(tokens[: ends[0]])
    logits = [device.run([(index, ends[0])])]
    for end in ends[1:]:
        device.sequences.requests[index].tokens.append(tokens[end - 1])
        if -(-end // BLOCK) > len(device.sequences.tables[index]):
            raise AssertionError("the test's table is too short")
        logits.append(device.run([(index, end)]))
    expected = reference(loaded.model, torch.float32, tokens, ends)
    for actual, wanted in zip(logits, expected, strict=True):
        assert actual.isfinite().all()
        assert error(actual[0], wanted) < close


def test_logits_of_prefill_and_decode_are_those_of_float32_on_the_cpu(tiny: LoadedModel) -> None:
    check_against_the_cpu(tiny, 250, CLOSE)


def test_logits_of_a_whole_model_shape(one_billion: LoadedModel) -> None:
    check_against_the_cpu(one_billion, 60, 2 * CLOSE)


def test_logits_are_no_further_from_the_truth_than_those_of_torch_in_bfloat16(tiny: LoadedModel) -> None:
    tokens = random_tokens(120, seed=2)
    device = on_device(tiny, runners.make_runner)
    logits = device.run([(device.sequences.add(tokens), 120)])
    truth = reference(tiny.model, torch.float32, tokens, [120])
    plain = reference(tiny.model, torch.bfloat16, tokens, [120])
    assert error(logits, truth) < 1.5 * error(plain, truth) + 1e-3


@pytest.mark.parametrize("size", [1, 3, 16, 20])
def test_a_graph_gives_what_its_kernels_give_one_by_one(tiny: LoadedModel, size: int) -> None:
    both = [on_device(tiny, runners.make_runner), on_device(tiny, eager)]
    results = []
    for device in both:
        for index in range(size):
            device.sequences.add(random_tokens(20 + 9 * index, seed=index))
        device.run([(index, 19 + 9 * index) for index in range(size)])
        results.append(device.run([(index, 20 + 9 * index) for index in range(size)]))
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_a_batch_of_decodes_gives_what_each_gives_alone(tiny: LoadedModel) -> None:
    device = on_device(tiny, runners.make_runner)
    prompts = [random_tokens(30 + 11 * index, seed=index) for index in range(13)]
    batched = [device.sequences.add(prompt) for prompt in prompts]
    device.run([(index, len(prompts[index]) - 1) for index in batched])
    together = device.run([(index, len(prompts[index])) for index in batched])
    for index, prompt in enumerate(prompts):
        alone = device.sequences.add(prompt)
        assert error(device.run([(alone, len(prompt))])[0], together[index]) < CLOSE


def test_chunks_and_mixed_batches_give_what_a_whole_prefill_gives(tiny: LoadedModel) -> None:
    prompts = [random_tokens(n, seed=n) for n in (400, 33, 7, 129)]
    whole = on_device(tiny, runners.make_runner)
    expected = whole.run([(whole.sequences.add(prompt), len(prompt)) for prompt in prompts])
    chunked = on_device(tiny, runners.make_runner)
    for prompt in prompts:
        chunked.sequences.add(prompt)
    for step in range(1, 500, 37):
        work = [
            (i, min(len(p), step + 13 * i))
            for i, p in enumerate(prompts)
            if chunked.sequences.requests[i].num_computed < min(len(p), step + 13 * i)
        ]
        if not work:
            continue
        logits = chunked.run(work)
        done = [i for i, end in work if end == len(prompts[i])]
        for row, index in enumerate(done):
            assert error(logits[row], expected[index]) < CLOSE
    assert all(r.num_computed == len(p) for r, p in zip(chunked.sequences.requests, prompts, strict=True))


def tokens_of(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def assert_equal_but_for_ties(
    loaded: LoadedModel, prompt: list[int], cold: tuple[int, ...], warm: tuple[int, ...]
) -> None:
    """Where the answers part, the two tokens are as good as equal by the float32 reference."""
    parting = next((i for i, (a, b) in enumerate(zip(cold, warm, strict=True)) if a != b), None)
    if parting is None:
        return
    tokens = [*prompt, *cold[:parting]]
    (truth,) = reference(loaded.model, torch.float32, tokens, [len(tokens)])
    gap = abs(float(truth[cold[parting]] - truth[warm[parting]]))
    assert gap < 2 * CLOSE * float(truth.std()), f"they part at {parting} although the logits are {gap} apart"


def test_answers_behind_cached_prefixes_are_those_of_the_cold_run(tiny: LoadedModel) -> None:
    prompts = [random_tokens(n, seed=n) for n in (700, 64, 5, 33, 100, 129, 1)]
    blocks = DeviceCache(tiny, 512)
    engine = Engine(tiny, blocks, IN_CHUNKS)
    cold = engine.generate(prompts, FORTY)
    warm = engine.generate(prompts, FORTY)
    for prompt, first, second in zip(prompts, cold, warm, strict=True):
        assert second.stats.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        assert_equal_but_for_ties(tiny, prompt, first.token_ids, second.token_ids)
    assert not engine.has_work
    blocks.check_integrity()


def test_overlap_changes_no_answer(tiny: LoadedModel) -> None:
    """Also when requests come and go while a step is in flight, and under preemption."""
    prompts = [random_tokens(n, seed=n) for n in (300, 64, 5, 33, 100, 129, 1)]
    alone = replace(IN_CHUNKS, overlap=0)
    expected = Engine(tiny, DeviceCache(tiny, 512), alone).generate(prompts, FORTY)
    for num_pages in (512, 24):
        answers = Engine(tiny, DeviceCache(tiny, num_pages), IN_CHUNKS).generate(prompts, FORTY)
        for prompt, one, other in zip(prompts, expected, answers, strict=True):
            assert_equal_but_for_ties(tiny, prompt, one.token_ids, other.token_ids)


def test_draws_are_repeated_by_their_seed(tiny: LoadedModel) -> None:
    prompts = [random_tokens(n, seed=n) for n in (40, 90)]
    drawn = SamplingParams(max_new_tokens=20, temperature=0.8, top_k=30, seed=11)
    page_bytes = tiny.config.page_bytes(BLOCK, 2)
    blocks = PlainBlockManager(num_pages=64, page_bytes=page_bytes, block_tokens=BLOCK, device=DEVICE)
    engine = Engine(tiny, blocks, SETTINGS)
    first = tokens_of(engine.generate(prompts, drawn))
    assert tokens_of(engine.generate(prompts, drawn)) == first
    assert first != tokens_of(engine.generate(prompts, FORTY))


def test_nothing_is_committed_before_its_kernels_have_run(tiny: LoadedModel) -> None:
    """A block was sealed by the CPU before the kernel that writes it had run; pages begin as NaN."""
    seen = 0

    class Suspicious(DeviceCache):
        def commit(self, request: object, token_ids: Sequence[int], num_tokens: int) -> None:
            nonlocal seen
            pages = self.pages(request)[: num_tokens // BLOCK]  # type: ignore[arg-type]
            rows = self.on_device[torch.from_numpy(np.asarray(pages)).long().to(DEVICE)]
            assert rows.view(torch.bfloat16).isfinite().all()
            seen += len(pages)
            super().commit(request, token_ids, num_tokens)  # type: ignore[arg-type]

    engine = Engine(tiny, Suspicious(tiny, 256), IN_CHUNKS)
    engine.generate([random_tokens(n, seed=n) for n in (1500, 48, 7)], FORTY)
    assert seen > 1500 // BLOCK


LENGTH = 209


def test_deterministic_mode_gives_the_bits_of_the_cold_run(tiny: LoadedModel) -> None:
    """Behind any cached prefix, in any chunks, and decoded instead of prefilled."""
    tokens = random_tokens(LENGTH, seed=7)
    device = on_device(tiny, deterministic)
    add = device.sequences.add
    expected = device.run([(add(tokens), LENGTH)])
    for cached in range(BLOCK, LENGTH, BLOCK):
        assert torch.equal(device.run([(add(tokens, cached=cached, prefix_of=0), LENGTH)]), expected), cached
    for step in (9, 40, 100):
        again = add(tokens)
        for end in range(step, LENGTH + step, step):
            logits = device.run([(again, min(end, LENGTH))])
        assert torch.equal(logits, expected), step
    decoded = add(tokens)
    device.run([(decoded, 170)])
    for end in range(171, LENGTH + 1):
        logits = device.run([(decoded, end)])
    assert torch.equal(logits, expected)
    company = [add(random_tokens(30 + n, seed=n)) for n in range(5)]
    work = [(add(tokens), LENGTH), *((index, 30 + n) for n, index in enumerate(company))]
    assert torch.equal(device.run(work)[:1], expected)


def test_deterministic_answers_are_equal_cold_and_cached(tiny: LoadedModel) -> None:
    prompts = [random_tokens(n, seed=n) for n in (300, 64, 5, 33)]
    settings = EngineSettings(device=DEVICE, deterministic=True, max_tokens=4096)
    engine = Engine(tiny, DeviceCache(tiny, 512), settings)
    cold = tokens_of(engine.generate(prompts, FORTY))
    assert tokens_of(engine.generate(prompts, FORTY)) == cold
