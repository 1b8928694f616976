"""FlashInfer's decode wrapper written out in torch: as much of it as our decode uses, with its rules for graphs.

A wrapper reads its own buffers when it runs, never what `plan` was given, and refuses what FlashInfer refuses.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["TwinWrapper", "twin_library"]


class TwinWrapper:
    """See `flashinfer.BatchDecodeWithPagedKVCacheWrapper`, with `use_cuda_graph`."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "HND"
        assert options["use_cuda_graph"]
        self.starts: Tensor = options["paged_kv_indptr_buffer"]
        self.pages: Tensor = options["paged_kv_indices_buffer"]
        self.last: Tensor = options["paged_kv_last_page_len_buffer"]
        assert len(self.starts) == len(self.last) + 1
        self.full_plans = 0
        self.planned: Tensor | None = None

    def plan(self, starts: Tensor, pages: Tensor, last: Tensor, *sizes: int, **types: torch.dtype) -> None:
        """Resolves the kernels; must come before the fast plans."""
        self.full_plans += 1
        self._take(starts, last, sizes)

    def _take(self, starts: Tensor, last: Tensor, sizes: tuple[int, ...]) -> None:
        assert len(last) == len(self.last), "the number of rows is fixed"
        assert starts.dtype == last.dtype == torch.int32
        self.sizes = sizes
        block_tokens = sizes[3]
        self.planned = (starts.diff() - 1).clamp(min=0) * block_tokens + last

    def run(self, query: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        """Attention of one row a sequence over the pages that the buffers name; one without pages gives NaN."""
        heads, kv_heads, head_dim, block_tokens = self.sizes
        assert query.shape == (len(self.last), heads, head_dim)
        keys, values = kv
        lengths = []
        for row, one in enumerate(query):
            mine = self.pages[int(self.starts[row]) : int(self.starts[row + 1])].long()
            length = max(0, (len(mine) - 1) * block_tokens + int(self.last[row]))
            lengths.append(length)
            k, v = (x[mine].transpose(1, 2).reshape(-1, kv_heads, head_dim)[:length] for x in (keys, values))
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            weights = torch.softmax(torch.einsum("hd,chd->hc", one, k) / head_dim**0.5, dim=-1)
            out[row] = torch.einsum("hc,chd->hd", weights, v) if length else float("nan")
        assert self.planned is not None
        assert self.planned.tolist() == lengths, "the plan is of other contexts than those on the device"


def _fast_decode_plan(
    wrapper: TwinWrapper, starts: Tensor, pages: Tensor, last: Tensor, *sizes: int, **types: torch.dtype
) -> None:
    assert wrapper.full_plans, "a fast plan needs a whole one before it"
    wrapper._take(starts, last, sizes)


def twin_library() -> Any:
    """What `import flashinfer` would give."""
    return cast(
        Any,
        SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=TwinWrapper, fast_decode_plan=_fast_decode_plan),
    )
