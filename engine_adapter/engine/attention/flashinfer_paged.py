"""Paged attention by FlashInfer, an optional backend: `pip install 'kvstore[flashinfer]'`.

Reads the block-major pool where it lies: FlashInfer takes keys and values as two strided tensors `[page, kv_head,
token, head_dim]` (its layout HND) and computes offsets in 64 bits. Decodes alone go to its decode wrapper, everything
else to its prefill wrapper, which is FlashAttention-3 on Hopper. Its plans are made on the host, pass by pass, so this
backend is not captured in a graph. It compiles its kernels at first use (nvcc and ninja, up to two minutes).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.device_batch import DeviceBatch, to_device
from engine_adapter.engine.attention.paged_writer import PagedWriter
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["FlashInferAttention", "FlashInferStep"]

_WORKSPACE_BYTES = 256 << 20
# From so many query heads a KV head on, a decode through tensor cores is the faster one.
_TENSOR_CORE_GROUP = 4


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

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        """ConfigError where FlashInfer is missing or the pool is not on a GPU."""
        library = _flashinfer()
        if not pool.is_cuda:
            raise ConfigError("attention backend flashinfer needs a CUDA device")
        self._pool = pool
        self._num_heads = num_heads
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        group = num_heads // pool.shape[3]
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=group >= _TENSOR_CORE_GROUP
        )
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

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
            _starts(num_pages),
            torch.from_numpy(np.concatenate(pages)),
            torch.from_numpy(batch.context_lens - (num_pages - 1) * block_tokens),
        )
        sizes = (self._num_heads, kv_heads, head_dim, block_tokens)
        types = {"q_data_type": self._pool.dtype, "o_data_type": self._pool.dtype}
        wrapper = self._decode if (counts == 1).all() else self._prefill
        if wrapper is self._decode:
            wrapper.plan(*paged, *sizes, **types)
        else:
            wrapper.plan(_starts(counts), *paged, *sizes, causal=True, **types)
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


def _starts(counts: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
    """`[0, c0, c0 + c1, ...]` int32, on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


def _owned_rows(batch: AttentionBatch) -> Tensor | None:
    rows = np.concatenate([np.arange(start, end) for start, end in batch.rows.tolist()])
    if len(rows) == batch.num_rows and (rows == np.arange(len(rows))).all():
        return None
    return torch.from_numpy(rows)
