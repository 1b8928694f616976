"""Deterministic attention on a GPU: one kernel, one cut of the keys, whatever the pass holds.

A row's keys are never split, and they are walked from the first in tiles of one size, so its sums have one order
however its request was cut into passes, in prefill and decode alike; other rows of its tile do not mix, and masked
keys add exact zeros. The tiles of `engine.runner.TiledRunner` do the same for the products around it.
"""

from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.device_batch import to_device
from engine_adapter.engine.attention.tiled import GRID_TOKENS
from engine_adapter.engine.attention.triton_paged import TritonStep, check_pool
from engine_adapter.engine.attention.tuning import prefill_config
from engine_adapter.engine.attention.work_plan import ANY_ROWS, WorkPlan

__all__ = ["FixedTritonAttention"]


class FixedTritonAttention:
    """Backend over a pool `[page, layer, K|V, kv_head, token, head_dim]` on a GPU; each pass must be one tile."""

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        """ConfigError for a pool that the kernels do not take."""
        check_pool(pool, num_heads)
        self._pool = pool
        kv_heads, block_tokens, head_dim = pool.shape[3:]
        group = num_heads // kv_heads
        config = prefill_config(head_dim, group, block_tokens, pool.itemsize, GRID_TOKENS)
        self._plan = WorkPlan(
            config,
            pool,
            num_heads,
            max_sequences=GRID_TOKENS,
            max_row_tiles=GRID_TOKENS + GRID_TOKENS // (config.tile_rows // group),
            target=1,
            takes=ANY_ROWS,
        )

    def plan(self, batch: AttentionBatch) -> TritonStep:
        """Prepare one tile."""
        assert batch.num_rows == GRID_TOKENS, batch.num_rows
        metadata = to_device(batch, self._pool.device)
        self._plan.update(metadata.rows, metadata.context_lens)
        return TritonStep(self._pool, metadata, (self._plan,), has_padding=True)
