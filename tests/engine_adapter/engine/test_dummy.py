"""Models of random weights: known shapes, a fixed seed, and text that needs no file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_adapter.engine.dummy import dummy_weights
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.loader import load_model
from engine_adapter.engine.plain import PlainBlockManager
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.shapes import known_shapes, shape_of
from engine_adapter.engine.source import find_shape
from engine_adapter.engine.tokenizer import ByteTokenizer, load_tokenizer
from engine_adapter.engine.weights import convert_weights
from tests.engine_adapter.engine import tiny

ONE_THREAD = EngineSettings(threads=1)


@pytest.mark.parametrize(
    "name, kv_token_bytes, billions",
    [("llama-3.1-8b", 131072, 8.03), ("llama-3.2-1b", 32768, 1.24), ("qwen3-8b", 147456, 8.19)],
)
def test_known_shapes_have_the_sizes_of_their_models(name: str, kv_token_bytes: int, billions: float) -> None:
    config = shape_of(name)
    assert config is not None
    assert config.kv_token_bytes(2) == kv_token_bytes
    layer = config.hidden_size * (
        2 * config.num_heads * config.head_dim
        + 2 * config.num_kv_heads * config.head_dim
        + 3 * config.intermediate_size
    )
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    assert abs((config.num_layers * layer + embeddings) / 1e9 - billions) < 0.01


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_the_same_seed_gives_the_same_model_and_another_does_not(name: str) -> None:
    config = shape_of(name)
    assert config is not None
    first, again, other = (dummy_weights(config, seed, torch.float32, "cpu") for seed in (0, 0, 1))
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert torch.equal(first.lm_head, again.lm_head)
    assert not torch.equal(first.layers[1].down, other.layers[1].down)
    assert (first.layers[0].q_norm is not None) == config.qk_norm


def test_answers_of_a_random_model_do_not_depend_on_the_prefix_being_chunked() -> None:
    loaded = load_model(find_shape("llama-tiny"), ONE_THREAD)
    page_bytes = loaded.config.page_bytes(16, 4)
    prompt = list(range(200))
    answers = []
    for chunk_tokens in (512, 30):
        blocks = PlainBlockManager(num_pages=32, page_bytes=page_bytes, block_tokens=16)
        engine = Engine(loaded, blocks, replace(ONE_THREAD, chunk_tokens=chunk_tokens, max_running=4))
        answers += engine.generate([prompt], SamplingParams(max_new_tokens=20))
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids) == 20  # no token ends a turn
    assert len(set(answers[0].token_ids)) > 5  # and it does not say one thing for ever


def test_a_folder_lends_its_shape(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path / "model", {"architectures": ["Qwen3ForCausalLM"]})
    (folder / "model.safetensors").unlink()
    source = find_shape(str(folder), seed=3)
    assert source.config.qk_norm
    assert (source.seed, source.gguf) == (3, None)
    assert load_model(source, ONE_THREAD).config.hidden_size == 48


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    assert set(known_shapes()) >= {"llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "llama-tiny"}
    with pytest.raises(ModelError, match=r"no shape 'gpt-5'.*llama-3\.1-8b"):
        find_shape("gpt-5")


def test_text_is_bytes() -> None:
    tokenizer = load_tokenizer(find_shape("llama-tiny"))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.decode([110, 195, 169]) == "né"
    assert tokenizer.decode([110, 256 + 110, 195]) == "nn\ufffd"
    with pytest.raises(ModelError, match="chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_weights_are_converted_and_what_is_tied_stays_tied() -> None:
    config = shape_of("llama-tiny")
    assert config is not None
    weights = dummy_weights(replace(config, tied_embeddings=True), 0, torch.float32, "cpu")
    half = convert_weights(weights, torch.bfloat16, "cpu")
    assert half.lm_head is half.embedding
    assert half.layers[0].qkv.dtype is torch.bfloat16
    assert half.layers[0].qkv_bias is None
    torch.testing.assert_close(half.layers[1].out.float(), weights.layers[1].out, atol=0.01, rtol=0.01)
