"""The real SmolLM2 on a GPU: what it answers on the CPU, cold and behind cached blocks."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("gguf", reason="the model is a GGUF file")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_adapter.engine.engine import Engine  # noqa: E402
from engine_adapter.engine.errors import ModelError  # noqa: E402
from engine_adapter.engine.loader import LoadedModel, load_model  # noqa: E402
from engine_adapter.engine.plain import PlainBlockManager  # noqa: E402
from engine_adapter.engine.request import FinishReason  # noqa: E402
from engine_adapter.engine.sampler import SamplingParams  # noqa: E402
from engine_adapter.engine.settings import EngineSettings  # noqa: E402
from engine_adapter.engine.source import ModelSource, find_model  # noqa: E402
from tests.gpu.test_engine import (  # noqa: E402
    BLOCK,
    IN_CHUNKS,
    DeviceCache,
    assert_equal_but_for_ties,
)

pytestmark = pytest.mark.gpu

QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers of Germany, and the sea that each of them flows into.",
    "Write a haiku about the sea. " * 12,
)
ANSWER = SamplingParams(max_new_tokens=24)
GO_ON = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        return find_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def on_cpu(source: ModelSource) -> LoadedModel:
    return load_model(source, EngineSettings())


def test_its_text_is_that_of_the_cpu(source: ModelSource, on_cpu: LoadedModel) -> None:
    prompts = [on_cpu.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    pages = PlainBlockManager(num_pages=64, page_bytes=source.config.page_bytes(BLOCK, 4), block_tokens=BLOCK)
    expected = Engine(on_cpu, pages, EngineSettings()).generate(prompts, GO_ON)
    on_gpu = load_model(source, IN_CHUNKS)
    blocks = DeviceCache(on_gpu, 128)
    engine = Engine(on_gpu, blocks, IN_CHUNKS)
    for cached in (False, True):
        answers = engine.generate(prompts, GO_ON)
        for prompt, wanted, answer in zip(prompts, expected, answers, strict=True):
            assert (answer.stats.cached_tokens > 0) == cached
            assert_equal_but_for_ties(on_cpu, prompt, wanted.token_ids, answer.token_ids)
    (paris,) = engine.generate(prompts[:1], ANSWER)
    assert (paris.text, paris.finish) == ("The capital of France is Paris.", FinishReason.STOP)
    blocks.check_integrity()
