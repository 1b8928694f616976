"""The Llama family as few kernels: the forward pass of a GPU, over the weights of a `Llama`.

The mathematics are those of `llama`; what differs is what is fused (`Elementwise`, `PassAttention`), that the residual
is summed in place, and that only rows whose logits are wanted pass through the last layer's MLP. Everything is queued
and nothing is waited for, so a pass over static buffers may be captured in a graph. `TorchElementwise` is the twin
that runs anywhere.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.weights import LayerWeights

__all__ = ["Elementwise", "FusedLlama", "PassAttention", "TorchElementwise"]


class Elementwise(Protocol):
    """What stands between the products."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of each row of `x` `[rows, size]`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place; RMSNorm of the sum."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` `[rows, 2 * size]`."""
        ...


class PassAttention(Protocol):
    """Attention of one pass, which knows where its rows stand."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: LayerWeights) -> Tensor:
        """Norm (where the layer has norms for heads) and rotate `query` and `key`, write the KV, attend.

        `[rows, heads, head_dim]`, views of one product; `query` may be changed. The result is as `query`, dense.
        """
        ...


class FusedLlama:
    """Forward passes of one model. Stateless but for the pages that its attention writes."""

    def __init__(
        self, model: Llama, ops: Elementwise, reduce: Callable[[Tensor], None] | None = None
    ) -> None:
        """`reduce` adds partial sums up over the shards of a model, in place; None where there is one shard."""
        self.config = model.config
        self._weights = model.weights
        self._ops = ops
        self._reduce = reduce

    def logits(self, token_ids: Tensor, attention: PassAttention, wanted: Tensor | None) -> Tensor:
        """Float32 logits `[len(wanted), vocab]` of the rows `wanted` (None: of all) of `token_ids` `[rows]`.

        With none wanted only the KV is written. Both are integer tensors on the device.
        """
        weights, eps, ops = self._weights, self.config.rms_norm_eps, self._ops
        hidden = functional.embedding(token_ids, weights.embedding)
        normed = ops.rms_norm(hidden, weights.layers[0].input_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            delta = self._attend(index, layer, normed, attention)
            if index == last and wanted is not None:
                if not len(wanted):
                    return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
                hidden, delta = hidden[wanted], delta[wanted]
            normed = ops.add_rms_norm(delta, hidden, layer.mlp_norm, eps)
            gate_up = functional.linear(normed, layer.gate_up, layer.gate_up_bias)
            delta = self._product(ops.silu_mul(gate_up), layer.down, layer.down_bias)
            following = weights.final_norm if index == last else weights.layers[index + 1].input_norm
            normed = ops.add_rms_norm(delta, hidden, following, eps)
        return _logits(normed, weights.lm_head)

    def _attend(self, index: int, layer: LayerWeights, normed: Tensor, attention: PassAttention) -> Tensor:
        c, rows = self.config, normed.shape[0]
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        query, key, value = torch.split(qkv.view(rows, -1, c.head_dim), sizes, dim=1)
        mixed = attention.attend(index, query, key, value, layer)
        return self._product(mixed.view(rows, -1), layer.out, layer.out_bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A product that leads back to the hidden size: of a shard only a part of the sum."""
        product = functional.linear(x, weight, bias)
        if self._reduce is not None:
            self._reduce(product)
        return product


def _logits(normed: Tensor, lm_head: Tensor) -> Tensor:
    """Float32 whatever the weights are: in bfloat16 the two best tokens are often equal."""
    if normed.is_cuda and normed.dtype is not torch.float32:
        return torch.mm(normed, lm_head.t(), out_dtype=torch.float32)
    return functional.linear(normed, lm_head).float()


class TorchElementwise:
    """The twin: the same operations in torch, on any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Elementwise."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Elementwise."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Elementwise."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
