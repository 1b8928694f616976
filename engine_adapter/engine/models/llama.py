"""The Llama family (Qwen3 too): RMSNorm, rope, grouped-query attention, SwiGLU; in plain torch functional operations.

A forward pass takes a flat batch of rows (tokens of any mix of requests) and is the same for prefill and decode; only
the attention it is given knows which rows belong together.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine_adapter.engine.attention.base import StepAttention
from engine_adapter.engine.config import ModelConfig
from engine_adapter.engine.rope import RopeTable, make_rope_table, rotate
from engine_adapter.engine.weights import LayerWeights, ModelWeights

__all__ = ["Llama"]


class Llama:
    """A decoder. Thread-safe: a forward pass changes nothing but the KV pages that its attention writes."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_tokens: int) -> None:
        """`max_tokens` bounds positions: the rope table has so many rows."""
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.weights = weights
        self.rope: RopeTable = make_rope_table(
            config.rope, config.head_dim, max_tokens, weights.rope_factors, self.device
        )

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Hidden states before the last norm, `[rows, hidden]`, of `token_ids` and `positions` `[rows]` (int64).

        Writes the rows' KV through `attention`.
        """
        cos, sin = self.rope.cos[positions].unsqueeze(1), self.rope.sin[positions].unsqueeze(1)
        hidden = functional.embedding(token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            hidden = hidden + self._attend(index, layer, hidden, cos, sin, attention)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocab]` of hidden states `[rows, hidden]`."""
        return functional.linear(self._norm(hidden, self.weights.final_norm), self.weights.lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: StepAttention,
    ) -> Tensor:
        c, rows = self.config, hidden.shape[0]
        qkv = functional.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        query, key, value = torch.split(qkv.view(rows, -1, c.head_dim), sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        attention.write(index, rotate(key, cos, sin), value)
        mixed = attention.attend(index, rotate(query, cos, sin))  # [rows, num_heads, head_dim]
        return functional.linear(mixed.reshape(rows, -1), layer.out, layer.out_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate_up = functional.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)
