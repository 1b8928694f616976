"""What the attention kernels are tuned and measured on: shapes, paged KV in the block-major pool, timing, other ways.

Times are per layer, from a CUDA graph over several layers, so neither launches nor the L2 cache flatter them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.paged_kernel import attend
from engine_adapter.engine.attention.work_plan import WorkPlan

__all__ = ["CASES", "Case", "Rig", "Shape", "gather_sdpa", "graph_seconds", "relative_error"]

_ROUNDS = 5
_POOL_LAYERS = 32
_TIMED_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's attention."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pass: `sequences` of `context` tokens each, of which the last `rows` are computed in it."""

    name: str
    sequences: int
    context: int
    rows: int = 1

    def kv_bytes(self, shape: Shape) -> int:
        """KV that one layer must read at least."""
        return self.sequences * self.context * shape.kv_heads * shape.head_dim * 2 * 2

    def flops(self, shape: Shape) -> int:
        """Operations of one layer's two products, masked keys left out."""
        seen = self.rows * self.context - self.rows * (self.rows - 1) // 2
        return self.sequences * seen * shape.heads * shape.head_dim * 4


CASES = (
    Case(name="decode 32 x 4,096", sequences=32, context=4096),
    Case(name="decode 64 x 4,096", sequences=64, context=4096),
    Case(name="decode 1 x 32,768", sequences=1, context=32768),
    Case(name="decode 8 x 32,768", sequences=8, context=32768),
    Case(name="prefill 2,048 at 8,192", sequences=1, context=8192, rows=2048),
    Case(name="prefill 8,192", sequences=1, context=8192, rows=8192),
    Case(name="tail of 32 at 131,072", sequences=1, context=131072, rows=32),
)


class Rig:
    """Shuffled pages of one pool on the GPU, big enough for every case; queries and outputs of one case at a time."""

    def __init__(self, shape: Shape, block_tokens: int, most_tokens: int, generator: torch.Generator) -> None:
        self.shape = shape
        self.block_tokens = block_tokens
        pages = most_tokens // block_tokens
        self.pool = torch.empty(
            (pages, _POOL_LAYERS, 2, shape.kv_heads, block_tokens, shape.head_dim),
            dtype=torch.bfloat16,
            device="cuda",
        )
        for part in torch.split(self.pool, max(1, pages // 64)):
            part.normal_(generator=generator)
        self._order = torch.randperm(pages, generator=generator, device="cuda").int()
        self._generator = generator

    def set_case(self, case: Case) -> None:
        """Lay `case` out: block tables, rows, contexts, a query and its output."""
        width = case.context // self.block_tokens
        self.tables = self._order[: case.sequences * width].view(case.sequences, width)
        self.rows = torch.arange(
            0, (case.sequences + 1) * case.rows, case.rows, dtype=torch.int32, device="cuda"
        )
        self.contexts = torch.full((case.sequences,), case.context, dtype=torch.int32, device="cuda")
        size = (case.sequences * case.rows, self.shape.heads, self.shape.head_dim)
        self.query = torch.randn(size, generator=self._generator, device="cuda").bfloat16()
        self.out = torch.empty_like(self.query)

    def batch(self, case: Case) -> AttentionBatch:
        """The case in the contract's form."""
        starts = self.rows.cpu().numpy()
        return AttentionBatch(
            num_rows=len(self.query),
            block_tables=self.tables.cpu().numpy(),
            rows=np.stack((starts[:-1], starts[1:]), axis=1),
            context_lens=np.full(case.sequences, case.context, np.int32),
        )

    def layer_numbers(self) -> Sequence[int]:
        """The layers that are timed, spread over a page."""
        return range(0, _POOL_LAYERS, _POOL_LAYERS // _TIMED_LAYERS)

    def attend(self, plan: WorkPlan, layer: int) -> None:
        """Our kernel on one layer."""
        attend(self.query, self.pool[:, layer], self.tables, self.out, plan)


def graph_seconds(layers: Sequence[int], call: Callable[[int], object]) -> float:
    """Fastest of a few replays of `call` over all layers, by layer."""
    call(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(layer)
    graph.replay()
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(layers))
    graph.reset()
    gc.collect()
    return float(min(times))


def gather_sdpa(rig: Rig, case: Case, layer: int) -> Tensor:
    """Gather a layer's pages and call torch's fused attention: what one gets without a paged kernel."""
    shape = rig.shape
    gathered = rig.pool[:, layer].index_select(0, rig.tables.flatten())
    paged = gathered.view(case.sequences, -1, 2, shape.kv_heads, rig.block_tokens, shape.head_dim)
    dense = paged.permute(2, 0, 3, 1, 4, 5).reshape(
        2, case.sequences, shape.kv_heads, case.context, shape.head_dim
    )
    query = rig.query.view(case.sequences, case.rows, shape.heads, shape.head_dim).transpose(1, 2)
    mask = None
    if case.rows > 1:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(case.rows, case.context)
    mixed = functional.scaled_dot_product_attention(
        query, dense[0], dense[1], attn_mask=mask, enable_gqa=True
    )
    return mixed.transpose(1, 2).reshape(rig.query.shape)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of what was expected."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())
