"""Paged attention by FlashInfer, an optional backend: `pip install 'kvstore[flashinfer]'`.

Reads the block-major pool where it lies: FlashInfer takes keys and values as two strided tensors `[page, kv_head,
token, head_dim]` (its layout HND) and computes offsets in 64 bits. Decodes alone go to its decode wrapper, everything
else to its prefill wrapper, which is FlashAttention-3 on Hopper. Plans are made on the host, pass by pass, for batches
of any shape; decode in graphs is `flashinfer_decode`. It compiles its kernels at first use (nvcc and ninja, up to two
minutes).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.device_batch import DeviceBatch, to_device
from engine_adapter.engine.attention.flashinfer_decode import (
    FlashInferDecode,
    page_starts,
    tensor_cores,
)
from engine_adapter.engine.attention.flashinfer_limits import workspace_bytes
from engine_adapter.engine.attention.paged_writer import PagedWriter
from engine_adapter.engine.streams import Queue
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["FlashInferAttention", "FlashInferStep"]


def _flashinfer() -> "ModuleType":
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(
            "attention backend flashinfer is not installed: pip install 'kvstore[flashinfer]'"
        ) from error
    module: ModuleType = flashinfer
    return module


class FlashInferAttention:
    """Backend over a pool `[page, layer, K|V, kv_head, token, head_dim]` on a GPU."""

    def __init__(self, pool: Tensor, num_heads: int, *, max_sequences: int = 1) -> None:
        """For graphs of up to `max_sequences` rows. ConfigError without FlashInfer, or a pool on a GPU."""
        library = _flashinfer()
        if not pool.is_cuda:
            raise ConfigError("attention backend flashinfer needs a CUDA device")
        self._library = library
        self._pool = pool
        self._num_heads = num_heads
        self._max_sequences = max_sequences
        kv_heads, head_dim = pool.shape[3], pool.shape[5]
        nbytes = workspace_bytes(
            num_heads,
            kv_heads,
            head_dim,
            max_sequences=max_sequences,
            multiprocessors=torch.cuda.get_device_properties(pool.device).multi_processor_count,
        )
        self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=pool.device)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=tensor_cores(num_heads, kv_heads)
        )
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def in_graphs(self, queue: Queue, max_pages: int) -> FlashInferDecode:
        """Decode over static tensors with block tables of `max_pages`, on the same queue as the passes planned here."""
        return FlashInferDecode(
            self._library,
            self._pool,
            self._num_heads,
            self._workspace,
            queue,
            max_sequences=self._max_sequences,
            max_pages=max_pages,
        )

    def compile(self) -> None:
        """Build both kernels, which their first plan does, by planning without running: no page is touched."""
        for rows in (1, 2):
            self.plan(
                AttentionBatch(
                    num_rows=rows,
                    block_tables=np.zeros((1, 1), np.int32),
                    rows=np.array([[0, rows]], np.int32),
                    context_lens=np.full(1, rows, np.int32),
                )
            )

    def plan(self, batch: AttentionBatch) -> "FlashInferStep":
        """Plan on the host. Waits for the copies of the plan before, whose pinned buffer is used again."""
        self._planned.synchronize()
        counts = batch.rows[:, 1] - batch.rows[:, 0]
        kv_heads, block_tokens, head_dim = self._pool.shape[3:]
        num_pages = -(-batch.context_lens // block_tokens)
        pages = [table[:count] for table, count in zip(batch.block_tables, num_pages.tolist(), strict=True)]
        paged = (
            page_starts(num_pages),
            torch.from_numpy(np.concatenate(pages)),
            torch.from_numpy(batch.context_lens - (num_pages - 1) * block_tokens),
        )
        sizes = (self._num_heads, kv_heads, head_dim, block_tokens)
        types = {"q_data_type": self._pool.dtype, "o_data_type": self._pool.dtype}
        wrapper = self._decode if (counts == 1).all() else self._prefill
        if wrapper is self._decode:
            wrapper.plan(*paged, *sizes, **types)
        else:
            wrapper.plan(page_starts(counts), *paged, *sizes, causal=True, **types)
        self._planned.record()
        return FlashInferStep(self._pool, to_device(batch, self._pool.device), wrapper, _owned_rows(batch))


class FlashInferStep(PagedWriter):
    """Attention of one pass. `rows` are those that sequences own, in their order; None where all are."""

    def __init__(self, pool: Tensor, metadata: DeviceBatch, wrapper: Any, rows: Tensor | None) -> None:
        super().__init__(pool, metadata)
        self._wrapper = wrapper
        self._rows = None if rows is None else rows.to(pool.device, non_blocking=True)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See StepAttention."""
        pages = self._pool[:, layer]
        owned = query if self._rows is None else query[self._rows]
        out = torch.empty(owned.shape, dtype=owned.dtype, device=owned.device)
        self._wrapper.run(owned, (pages[:, 0], pages[:, 1]), out=out)
        if self._rows is None:
            return out
        return torch.zeros_like(query, memory_format=torch.contiguous_format).index_copy_(0, self._rows, out)


def _owned_rows(batch: AttentionBatch) -> Tensor | None:
    rows = np.concatenate([np.arange(start, end) for start, end in batch.rows.tolist()])
    if len(rows) == batch.num_rows and (rows == np.arange(len(rows))).all():
        return None
    return torch.from_numpy(rows)
