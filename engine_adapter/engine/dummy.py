"""Random weights of a fixed seed: speed can be measured without a model's files.

Weights are drawn on the device they stay on; CPU and GPU draw different numbers. Their scale keeps activations and
logits near 1, so that the mathematics are exercised as by a trained model.
"""

import torch
from torch import Tensor

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.weights import LayerWeights, ModelWeights

__all__ = ["dummy_weights"]


def dummy_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device | str
) -> ModelWeights:
    """Weights of this shape: matrices are normal with variance 1 / columns, norms are ones, biases are small."""
    draw = _Draw(torch.Generator(device=device).manual_seed(seed), dtype, torch.device(device))
    embedding = draw.matrix(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(config, draw) for _ in range(config.num_layers)),
        final_norm=draw.ones(config.hidden_size),
        lm_head=embedding if config.tied_embeddings else draw.matrix(config.vocab_size, config.hidden_size),
        rope_factors=None,
    )


class _Draw:
    def __init__(self, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = generator
        self._dtype = dtype
        self._device = device

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self._normal((rows, columns), columns**-0.5)

    def bias(self, rows: int) -> Tensor:
        return self._normal((rows,), 0.1)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def _normal(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, deviation, generator=self._generator)


def _layer(config: ModelConfig, draw: _Draw) -> LayerWeights:
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biased, mlp_biased = config.attention_bias, config.mlp_bias
    return LayerWeights(
        input_norm=draw.ones(hidden),
        qkv=draw.matrix(queries + 2 * keys, hidden),
        qkv_bias=draw.bias(queries + 2 * keys) if biased else None,
        q_norm=draw.ones(config.head_dim) if config.qk_norm else None,
        k_norm=draw.ones(config.head_dim) if config.qk_norm else None,
        out=draw.matrix(hidden, queries),
        out_bias=draw.bias(hidden) if biased else None,
        mlp_norm=draw.ones(hidden),
        gate_up=draw.matrix(2 * ffn, hidden),
        gate_up_bias=draw.bias(2 * ffn) if mlp_biased else None,
        down=draw.matrix(hidden, ffn),
        down_bias=draw.bias(hidden) if mlp_biased else None,
    )
