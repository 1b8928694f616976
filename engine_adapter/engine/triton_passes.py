"""Attention and elementwise kernels of a forward pass on a GPU, by our own Triton kernels: `passes` and `fused`."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.flashinfer_paged import FlashInferAttention, FlashInferStep
from engine_adapter.engine.attention.triton_paged import (
    TritonAttention,
    TritonStep,
    decode,
    decode_plan,
    rope_and_write,
)
from engine_adapter.engine.attention.work_plan import WorkPlan
from engine_adapter.engine.kernels.activation import silu_mul
from engine_adapter.engine.kernels.norm import add_rms_norm, rms_norm
from engine_adapter.engine.models.fused import PassAttention
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.passes import DecodeTensors
from engine_adapter.engine.streams import Queue
from engine_adapter.engine.weights import LayerWeights

__all__ = ["FlashInferPasses", "TritonElementwise", "TritonPasses"]


class TritonElementwise:
    """See `fused.Elementwise`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Elementwise."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Elementwise."""
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Elementwise."""
        return silu_mul(gate_up)


class TritonPasses:
    """See `passes.Passes`. Decode has one plan a batch size, so that a small batch launches a small grid."""

    def __init__(self, model: Llama, pool: Tensor, *, max_rows: int, max_sequences: int) -> None:
        """For passes of up to `max_rows` rows of `max_sequences` sequences. ConfigError for a pool of another shape."""
        self._model = model
        self._pool = pool
        self._layers = [pool[:, layer] for layer in range(model.config.num_layers)]
        self._attention = TritonAttention(
            pool, model.config.num_heads, max_rows=max_rows, max_sequences=max_sequences
        )
        self._decode_plans: dict[int, WorkPlan] = {}

    def mixed(self, batch: AttentionBatch) -> PassAttention:
        """See Passes."""
        return _MixedPass(self._model, self._attention.plan(batch))

    def plan_decode(self, context_lens: NDArray[np.int32]) -> None:
        """See Passes. The work is cut on the device."""

    def decode(self, tensors: DecodeTensors) -> PassAttention:
        """See Passes."""
        size = len(tensors.seq_of_row)
        if size not in self._decode_plans:
            self._decode_plans[size] = decode_plan(self._pool, self._model.config.num_heads, size)
        plan = self._decode_plans[size]
        plan.update(tensors.rows, tensors.context_lens)

        def attention(layer: int, query: Tensor) -> Tensor:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            decode(query, self._layers[layer], tensors.block_tables, out, plan)
            return out

        return _DecodePass(self._model, self._layers, tensors, attention)

    def rehearsal(self, num_rows: int) -> PassAttention:
        """See Passes."""
        return _MixedPass(self._model, self._attention.rehearsal(num_rows))


class FlashInferPasses(TritonPasses):
    """Attention by FlashInfer, with a plan on the host before each pass; the rest by our own kernels."""

    def __init__(
        self, model: Llama, pool: Tensor, queue: Queue, *, max_rows: int, max_sequences: int, max_pages: int
    ) -> None:
        """As TritonPasses, for block tables of `max_pages`. ConfigError also where FlashInfer is not installed."""
        super().__init__(model, pool, max_rows=max_rows, max_sequences=max_sequences)
        self._flashinfer = FlashInferAttention(pool, model.config.num_heads, max_sequences=max_sequences)
        self._in_graphs = self._flashinfer.in_graphs(queue, max_pages)

    def mixed(self, batch: AttentionBatch) -> PassAttention:
        """See Passes."""
        return _MixedPass(self._model, self._flashinfer.plan(batch))

    def plan_decode(self, context_lens: NDArray[np.int32]) -> None:
        """See Passes."""
        self._in_graphs.plan(context_lens)

    def decode(self, tensors: DecodeTensors) -> PassAttention:
        """See Passes."""
        return _DecodePass(self._model, self._layers, tensors, self._in_graphs.attention(tensors))

    def rehearsal(self, num_rows: int) -> PassAttention:
        """See Passes. Compiles FlashInfer's kernels too, which takes up to minutes the first time."""
        self._flashinfer.compile()
        return super().rehearsal(num_rows)


class _MixedPass:
    def __init__(self, model: Llama, step: TritonStep | FlashInferStep) -> None:
        self._rope, self._eps = model.rope, model.config.rms_norm_eps
        self._step = step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: LayerWeights) -> Tensor:
        self._step.rope_and_write(
            layer,
            query,
            key,
            value,
            self._rope.cos,
            self._rope.sin,
            query_norm=weights.q_norm,
            key_norm=weights.k_norm,
            norm_eps=self._eps,
        )
        return self._step.attend(layer, query)


class _DecodePass:
    """`attention` mixes for a layer and rotated queries."""

    def __init__(
        self,
        model: Llama,
        layers: list[Tensor],
        tensors: DecodeTensors,
        attention: Callable[[int, Tensor], Tensor],
    ) -> None:
        self._rope, self._eps = model.rope, model.config.rms_norm_eps
        self._layers = layers
        self._tensors = tensors
        self._attention = attention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: LayerWeights) -> Tensor:
        t = self._tensors
        rope_and_write(
            query,
            key,
            value,
            self._rope.cos,
            self._rope.sin,
            self._layers[layer],
            t.block_tables,
            t.seq_of_row,
            t.positions,
            query_norm=weights.q_norm,
            key_norm=weights.k_norm,
            norm_eps=self._eps,
        )
        return self._attention(layer, query)
