"""Decode by FlashInfer over static tensors, so that a graph may capture it.

Two halves. On the host `plan` cuts the keys of a batch into work, by the contexts, and queues the copy of that cut to
where the kernels read it: before each pass, also before one that is replayed. On the device the pass itself begins with
a kernel that lists the pages (`page_lists`), so no block table passes through the host. What a graph has of a plan,
places and the size of its grid, depends on the number of rows alone: FlashInfer promises that for wrappers with
`use_cuda_graph`, of which there is one for each number of rows.

The copy of a cut takes a copy engine and comes behind copies of blocks that are under way (`kernels.words` says what
that costs); our own decode needs none.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.page_lists import write_page_lists
from engine_adapter.engine.passes import DecodeTensors
from engine_adapter.engine.streams import Event, Queue

__all__ = ["FlashInferDecode", "page_starts", "tensor_cores"]

# From so many query heads a KV head on, a decode through tensor cores is the faster one. With fewer, FlashInfer's other
# kernel has 1, 2 and 3.
_TENSOR_CORE_GROUP = 4


def tensor_cores(num_heads: int, kv_heads: int) -> bool:
    """Whether a decode of that shape goes through tensor cores."""
    return num_heads // kv_heads >= _TENSOR_CORE_GROUP


def page_starts(counts: NDArray[np.int32]) -> Tensor:
    """`[0, c0, c0 + c1, ...]` int32, on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


class FlashInferDecode:
    """For passes of up to `max_sequences` rows, one a sequence, over `pool`.

    `pool` is `[page, layer, K|V, kv_head, token, head_dim]`, of which FlashInfer takes a layer's keys and values as
    strided tensors (its layout HND). One thread; passes go through `queue`, in the order of their plans.
    """

    def __init__(
        self,
        library: ModuleType,
        pool: Tensor,
        num_heads: int,
        workspace: Tensor,
        queue: Queue,
        *,
        max_sequences: int,
        max_pages: int,
    ) -> None:
        """`library` is flashinfer; `workspace` its scratch, shared with passes of the same queue alone."""
        self._library = library
        self._workspace = workspace
        self._queue = queue
        self._device = pool.device
        kv_heads, self._block_tokens, head_dim = pool.shape[3:]
        self._tensor_cores = tensor_cores(num_heads, kv_heads)
        self._sizes = (num_heads, kv_heads, head_dim, self._block_tokens)
        self._types = {"q_data_type": pool.dtype, "kv_data_type": pool.dtype}
        self._layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(pool.shape[1])]
        numbers = {"dtype": torch.int32, "device": pool.device}
        self._starts = torch.zeros(max_sequences + 1, **numbers)  # type: ignore[call-overload]
        self._last_page_tokens = torch.zeros(max_sequences, **numbers)  # type: ignore[call-overload]
        self._pages = torch.zeros(max_sequences * max_pages, **numbers)  # type: ignore[call-overload]
        self._wrappers: dict[int, Any] = {}
        self._copied: Event | None = None

    def plan(self, context_lens: NDArray[np.int32]) -> None:
        """Cut the next pass of `len(context_lens)` rows into work; 0 is a row that attends to nothing.

        Waits for the copy of the plan before, whose pinned memory is written again: behind one step, not two.
        """
        if self._copied is not None:
            self._copied.synchronize()
        size = len(context_lens)
        if size not in self._wrappers:
            self._wrappers[size] = self._wrapper(size)
        counts = -(-context_lens // self._block_tokens)
        last = context_lens - np.maximum(counts - 1, 0) * self._block_tokens
        self._library.fast_decode_plan(
            self._wrappers[size],
            page_starts(counts),
            self._pages,
            torch.from_numpy(last.astype(np.int32)),
            *self._sizes,
            **self._types,
        )
        self._copied = self._queue.record()

    def attention(self, tensors: DecodeTensors) -> Callable[[int, Tensor], Tensor]:
        """Queue the list of pages; what it gives mixes, for a layer and queries `[rows, num_heads, head_dim]`.

        A plan of as many rows must have been made; it is read when the kernels run.
        """
        size = len(tensors.context_lens)
        write_page_lists(
            tensors.block_tables,
            tensors.context_lens,
            self._starts[: size + 1],
            self._pages,
            self._last_page_tokens[:size],
            self._block_tokens,
        )
        return partial(self._attend, self._wrappers[size])

    def _attend(self, wrapper: Any, layer: int, query: Tensor) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        wrapper.run(query, self._layers[layer], out=out)
        return out

    def _wrapper(self, size: int) -> Any:
        """For passes of `size` rows. Its own `plan` compiles what is not compiled yet, once for all sizes."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=self._starts[: size + 1],
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._last_page_tokens[:size],
        )
        nothing = torch.zeros(size + 1, dtype=torch.int32)
        wrapper.plan(nothing, self._pages[:0], nothing[:size], *self._sizes, **self._types)
        self._queue.record().synchronize()  # its pinned memory is written again at once
        return wrapper
