"""What a model is: one frozen record, from a Hugging Face `config.json` or GGUF metadata. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import cast

from engine_adapter.engine.errors import ModelError

__all__ = ["ModelConfig", "RopeConfig", "RopeKind", "config_from_gguf", "config_from_hf"]

_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
_PAGE_ALIGN_BYTES = 4096


class RopeKind(Enum):
    """How rope frequencies are stretched beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; the last four matter for LINEAR (`factor`) and LLAMA3 (all)."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder. `eos_token_ids` end a turn; `max_tokens` is the trained context in tokens.

    With `qk_norm` each head of queries and keys is RMS-normalized before rope (Qwen3).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads)
        if min(*sizes, self.head_dim, self.vocab_size, self.max_tokens) < 1:
            raise ModelError(f"model sizes must be positive: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"rope needs an even head_dim, not {self.head_dim}")

    def kv_token_bytes(self, itemsize: int) -> int:
        """KV of one token over all layers, in bytes; `itemsize` is the KV dtype's (4 for float32)."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    def page_bytes(self, block_tokens: int, itemsize: int) -> int:
        """A page of `block_tokens` tokens, padded up to 4 KiB."""
        return -(-self.kv_token_bytes(itemsize) * block_tokens // _PAGE_ALIGN_BYTES) * _PAGE_ALIGN_BYTES


class _Fields:
    """Typed reading of a mapping that came from a file; every error names the file's own key."""

    def __init__(self, values: Mapping[str, object], what: str) -> None:
        self._values = values
        self._what = what

    def get(self, key: str) -> object:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self._what}: {key} must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self._what}: {key} must be a number, not {value!r}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._what}: {key} must be a string, not {value!r}")
        return value

    def flag(self, key: str) -> bool:
        return bool(self._values.get(key, False))


def config_from_hf(raw: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """Read a parsed `config.json` (transformers 4 and 5 spellings); `generation` is `generation_config.json`."""
    fields = _Fields(raw, "config.json")
    architecture = _hf_architecture(raw)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.text("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {fields.get('hidden_act')!r} is not supported, only silu")
    max_tokens = fields.integer("max_position_embeddings", 2048)
    window = fields.get("sliding_window")
    if isinstance(window, int) and window < max_tokens and raw.get("use_sliding_window", True):
        raise ModelError("config.json: sliding-window attention is not supported, only full attention")
    if "quantization_config" in raw:
        raise ModelError(
            "config.json: quantized weights are supported in GGUF files only; convert or dequantize first"
        )
    eos = (generation or {}).get("eos_token_id", raw.get("eos_token_id"))
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_optional_integer(fields, "num_key_value_heads", num_heads),
        head_dim=_optional_integer(fields, "head_dim", hidden_size // max(1, num_heads)),
        vocab_size=fields.integer("vocab_size"),
        max_tokens=max_tokens,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_hf_rope(fields),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        bos_token_id=_token_ids(raw.get("bos_token_id"))[0] if _token_ids(raw.get("bos_token_id")) else None,
        eos_token_ids=_token_ids(eos),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _hf_architecture(raw: Mapping[str, object]) -> str:
    names = raw.get("architectures")
    listed = [str(name) for name in names] if isinstance(names, list) else []
    for name in listed:
        if name in _HF_ARCHITECTURES:
            return name
    shown = ", ".join(listed) or repr(raw.get("model_type"))
    raise ModelError(f"architecture {shown} is not supported; supported: {', '.join(_HF_ARCHITECTURES)}")


def _optional_integer(fields: _Fields, key: str, default: int) -> int:
    return default if fields.get(key) is None else fields.integer(key)


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(cast("list[int]", value))
    return ()


def _hf_rope(fields: _Fields) -> RopeConfig:
    """transformers 5 has theta and scaling in `rope_parameters`, older ones `rope_theta` beside `rope_scaling`."""
    inner = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json: rope parameters must be an object, not {inner!r}")
    rope = _Fields(cast("Mapping[str, object]", inner), "config.json rope")
    name = rope.text("rope_type", rope.text("type", "default"))
    if name not in {kind.value for kind in RopeKind}:
        raise ModelError(f"config.json: rope type {name!r} is not supported, only default, linear and llama3")
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError("config.json: partial rotary embeddings are not supported")
    return RopeConfig(
        theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        kind=RopeKind(name),
        factor=rope.number("factor", 1.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        original_max_tokens=rope.integer("original_max_position_embeddings", 8192),
    )


# Control tokens that end a turn under whatever name a vocabulary has for them (the set that llama.cpp stops at).
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>"})
_CONTROL_TOKEN = 3


def config_from_gguf(metadata: Mapping[str, object], tensor_names: frozenset[str]) -> ModelConfig:
    """Read GGUF metadata. A `rope_freqs.weight` tensor (llama3 scaling) is applied by the weights, not here."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} is not supported; supported: llama")
    fields = _Fields(metadata, "GGUF metadata")
    if fields.integer("llama.expert_count", 0):
        raise ModelError("GGUF: mixture-of-experts models are not supported")
    hidden_size, num_heads = (
        fields.integer("llama.embedding_length"),
        fields.integer("llama.attention.head_count"),
    )
    head_dim = fields.integer("llama.attention.key_length", hidden_size // max(1, num_heads))
    if fields.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError("GGUF: partial rotary embeddings are not supported")
    if fields.integer("llama.attention.value_length", head_dim) != head_dim:
        raise ModelError("GGUF: keys and values of different size are not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture="llama",
        num_layers=fields.integer("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("llama.vocab_size", num_tokens),
        max_tokens=fields.integer("llama.context_length"),
        rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields),
        tied_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_gguf_eos(metadata),
    )


def _gguf_rope(fields: _Fields) -> RopeConfig:
    name = fields.text("llama.rope.scaling.type", "none")
    if name not in ("none", "linear"):
        raise ModelError(f"GGUF: rope scaling {name!r} is not supported, only linear and llama3")
    return RopeConfig(
        theta=fields.number("llama.rope.freq_base", 10000.0),
        kind=RopeKind.LINEAR if name == "linear" else RopeKind.DEFAULT,
        factor=fields.number("llama.rope.scaling.factor", 1.0),
    )


def _gguf_eos(metadata: Mapping[str, object]) -> tuple[int, ...]:
    ids = [
        *_token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        *_token_ids(metadata.get("tokenizer.ggml.eot_token_id")),
    ]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        ids += [i for i, kind in enumerate(types) if kind == _CONTROL_TOKEN and tokens[i] in _END_OF_TURN]
    return tuple(dict.fromkeys(ids))
