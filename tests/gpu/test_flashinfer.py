"""The optional backend FlashInfer: passes planned one by one, decode in graphs, and an engine over both.

Run where FlashInfer, nvcc and ninja are; the first test that needs a kernel waits until it is compiled.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("flashinfer", reason="flashinfer is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import Tensor  # noqa: E402

from engine_adapter.engine import runners  # noqa: E402
from engine_adapter.engine.attention.flashinfer_decode import FlashInferDecode  # noqa: E402
from engine_adapter.engine.attention.flashinfer_paged import FlashInferAttention  # noqa: E402
from engine_adapter.engine.engine import Engine  # noqa: E402
from engine_adapter.engine.loader import LoadedModel, load_model  # noqa: E402
from engine_adapter.engine.passes import DecodeTensors  # noqa: E402
from engine_adapter.engine.runner import Runner  # noqa: E402
from engine_adapter.engine.settings import EngineSettings  # noqa: E402
from engine_adapter.engine.source import find_shape  # noqa: E402
from engine_adapter.engine.streams import CudaQueue  # noqa: E402
from tests.engine_adapter.engine.harness import random_tokens  # noqa: E402
from tests.gpu.paged import LAYER, Paged, attention, error, make_paged  # noqa: E402
from tests.gpu.test_attention import BF16, check_step, poisoned, random_query  # noqa: E402
from tests.gpu.test_engine import (  # noqa: E402
    CLOSE,
    DEVICE,
    FORTY,
    IN_CHUNKS,
    SETTINGS,
    DeviceCache,
    assert_equal_but_for_ties,
    on_device,
)

# A test's first plan compiles its kernels: one to two minutes each on a quiet machine, and no test has more than two.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(480)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels of most tests here, so that no limit but the first test's has their compilation in it."""
    pool = torch.zeros((1, 1, 2, 8, 32, 128), dtype=BF16, device=DEVICE)
    FlashInferAttention(pool, 32).compile()


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_passes_of_any_shape(block_tokens: int) -> None:
    """A mixed batch with padding rows, decodes alone, and chunks alone."""
    for contexts, rows, num_rows in (
        ([300, 1, 1025, 64, 2000], [(0, 200), (200, 201), (205, 206), (206, 270), (280, 283)], 300),
        ([300, 1, 1025, 64, 2000], [(i, i + 1) for i in range(5)], 5),
        ([8192, 500], [(0, 2048), (2048, 2148)], 2148),
    ):
        paged = make_paged(contexts, kv_heads=8, head_dim=128, block_tokens=block_tokens, dtype=BF16, seed=10)
        check_step(paged, rows, num_rows, heads=32, seed=11, backend=FlashInferAttention(paged.pool, 32))


def captured(
    decode: FlashInferDecode, queue: CudaQueue, tensors: DecodeTensors, query: Tensor, out: Tensor
) -> Callable[[], None]:
    """A graph of the list of pages and of one layer's attention, captured over rows without a context."""
    tensors.context_lens.zero_()

    def body() -> None:
        attend = decode.attention(tensors)
        out.copy_(attend(LAYER, query))

    decode.plan(np.zeros(len(out), np.int32))
    return queue.capture(body)


def decode_tensors(tables: Tensor) -> DecodeTensors:
    count = len(tables)
    ends = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    return DecodeTensors(
        block_tables=tables.clone(),
        rows=torch.stack((ends[:-1], ends[1:]), dim=1).contiguous(),
        context_lens=torch.zeros(count, dtype=torch.int32, device=DEVICE),
        seq_of_row=ends[:-1].clone(),
        positions=torch.zeros(count, dtype=torch.int32, device=DEVICE),
    )


def assert_decoded(paged: Paged, query: Tensor, order: list[int], lengths: list[int], out: Tensor) -> None:
    for i, length in enumerate(lengths):
        if length:
            key, value = paged.context(order[i])
            right = attention(query[i : i + 1], key[:length], value[:length])
            assert error(out[i : i + 1], right) < 1e-2, (i, length)


@pytest.mark.parametrize("kv_heads, group, head_dim", [(8, 4, 128), (3, 3, 64)], ids=["tensor cores", "none"])
@pytest.mark.parametrize("count", [8, 64])
def test_decode_in_a_graph_follows_the_contexts(kv_heads: int, group: int, head_dim: int, count: int) -> None:
    """One graph, replayed for other contexts and fewer sequences, each plan made while the last replay may run."""
    longest = 3000
    paged = make_paged(
        [longest] * count, kv_heads=kv_heads, head_dim=head_dim, block_tokens=32, dtype=BF16, seed=6
    )
    query = random_query(count, kv_heads * group, head_dim, BF16, 6)
    queue = CudaQueue(torch.device(DEVICE))
    backend = FlashInferAttention(paged.pool, kv_heads * group, max_sequences=count)
    decode = backend.in_graphs(queue, paged.tables.shape[1])
    order = torch.randperm(count).tolist()
    rng = np.random.default_rng(count)
    batches = [
        [longest] * count,
        [1, 2999, 32, 33, 2000, 64, 1500, 7] * (count // 8),
        [2048, 0, 0, 5, 0, 0, 0, 0] * (count // 8),
        rng.integers(1, longest, count).tolist(),
    ]
    with queue.current():
        tensors = decode_tensors(paged.tables[order])
        out = poisoned(query)
        replay = captured(decode, queue, tensors, query, out)
        places = list(decode._wrappers[count]._plan_info)
        contexts = [torch.tensor(lengths, dtype=torch.int32, device=DEVICE) for lengths in batches]
        results = []
        for lengths, on_device_too in zip(batches, contexts, strict=True):
            tensors.context_lens.copy_(on_device_too)
            decode.plan(np.array(lengths, np.int32))
            assert list(decode._wrappers[count]._plan_info) == places, "the graph has the first plan's places"
            replay()
            results.append(out.clone())
        queue.record().synchronize()
    for lengths, result in zip(batches, results, strict=True):
        assert_decoded(paged, query, order, lengths, result)


@pytest.fixture(scope="module")
def wide() -> LoadedModel:
    """Two layers with heads as those of large models, whose kernels are compiled already."""
    source = find_shape("llama-tiny")
    return load_model(replace(source, config=replace(source.config, head_dim=128)), SETTINGS)


def by_flashinfer(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
    return runners.make_runner(loaded, pool, replace(settings, attention="flashinfer"))


@pytest.mark.parametrize("size", [1, 3, 16, 20])
def test_logits_of_decode_are_those_of_our_own_kernels(wide: LoadedModel, size: int) -> None:
    """Of batches with and without padding rows, behind a prefill by the same backend."""
    results = []
    for device in (on_device(wide, runners.make_runner), on_device(wide, by_flashinfer)):
        for index in range(size):
            device.sequences.add(random_tokens(20 + 9 * index, seed=index))
        device.run([(index, 19 + 9 * index) for index in range(size)])
        results.append(device.run([(index, 20 + 9 * index) for index in range(size)]))
    assert results[1].isfinite().all()
    assert error(results[1], results[0]) < CLOSE


def test_answers_are_those_of_our_own_kernels(wide: LoadedModel) -> None:
    """With a step in flight, requests that come and go, preemption and cached prefixes."""
    prompts = [random_tokens(n, seed=n) for n in (300, 64, 5, 33, 100, 129, 1)]
    expected = Engine(wide, DeviceCache(wide, 512), IN_CHUNKS).generate(prompts, FORTY)
    settings = replace(IN_CHUNKS, attention="flashinfer")
    for num_pages in (512, 24):
        engine = Engine(wide, DeviceCache(wide, num_pages), settings)
        engine.prepare()
        for answers in (engine.generate(prompts, FORTY), engine.generate(prompts, FORTY)):
            for prompt, one, other in zip(prompts, expected, answers, strict=True):
                assert_equal_but_for_ties(wide, prompt, one.token_ids, other.token_ids)


def test_a_shape_without_kernels_is_computed_by_our_own(caplog: pytest.LogCaptureFixture) -> None:
    source = find_shape("llama-tiny")
    narrow = load_model(replace(source, config=replace(source.config, head_dim=32)), SETTINGS)
    device = on_device(narrow, by_flashinfer)
    assert "not flashinfer but triton: it has no kernels for a head_dim of 32" in caplog.text
    assert device.run([(device.sequences.add(random_tokens(40, seed=1)), 40)]).isfinite().all()
