"""The real model from its package: weights as transformers converts them, its tokenizer, its answers."""

import functools
from pathlib import Path

import gguf
import pytest
import torch

from engine_adapter.engine.attention.sdpa import SdpaAttention
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.request import FinishReason
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import ModelSource, find_model
from tests.engine_adapter.engine.fakes import PrefixCacheBlocks
from tests.engine_adapter.engine.harness import Sequences

TEXTS = (
    "The tide tables for the estuary were first drawn up in 1851, when the harbour master counted 14 floods.",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Ein Schiff fährt über den Fluß — 東京タワー ist weit weg. 🚀🚀",
)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        return find_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(source: ModelSource) -> LoadedModel:
    return load_model(source, EngineSettings(threads=1))


@pytest.fixture(scope="module")
def blocks(source: ModelSource) -> PrefixCacheBlocks:
    return PrefixCacheBlocks(num_pages=40, page_bytes=source.config.page_bytes(32, 4), block_tokens=32)


@pytest.mark.slow
def test_logits_and_tokens_match_transformers_own_conversion(
    source: ModelSource, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch of one and of eight, cold, in chunks and behind cached prefixes; the q/k permutation above all."""
    transformers = pytest.importorskip("transformers")
    for name in (
        "GGUFReader",
        "get_tensor_name_map",
    ):  # it reads the file thrice, and asks 400 times for one table
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder, name = source.path.parent, source.path.name
    reference = transformers.LlamaForCausalLM(
        transformers.AutoConfig.from_pretrained(folder, gguf_file=name)
    ).eval()
    converted = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=reference)[
        "tensors"
    ]
    missing = reference.load_state_dict(
        {key: torch.as_tensor(value) for key, value in converted.items()}, strict=False
    )
    assert missing.missing_keys in ([], ["lm_head.weight"])
    reference.tie_weights()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    prompts = [loaded.tokenizer.encode(text) for text in TEXTS]
    assert prompts == [tokenizer(text)["input_ids"] for text in TEXTS]
    prompts += [prompts[0] * 8, prompts[1][:32], prompts[1][:33], prompts[2][:5], prompts[0][:1]]
    with torch.inference_mode():
        expected = [reference(torch.tensor([tokens])).logits[0] for tokens in prompts]
    del reference
    sequences = Sequences(loaded.model, block_tokens=32, num_pages=64)
    backend = SdpaAttention(sequences.pool)
    for tokens in prompts:
        sequences.add(tokens)
    for i, logits in enumerate(
        sequences.forward(backend, [(i, min(20, len(t))) for i, t in enumerate(prompts)])
    ):
        torch.testing.assert_close(logits, expected[i][: len(logits)], atol=1e-3, rtol=0)
    for i, tokens in enumerate(prompts):  # the rest alone, in one chunk
        if len(tokens) > 20:
            (logits,) = sequences.forward(backend, [(i, len(tokens))])
            torch.testing.assert_close(logits, expected[i][20:], atol=1e-3, rtol=0)
    for i in (0, 3, 5):
        cached = (len(prompts[i]) - 1) // 32 * 32
        (logits,) = sequences.forward(
            backend, [(sequences.add(prompts[i], cached=cached, prefix_of=i), len(prompts[i]))]
        )
        torch.testing.assert_close(logits, expected[i][cached:], atol=1e-3, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_it_knows_the_capital_of_france_cold_and_cached(
    loaded: LoadedModel, blocks: PrefixCacheBlocks, deterministic: bool
) -> None:
    engine = Engine(loaded, blocks, EngineSettings(deterministic=deterministic))
    prompt = loaded.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    for cached in (0, 32):
        (answer,) = engine.generate([prompt], SamplingParams(max_new_tokens=20))
        assert answer.text == "The capital of France is Paris."
        assert answer.finish is FinishReason.STOP
        assert answer.stats.cached_tokens in (cached, 32)
    blocks.check_integrity()


def test_its_chat_template_and_tokenizer(loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": "Count to 12."}])
    assert ids[:2] == [1, 9690]  # <|im_start|>, system: the template brings a system prompt of its own
    assert ids[-4:] == [1, 520, 9531, 198]  # <|im_start|>, assistant, newline
    text = "".join(TEXTS)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text


def test_geometry_is_known_without_loading(source: ModelSource) -> None:
    config = source.config
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (30, 3, 64)
    assert config.kv_token_bytes(4) == 46_080
    assert config.page_bytes(32, 4) % 4096 == 0
    assert isinstance(source.path, Path)
