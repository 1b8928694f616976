"""The contract of paged attention: which rows attend to which pages, and who writes the pages.

A batch is flat: `num_rows` rows, of which each sequence owns a range of consecutive ones; the ranges may lie in any
order. A sequence's rows are the last tokens of its context, in order, so a row's position follows from the context
length: row `r` of the range `[start, end)` is at position `context_len - (end - r)` and attends to positions up to its
own. Rows that no sequence owns are padding: nothing of theirs is written, and what they attend to is finite but
meaningless.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["AttentionBackend", "AttentionBatch", "StepAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One forward pass, as host arrays; a backend copies what it wants on its device.

    `block_tables` `[num_seqs, max_pages]` int32, of which sequence `i` uses the first
    `ceil(context_lens[i] / block_tokens)`; `rows` `[num_seqs, 2]` int32, half-open ranges; `context_lens` `[num_seqs]`
    int32, tokens including those of this pass.
    """

    num_rows: int
    block_tables: NDArray[np.int32]
    rows: NDArray[np.int32]
    context_lens: NDArray[np.int32]

    def positions(self) -> NDArray[np.int64]:
        """Absolute position of each row, `[num_rows]`; padding rows are at 0."""
        positions = np.zeros(self.num_rows, np.int64)
        for (start, end), context_len in zip(self.rows.tolist(), self.context_lens.tolist(), strict=True):
            positions[start:end] = np.arange(context_len - (end - start), context_len)
        return positions


class StepAttention(Protocol):
    """Attention of one forward pass; `write` of a layer comes before its `attend`."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put `key` and `value` `[num_rows, num_kv_heads, head_dim]` into the pages of the batch's sequences."""
        ...

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Mix the values that `query` `[num_rows, num_heads, head_dim]` attends to; the same shape."""
        ...


class AttentionBackend(Protocol):
    """Prepares a pass once, so that layers only multiply. A plan is used up before the next one is made."""

    def plan(self, batch: AttentionBatch) -> StepAttention: ...
