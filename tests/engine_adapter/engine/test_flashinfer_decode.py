"""Decode by FlashInfer in graphs: what it is handed, held to its rules by a twin, under Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine_adapter.engine.interpreted import needs_interpreter  # isort: skip  (chooses before kernels load)

from engine_adapter.engine.attention.flashinfer_limits import flashinfer_lacks, workspace_bytes
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.runner import Runner
from engine_adapter.engine.runners import max_pages
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_shape
from engine_adapter.engine.streams import HostQueue
from tests.engine_adapter.engine.flashinfer_twin import twin_library
from tests.engine_adapter.engine.harness import random_tokens

BLOCK = 16
SETTINGS = EngineSettings(overlap=1, max_running=5, chunk_tokens=40, threads=1, max_tokens=256)


@pytest.mark.parametrize(
    "head_dim, dtype, expected",
    [
        (64, torch.bfloat16, ""),
        (128, torch.float16, ""),
        (96, torch.bfloat16, "it has no kernels for a head_dim of 96"),
        (128, torch.float32, "it has no kernels for keys of float32"),
    ],
)
def test_shapes_without_kernels_are_known_before(head_dim: int, dtype: torch.dtype, expected: str) -> None:
    assert flashinfer_lacks(head_dim, dtype) == expected


@pytest.mark.parametrize("num_heads, kv_heads", [(32, 8), (9, 3), (64, 8), (32, 1), (71, 1), (128, 1)])
def test_the_workspace_holds_what_flashinfer_takes(num_heads: int, kv_heads: int) -> None:
    """As its planner counts for a graph: a tile of query heads for each row or split, never fewer than fill the GPU."""
    group, processors = num_heads // kv_heads, 132
    tile = 128 if group > 64 else 64 if group > 16 else 16
    given = {
        most: workspace_bytes(num_heads, kv_heads, 128, max_sequences=most, multiprocessors=processors)
        for most in (1, 64, 256, 1024)
    }
    for most, nbytes in given.items():
        for rows in range(1, most + 1):
            tiles = max(-(-rows * group // tile) + rows - 1, 2 * processors // kv_heads)
            assert nbytes >= num_heads * tiles * tile * (128 + 1) * 4
    assert given[1] >= 256 << 20


@needs_interpreter
@pytest.mark.parametrize("width", [3, 1500])
def test_page_lists_are_the_tables_without_their_ends(width: int) -> None:
    from engine_adapter.engine.attention.page_lists import write_page_lists

    rng = np.random.default_rng(width)
    contexts = np.array([1, 0, BLOCK, BLOCK + 1, 0, width * BLOCK, 0], np.int32)
    tables = rng.integers(0, 1000, (len(contexts), width)).astype(np.int32)
    starts = torch.full((len(contexts) + 1,), -1, dtype=torch.int32)
    pages = torch.full((len(contexts) * width,), -1, dtype=torch.int32)
    last = torch.full((len(contexts),), -1, dtype=torch.int32)
    write_page_lists(torch.from_numpy(tables), torch.from_numpy(contexts), starts, pages, last, BLOCK)
    counts = -(-contexts // BLOCK)
    assert starts.tolist() == [0, *np.cumsum(counts).tolist()]
    expected = [number for table, count in zip(tables, counts, strict=True) for number in table[:count]]
    assert pages[: int(starts[-1])].tolist() == expected
    assert (pages[int(starts[-1]) :] == -1).all(), "nothing is written behind the last page"
    assert last.tolist() == [1, 0, BLOCK, 1, 0, BLOCK, 0]


@needs_interpreter
@pytest.mark.slow
def test_answers_are_those_of_plain_torch() -> None:
    """Through the runner: batches that grow, shrink and are padded, each with a plan of its own contexts."""
    loaded = load_model(find_shape("llama-tiny"), SETTINGS)
    prompts = [random_tokens(n, seed=n) for n in (45, 17, 1)]
    four = SamplingParams(max_new_tokens=4)
    expected = Engine(loaded, blocks(loaded), EngineSettings(max_tokens=256)).generate(prompts, four)
    answers = Engine(loaded, blocks(loaded), SETTINGS, make_runner=over_the_twin).generate(prompts, four)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def blocks(loaded: LoadedModel) -> PlainBlockManager:
    page_bytes = loaded.config.page_bytes(BLOCK, 4)
    return PlainBlockManager(num_pages=32, page_bytes=page_bytes, block_tokens=BLOCK)


def over_the_twin(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
    from engine_adapter.engine.attention.flashinfer_decode import FlashInferDecode
    from engine_adapter.engine.cuda_runner import CudaRunner
    from engine_adapter.engine.models.fused import FusedLlama
    from engine_adapter.engine.triton_passes import FlashInferPasses, TritonElementwise, TritonPasses

    class OverTheTwin(TritonPasses):
        """`FlashInferPasses` for decode; mixed passes by our own kernels."""

        plan_decode, decode = FlashInferPasses.plan_decode, FlashInferPasses.decode

    queue, pages = HostQueue(), max_pages(loaded, pool)
    passes = OverTheTwin(loaded.model, pool, max_rows=45, max_sequences=5)
    passes._in_graphs = FlashInferDecode(  # type: ignore[attr-defined]
        twin_library(),
        pool,
        loaded.config.num_heads,
        torch.zeros(0, dtype=torch.uint8),
        queue,
        max_sequences=5,
        max_pages=pages,
    )
    fused = FusedLlama(loaded.model, TritonElementwise())
    return CudaRunner(fused, passes, queue, settings, max_pages=pages)
