"""Cuts a model into shards: whole heads, and even parts of the MLP; what is small stays whole everywhere.

A shard is a model of its own with fewer heads and a narrower MLP, whose two products a layer that lead back to the
hidden size are partial sums: added over all shards they are the whole model's. So the KV of a shard's heads lies with
the shard, and a page number means the same page on each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.parallel.shard_config import shard_config
from engine_adapter.engine.weights import LayerWeights, ModelWeights
from kvstore.errors import ConfigError

__all__ = ["Shard", "shard_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Shard `rank` of `size`. Rank 0 is the one that schedules."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"no shard {self.rank} of {self.size}")


def shard_weights(weights: ModelWeights, config: ModelConfig, shard: Shard) -> ModelWeights:
    """The shard's own part of `weights`, copied; `config` is the whole model's. What stays whole is shared."""
    shard_config(config, shard.size)  # whether it can be cut
    return ModelWeights(
        embedding=weights.embedding,
        layers=tuple(_layer(layer, config, shard) for layer in weights.layers),
        final_norm=weights.final_norm,
        lm_head=weights.lm_head,
        rope_factors=weights.rope_factors,
    )


def _layer(layer: LayerWeights, config: ModelConfig, shard: Shard) -> LayerWeights:
    keys = config.num_kv_heads * config.head_dim
    heads = [config.num_heads * config.head_dim, keys, keys]
    halves = [config.intermediate_size] * 2
    first = shard.rank == 0  # a bias of a partial sum is added once
    return replace(
        layer,
        qkv=_rows(layer.qkv, heads, shard),
        qkv_bias=None if layer.qkv_bias is None else _rows(layer.qkv_bias, heads, shard),
        out=_columns(layer.out, shard),
        out_bias=layer.out_bias if first else None,
        gate_up=_rows(layer.gate_up, halves, shard),
        gate_up_bias=None if layer.gate_up_bias is None else _rows(layer.gate_up_bias, halves, shard),
        down=_columns(layer.down, shard),
        down_bias=layer.down_bias if first else None,
    )


def _rows(stacked: Tensor, sizes: Sequence[int], shard: Shard) -> Tensor:
    """This shard's rows of each of the matrices that are stacked along the first axis, stacked again."""
    return torch.cat([part.chunk(shard.size)[shard.rank] for part in torch.split(stacked, list(sizes))])


def _columns(matrix: Tensor, shard: Shard) -> Tensor:
    return matrix.chunk(shard.size, dim=1)[shard.rank].clone(memory_format=torch.contiguous_format)
