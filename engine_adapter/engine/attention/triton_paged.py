"""Paged attention by our own Triton kernels: the default backend on a GPU.

Two ways in. `TritonAttention` serves the contract of `attention.base` from host arrays. `rope_and_write`, `decode` and
`prefill` work on device tensors alone, for passes that are captured in a graph: make the plans once, `update` them as
the pass's first kernels, and every layer's calls read them. All calls queue on the current stream of the pool's device,
which must be the current device, and wait for nothing.

Tensors: a layer of the pool is `pool[:, layer]`, `[page, K|V, kv_head, token, head_dim]` with dense pages any stride
apart; head_dim is a power of two, at least 16. Block tables, rows and context lengths are int32.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.device_batch import DeviceBatch, idle_batch, to_device
from engine_adapter.engine.attention.paged_kernel import attend
from engine_adapter.engine.attention.paged_writer import PagedWriter
from engine_adapter.engine.attention.rope_write import rope_and_write
from engine_adapter.engine.attention.tuning import KernelConfig, decode_config, prefill_config
from engine_adapter.engine.attention.work_plan import ANY_ROWS, MANY_ROWS, ONE_ROW, RowRange, WorkPlan
from kvstore.errors import ConfigError

__all__ = [
    "TritonAttention",
    "TritonStep",
    "check_pool",
    "decode",
    "decode_plan",
    "prefill",
    "prefill_plan",
    "rope_and_write",
]


def check_pool(pool: Tensor, num_heads: int) -> None:
    """ConfigError when the kernels cannot work on `pool` `[page, layer, K|V, kv_head, token, head_dim]`."""
    kv_heads, block_tokens, head_dim = pool.shape[3:]
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ConfigError(f"triton attention needs a power of two, at least 16, as head_dim, not {head_dim}")
    if num_heads % kv_heads or num_heads // kv_heads > 128:
        raise ConfigError(f"triton attention cannot share {kv_heads} KV heads among {num_heads} query heads")
    dense = (kv_heads * block_tokens * head_dim, block_tokens * head_dim, head_dim, 1)
    if pool.stride()[2:] != dense:
        raise ConfigError("triton attention needs dense pages")


def decode_plan(
    pool: Tensor, num_heads: int, max_sequences: int, config: KernelConfig | None = None
) -> WorkPlan:
    """A plan for the sequences that have one row in the pass; their keys are split to fill the device.

    One plan serves passes of fewer sequences too, at the price of some programs that end at once.
    """
    kv_heads, block_tokens, head_dim = pool.shape[3:]
    group = num_heads // kv_heads
    config = config or decode_config(head_dim, group, block_tokens, pool.itemsize, max_sequences)
    return WorkPlan(
        config,
        pool,
        num_heads,
        max_sequences=max_sequences,
        max_row_tiles=max_sequences,
        target=_target(config, pool),
        takes=ONE_ROW,
    )


def prefill_plan(
    pool: Tensor,
    num_heads: int,
    max_sequences: int,
    max_rows: int,
    takes: RowRange = ANY_ROWS,
    config: KernelConfig | None = None,
) -> WorkPlan:
    """A plan for chunks of any lengths, up to `max_rows` rows in all. Keys are split when that fills the device better.

    `config` may be for shorter or longer chunks: see `tuning.prefill_config`.
    """
    kv_heads, block_tokens, head_dim = pool.shape[3:]
    group = num_heads // kv_heads
    config = config or prefill_config(head_dim, group, block_tokens, pool.itemsize, max_rows)
    row_tiles = max_sequences + max_rows // (config.tile_rows // group)
    crowded = row_tiles * kv_heads >= _multiprocessors(pool)
    return WorkPlan(
        config,
        pool,
        num_heads,
        max_sequences=max_sequences,
        max_row_tiles=row_tiles,
        target=1 if crowded else _target(config, pool),
        takes=takes,
    )


def decode(
    query: Tensor,
    pool_layer: Tensor,
    block_tables: Tensor,
    out: Tensor,
    plan: WorkPlan,
) -> None:
    """`attend` of one row a sequence, by a `decode_plan` updated with the rows and contexts of this pass.

    A context counts the row's own token. One of 0 is a padding row: its output is 0. In a batch of decodes alone, the
    rows are `arange(num_seqs + 1)`.
    """
    attend(query, pool_layer, block_tables, out, plan)


def prefill(
    query: Tensor,
    pool_layer: Tensor,
    block_tables: Tensor,
    out: Tensor,
    plan: WorkPlan,
) -> None:
    """`attend` of chunks that are the last tokens of their contexts, by a `prefill_plan` updated with this pass."""
    attend(query, pool_layer, block_tables, out, plan)


def _multiprocessors(pool: Tensor) -> int:
    if pool.is_cuda:
        return int(torch.cuda.get_device_properties(pool.device).multi_processor_count)
    return 8  # the interpreter


def _target(config: KernelConfig, pool: Tensor) -> int:
    return max(2, config.waves * _multiprocessors(pool) // pool.shape[3])


class TritonAttention:
    """Backend over a pool `[page, layer, K|V, kv_head, token, head_dim]`, on a GPU (or under Triton's interpreter).

    Sequences of one row are decoded with split keys; the others go through one launch of tiles, short chunks behind
    long contexts with split keys too.
    """

    def __init__(self, pool: Tensor, num_heads: int, *, max_rows: int, max_sequences: int) -> None:
        """For passes of up to `max_rows` rows and `max_sequences` sequences. ConfigError: see `check_pool`."""
        check_pool(pool, num_heads)
        self._pool = pool
        self._num_heads = num_heads
        self._max_rows = max_rows
        self._max_sequences = max_sequences
        self._decode = decode_plan(pool, num_heads, max_sequences)
        self._prefill: dict[tuple[KernelConfig, int], WorkPlan] = {}
        # So many tiles of rows, one program for each KV head, fill the device.
        self._room = max(1, _multiprocessors(pool) // pool.shape[3])

    def plan(self, batch: AttentionBatch) -> "TritonStep":
        """Copy the batch to the device and cut it into work."""
        counts = batch.rows[:, 1] - batch.rows[:, 0]
        metadata = to_device(batch, self._pool.device)
        plans = []
        if (counts == 1).any():
            plans.append(self._decode)
        if (counts > 1).any():
            plans.append(self._plan_for(counts[counts > 1]))
        for plan in plans:
            plan.update(metadata.rows, metadata.context_lens)
        return TritonStep(self._pool, metadata, tuple(plans), int(counts.sum()) < batch.num_rows)

    def rehearsal(self, num_rows: int) -> "TritonStep":
        """A pass of `num_rows` padding rows through every kernel that a pass may need, so that none compiles later."""
        kv_heads, block_tokens, head_dim = self._pool.shape[3:]
        group, itemsize = self._num_heads // kv_heads, self._pool.itemsize
        metadata = to_device(idle_batch(num_rows), self._pool.device)
        plans = [self._decode]
        for num_tokens in (2, self._max_rows):
            config = prefill_config(head_dim, group, block_tokens, itemsize, num_tokens)
            plans += [self._prefill_plan(config, target) for target in (1, _target(config, self._pool))]
        for plan in plans:
            plan.update(metadata.rows, metadata.context_lens)
        return TritonStep(self._pool, metadata, tuple(plans), has_padding=True)

    def _plan_for(self, counts: NDArray[np.int32]) -> WorkPlan:
        """The plan that suits chunks of so many rows: keys are split where the tiles alone leave processors idle."""
        kv_heads, block_tokens, head_dim = self._pool.shape[3:]
        group = self._num_heads // kv_heads
        config = prefill_config(head_dim, group, block_tokens, self._pool.itemsize, int(counts.max()))
        row_tiles = int((-(-counts // (config.tile_rows // group))).sum())
        target = _target(config, self._pool) if row_tiles < self._room else 1
        return self._prefill_plan(config, target)

    def _prefill_plan(self, config: KernelConfig, target: int) -> WorkPlan:
        """Made at its first use."""
        tile_tokens = config.tile_rows * self._pool.shape[3] // self._num_heads
        whole = self._max_sequences + self._max_rows // tile_tokens
        if (config, target) not in self._prefill:
            self._prefill[config, target] = WorkPlan(
                config,
                self._pool,
                self._num_heads,
                max_sequences=self._max_sequences,
                max_row_tiles=whole if target == 1 else self._room,
                target=target,
                takes=MANY_ROWS,
            )
        return self._prefill[config, target]


class TritonStep(PagedWriter):
    """Attention of one pass, its writing included."""

    def __init__(
        self, pool: Tensor, metadata: DeviceBatch, plans: tuple[WorkPlan, ...], has_padding: bool
    ) -> None:
        super().__init__(pool, metadata)
        self._plans = plans
        self._new_out = torch.zeros_like if has_padding else torch.empty_like

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See StepAttention."""
        out: Tensor = self._new_out(query, memory_format=torch.contiguous_format)
        for plan in self._plans:
            attend(query, self._pool[:, layer], self._metadata.block_tables, out, plan)
        return out
