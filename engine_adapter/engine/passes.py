"""What a runner needs of attention: the contract for mixed passes and for decode over static tensors, and its twin.

`triton_passes` implements it on a GPU; `TorchPasses` does anywhere, slowly, by way of gather + SDPA.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine_adapter.engine.attention.base import AttentionBatch, StepAttention
from engine_adapter.engine.attention.sdpa import SdpaAttention
from engine_adapter.engine.models.fused import PassAttention
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.rope import rotate
from engine_adapter.engine.weights import LayerWeights

__all__ = ["DecodeTensors", "Passes", "TorchPasses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTensors:
    """Where decoding rows stand, int32 on the device; row `i` is the one row of sequence `i`.

    A padding row has sequence -1, position 0 and context 0: it writes nothing and attends to nothing. `rows` `[n, 2]`
    are `(i, i + 1)`; `block_tables` `[n, max_pages]`; the others `[n]`. Contexts count the row's own token.
    """

    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor
    seq_of_row: Tensor
    positions: Tensor

    def first(self, count: int) -> "DecodeTensors":
        """Views of the first `count` rows."""
        return DecodeTensors(
            block_tables=self.block_tables[:count],
            rows=self.rows[:count],
            context_lens=self.context_lens[:count],
            seq_of_row=self.seq_of_row[:count],
            positions=self.positions[:count],
        )


class Passes(Protocol):
    """Prepares the attention of a pass. A pass is used up before the next one is prepared."""

    def mixed(self, batch: AttentionBatch) -> PassAttention:
        """For any chunks; `batch` may be changed afterwards."""
        ...

    def plan_decode(self, context_lens: NDArray[np.int32]) -> None:
        """Before a pass of so many rows that `decode` prepared is queued, or replayed: its contexts, as on the device.

        In order with what is queued, and never in a graph. `context_lens` may be changed afterwards.
        """
        ...

    def decode(self, tensors: DecodeTensors) -> PassAttention:
        """For one row a sequence. Queues kernels that read `tensors`, and may be captured in a graph with the pass."""
        ...

    def rehearsal(self, num_rows: int) -> PassAttention:
        """For one chunk of so many rows that writes nothing and reads no page, so that its kernels are compiled."""
        ...


class TorchPasses:
    """The twin. Reads `tensors` on the host, so a pass cannot be captured: it is prepared each time."""

    def __init__(self, model: Llama, pool: Tensor) -> None:
        self._model = model
        self._attention = SdpaAttention(pool)

    def mixed(self, batch: AttentionBatch) -> PassAttention:
        """See Passes."""
        positions = torch.from_numpy(batch.positions())
        return _TorchPass(self._model, positions, self._attention.plan(batch))

    def plan_decode(self, context_lens: NDArray[np.int32]) -> None:
        """See Passes. Nothing depends on it."""

    def decode(self, tensors: DecodeTensors) -> PassAttention:
        """See Passes."""
        real = np.flatnonzero(tensors.seq_of_row.numpy() >= 0)
        if not len(real):
            return _TorchPass(self._model, tensors.positions.long(), _PaddingStep())
        batch = AttentionBatch(
            num_rows=len(tensors.seq_of_row),
            block_tables=tensors.block_tables.numpy()[real],
            rows=tensors.rows.numpy()[real],
            context_lens=tensors.context_lens.numpy()[real],
        )
        return _TorchPass(self._model, tensors.positions.long(), self._attention.plan(batch))

    def rehearsal(self, num_rows: int) -> PassAttention:
        """See Passes."""
        return _TorchPass(self._model, torch.zeros(num_rows, dtype=torch.int64), _PaddingStep())


class _PaddingStep:
    """A step of padding rows alone."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        pass

    def attend(self, layer: int, query: Tensor) -> Tensor:  # noqa: ARG002 (the contract's)
        return torch.zeros_like(query)


class _TorchPass:
    def __init__(self, model: Llama, positions: Tensor, step: StepAttention) -> None:
        self._eps = model.config.rms_norm_eps
        self._cos = model.rope.cos[positions].unsqueeze(1)
        self._sin = model.rope.sin[positions].unsqueeze(1)
        self._step = step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: LayerWeights) -> Tensor:
        if weights.q_norm is not None and weights.k_norm is not None:
            query = functional.rms_norm(query, query.shape[-1:], weights.q_norm, self._eps)
            key = functional.rms_norm(key, key.shape[-1:], weights.k_norm, self._eps)
        self._step.write(layer, rotate(key, self._cos, self._sin), value)
        return self._step.attend(layer, rotate(query, self._cos, self._sin)).contiguous()
