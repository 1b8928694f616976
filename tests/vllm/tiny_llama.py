"""A model of the llama kind with random weights that a test writes itself: heads that two ranks can share evenly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

__all__ = ["VOCABULARY", "write_tiny_llama"]

VOCABULARY = 512
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 2, 128, 4, 2, 32, 256


def write_tiny_llama(folder: Path) -> None:
    """The same weights each time, in fp32."""
    random = np.random.default_rng(1)

    def weights(*shape: int) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * 0.08).astype(np.float32)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": 12 * weights(VOCABULARY, _HIDDEN),
        "lm_head.weight": weights(VOCABULARY, _HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(_LAYERS):
        of_layer = {
            "self_attn.q_proj": weights(_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.k_proj": weights(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.v_proj": weights(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.o_proj": weights(_HIDDEN, _HEADS * _HEAD_DIM),
            "mlp.gate_proj": weights(_FFN, _HIDDEN),
            "mlp.up_proj": weights(_FFN, _HIDDEN),
            "mlp.down_proj": weights(_HIDDEN, _FFN),
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": value for name, value in of_layer.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
