"""Attention by gathering a sequence's pages and torch's fused SDPA: the CPU backend and the oracle for the others.

It works on any device, slowly on a GPU. Time of a layer is O(context) copied plus the attention itself; the mask of a
sequence is built once a pass.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.gather import PageWriter, Scratch

__all__ = ["SdpaAttention"]


class SdpaAttention:
    """Backend over a pool `[page, layer, K|V, kv_head, token, head_dim]`."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._scratch = Scratch(pool)

    def plan(self, batch: AttentionBatch) -> "_SdpaStep":
        """Prepare one pass."""
        return _SdpaStep(self._pool, self._scratch, batch)


class _SdpaStep:
    def __init__(self, pool: Tensor, scratch: Scratch, batch: AttentionBatch) -> None:
        self._writer = PageWriter(pool, batch)
        self._scratch = scratch
        block_tokens = pool.shape[4]
        tables = torch.from_numpy(batch.block_tables).long().to(pool.device)
        self._sequences = []
        for i, (start, end) in enumerate(batch.rows.tolist()):
            context_len = int(batch.context_lens[i])
            pages = tables[i, : -(-context_len // block_tokens)]
            self._sequences.append(
                (start, end, context_len, pages, _causal_mask(end - start, context_len, pool))
            )

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._writer.write(layer, key, value)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        mixed = torch.zeros_like(query)
        for start, end, context_len, pages, mask in self._sequences:
            key, value = self._scratch.gather(layer, pages, context_len, context_len).unsqueeze(1)
            rows = query[start:end].transpose(0, 1).unsqueeze(0)  # [1, heads, rows, head_dim]
            result = functional.scaled_dot_product_attention(
                rows, key, value, attn_mask=mask, enable_gqa=True
            )
            mixed[start:end] = result[0].transpose(0, 1)
        return mixed


def _causal_mask(num_rows: int, context_len: int, like: Tensor) -> Tensor | None:
    """Additive mask `[num_rows, context_len]` for the last `num_rows` tokens of a context; None for a single one."""
    if num_rows == 1:
        return None
    mask = torch.full((num_rows, context_len), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(diagonal=context_len - num_rows + 1)
