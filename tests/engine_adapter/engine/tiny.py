"""Tiny random models for tests: configurations, weights saved as Hugging Face folders, and a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_adapter.engine.config import ModelConfig, config_from_hf
from engine_adapter.engine.loader import LoadedModel, load_model
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.source import find_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 257,
    "eos_token_id": 256,
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def random_weights(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, large enough that attention and rope matter to the logits."""
    generator = torch.Generator().manual_seed(seed)
    config = config_from_hf(raw)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    }
    for layer in range(config.num_layers):
        weights |= {f"model.layers.{layer}.{k}": v for k, v in _layer(config, matrix).items()}
    weights["model.norm.weight"] = matrix(config.hidden_size) + 1
    if not config.tied_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, config.hidden_size)
    return weights


def _layer(config: ModelConfig, matrix: Any) -> dict[str, torch.Tensor]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.intermediate_size
    attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    mlp = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    weights = {f"self_attn.{name}_proj.weight": matrix(*shape) for name, shape in attention.items()}
    weights |= {f"mlp.{name}_proj.weight": matrix(*shape) for name, shape in mlp.items()}
    if config.attention_bias:
        weights |= {f"self_attn.{name}_proj.bias": matrix(shape[0]) for name, shape in attention.items()}
    if config.mlp_bias:
        weights |= {f"mlp.{name}_proj.bias": matrix(shape[0]) for name, shape in mlp.items()}
    if config.qk_norm:
        weights |= {f"self_attn.{name}_norm.weight": matrix(config.head_dim) + 1 for name in ("q", "k")}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{norm}.weight"] = matrix(hidden) + 1
    return weights


def byte_tokenizer() -> Tokenizer:
    """One token a byte (ids 0-255 in the order of the byte-level alphabet), then `<|im_end|>` and `<|im_start|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return tokenizer


def save_folder(
    folder: Path, overrides: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """A whole model folder. An override of None removes the key."""
    raw = {key: value for key, value in (BASE | (overrides or {})).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {name: tensor.to(dtype) for name, tensor in random_weights(raw, seed).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return folder


def load(folder: Path, settings: EngineSettings | None = None) -> LoadedModel:
    return load_model(find_model(str(folder)), settings or EngineSettings(threads=1))
