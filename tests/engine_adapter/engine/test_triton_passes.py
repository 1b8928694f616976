"""The GPU's runner over its real kernels, interpreted on the CPU: what it hands them, and what they give back."""

import pytest
import torch
from torch import Tensor

from tests.engine_adapter.engine.interpreted import needs_interpreter  # isort: skip  (chooses before kernels load)

from engine_adapter.engine.engine import Engine
from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.runner import Runner, TiledRunner
from engine_adapter.engine.runners import max_pages
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_shape
from engine_adapter.engine.streams import HostQueue
from tests.engine_adapter.engine.harness import Sequences, random_tokens

pytestmark = [needs_interpreter, pytest.mark.slow]

BLOCK = 16
SETTINGS = EngineSettings(overlap=1, max_running=5, chunk_tokens=40, threads=1, max_tokens=256)
PROMPTS = [random_tokens(n, seed=n) for n in (45, 17, 1)]
FOUR = SamplingParams(max_new_tokens=4)


@pytest.fixture(scope="module", params=["llama-tiny", "qwen3-tiny"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(find_shape(request.param), SETTINGS)


def interpreted(loaded: LoadedModel, pool: Tensor, settings: EngineSettings) -> Runner:
    from engine_adapter.engine.cuda_runner import CudaRunner
    from engine_adapter.engine.models.fused import FusedLlama
    from engine_adapter.engine.triton_passes import TritonElementwise, TritonPasses

    passes = TritonPasses(loaded.model, pool, max_rows=45, max_sequences=5)
    fused = FusedLlama(loaded.model, TritonElementwise())
    return CudaRunner(fused, passes, HostQueue(), settings, max_pages=max_pages(loaded, pool))


def blocks(loaded: LoadedModel) -> PlainBlockManager:
    page_bytes = loaded.config.page_bytes(BLOCK, 4)
    return PlainBlockManager(num_pages=32, page_bytes=page_bytes, block_tokens=BLOCK)


def test_answers_are_those_of_plain_torch(loaded: LoadedModel) -> None:
    expected = Engine(loaded, blocks(loaded), EngineSettings(max_tokens=256)).generate(PROMPTS, FOUR)
    answers = Engine(loaded, blocks(loaded), SETTINGS, make_runner=interpreted).generate(PROMPTS, FOUR)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_deterministic_attention_gives_the_bits_of_the_cold_run(loaded: LoadedModel) -> None:
    """The interpreter's products are numpy's, so this holds the cut into tiles, not a GPU's arithmetic."""
    from engine_adapter.engine.attention.triton_fixed import FixedTritonAttention

    tokens = random_tokens(70, seed=3)
    sequences = Sequences(loaded.model, block_tokens=BLOCK)
    runner = TiledRunner(loaded.model, FixedTritonAttention(sequences.pool, loaded.config.num_heads))
    sequences.add(tokens)
    expected = sequences.run(runner, [(0, 70)])
    again = sequences.add(tokens, cached=48, prefix_of=0)
    torch.testing.assert_close(sequences.run(runner, [(again, 70)]), expected, atol=1e-5, rtol=0)
    flat = Sequences(loaded.model, block_tokens=BLOCK)
    flat.add(tokens)
    torch.testing.assert_close(flat.run(flat.flat(), [(0, 70)]), expected, atol=1e-3, rtol=0)
