"""Writing KV into pages and gathering it back out: shared by the backends that attend to contiguous tensors."""

import numpy as np
import torch
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch

__all__ = ["PageWriter", "Scratch"]


class PageWriter:
    """Scatters the rows of one pass into the pages of a pool `[page, layer, K|V, kv_head, token, head_dim]`."""

    def __init__(self, pool: Tensor, batch: AttentionBatch) -> None:
        self._pool = pool
        block_tokens = pool.shape[4]
        rows, pages, offsets = [], [], []
        for i, (start, end) in enumerate(batch.rows.tolist()):
            positions = np.arange(end - start, dtype=np.int64) + (int(batch.context_lens[i]) - (end - start))
            rows.append(np.arange(start, end))
            pages.append(batch.block_tables[i, positions // block_tokens].astype(np.int64))
            offsets.append(positions % block_tokens)
        device, written = pool.device, np.concatenate(rows)
        self._rows = torch.from_numpy(written).to(device)
        self._pages = torch.from_numpy(np.concatenate(pages)).to(device)
        self._offsets = torch.from_numpy(np.concatenate(offsets)).to(device)
        # Where sequences own all rows, they may still be named in another order than their rows lie in.
        self._as_they_are = np.array_equal(written, np.arange(batch.num_rows))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` `[num_rows, kv_heads, head_dim]`; padding rows are left out."""
        if not self._as_they_are:
            key, value = key[self._rows], value[self._rows]
        target = self._pool[:, layer]  # [page, K|V, kv_head, token, head_dim]
        target[self._pages, 0, :, self._offsets] = key
        target[self._pages, 1, :, self._offsets] = value


class Scratch:
    """One reusable buffer that pages are gathered into: fresh memory for each layer would be faulted in each time."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._buffer = pool.new_empty(0)

    def gather(self, layer: int, pages: Tensor, num_tokens: int, padded_tokens: int) -> Tensor:
        """`[K|V, kv_head, padded_tokens, head_dim]` of the first `num_tokens` tokens in `pages` (int64), zeros after.

        Valid until the next call. Padding is zeroed because recycled pages hold arbitrary bytes: a masked score
        becomes an exact 0, but 0 times NaN is NaN. `padded_tokens` is at least `num_tokens`.
        """
        _, _, _, kv_heads, block_tokens, head_dim = self._pool.shape
        num_pages = -(-padded_tokens // block_tokens)
        size = 2 * kv_heads * num_pages * block_tokens * head_dim
        if self._buffer.numel() < size:
            self._buffer = self._pool.new_empty(max(size, 2 * self._buffer.numel()))
        paged = self._buffer[:size].view(2, kv_heads, num_pages, block_tokens, head_dim)
        used = paged[:, :, : len(pages)]
        torch.index_select(self._pool[:, layer].permute(1, 2, 0, 3, 4), 2, pages, out=used)
        flat = paged.view(2, kv_heads, num_pages * block_tokens, head_dim)
        if num_tokens < padded_tokens:
            flat[:, :, num_tokens:] = 0
        return flat[:, :, :padded_tokens]
