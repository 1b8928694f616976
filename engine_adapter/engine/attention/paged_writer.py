"""Writing the KV of one pass into its pages: the half of a step that the GPU backends share."""

from torch import Tensor

from engine_adapter.engine.attention.device_batch import DeviceBatch
from engine_adapter.engine.attention.rope_write import rope_and_write, write

__all__ = ["PagedWriter"]


class PagedWriter:
    """Writes into a pool `[page, layer, K|V, kv_head, token, head_dim]` where a batch says."""

    def __init__(self, pool: Tensor, metadata: DeviceBatch) -> None:
        self._pool = pool
        self._metadata = metadata

    def rope_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        """Rotate `query` in place and write `key`, rotated, and `value`: see `rope_write.rope_and_write`."""
        m = self._metadata
        rope_and_write(
            query,
            key,
            value,
            cos,
            sin,
            self._pool[:, layer],
            m.block_tables,
            m.seq_of_row,
            m.positions,
            query_norm=query_norm,
            key_norm=key_norm,
            norm_eps=norm_eps,
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See StepAttention."""
        m = self._metadata
        write(key, value, self._pool[:, layer], m.block_tables, m.seq_of_row, m.positions)
