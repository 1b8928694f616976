"""Deterministic attention: a row's result has the same bits however its request was cut into passes.

A pass is a tile of `GRID_TOKENS` rows in which a token at position `p` stands in row `p % GRID_TOKENS`. Rows attend in
groups of `GROUP_ROWS`, each one call whose shapes depend on `p` alone: `GROUP_ROWS` queries (whatever stands in the
other rows) against the context padded with zeros up to the grid. Equal shapes take equal paths through the kernels,
other rows do not mix, and masked columns add exact zeros. So prefill in one go, behind any cached prefix, and decode
all agree bitwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.attention.gather import PageWriter, Scratch
from kvstore.errors import ConfigError

__all__ = ["GRID_TOKENS", "TiledAttention"]

GRID_TOKENS = 64
GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows `[start, end)` of one sequence within the group of `GROUP_ROWS` rows that begins at `base`."""

    base: int
    start: int
    end: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Sequence:
    pages: Tensor
    context_len: int
    padded_len: int
    groups: tuple[_Group, ...]


class TiledAttention:
    """Backend over a pool `[page, layer, K|V, kv_head, token, head_dim]`; each pass must be one tile."""

    def __init__(self, pool: Tensor) -> None:
        """ConfigError when pages and grid do not nest: a padded context must be whole pages at any position."""
        block_tokens = pool.shape[4]
        if max(block_tokens, GRID_TOKENS) % min(block_tokens, GRID_TOKENS):
            raise ConfigError(
                f"deterministic mode needs block_tokens that divide or are a multiple of {GRID_TOKENS}"
            )
        self._pool = pool
        self._pad_tokens = max(block_tokens, GRID_TOKENS)
        self._scratch = Scratch(pool)

    def plan(self, batch: AttentionBatch) -> "_TiledStep":
        """Prepare one tile."""
        assert batch.num_rows == GRID_TOKENS, batch.num_rows
        return _TiledStep(self._pool, self._scratch, self._pad_tokens, batch)


class _TiledStep:
    def __init__(self, pool: Tensor, scratch: Scratch, pad_tokens: int, batch: AttentionBatch) -> None:
        self._writer = PageWriter(pool, batch)
        self._scratch = scratch
        block_tokens = pool.shape[4]
        tables = torch.from_numpy(batch.block_tables).long().to(pool.device)
        self._sequences = []
        for i, (start, end) in enumerate(batch.rows.tolist()):
            context_len = int(batch.context_lens[i])
            assert context_len % GRID_TOKENS == end % GRID_TOKENS, "a row stands at its position on the grid"
            padded_len = -(-context_len // pad_tokens) * pad_tokens
            first = context_len - end  # the position of row 0
            groups = tuple(
                _Group(
                    base,
                    max(base, start),
                    min(base + GROUP_ROWS, end),
                    _mask(first + base, padded_len, pool),
                )
                for base in range(start // GROUP_ROWS * GROUP_ROWS, end, GROUP_ROWS)
            )
            pages = tables[i, : -(-context_len // block_tokens)]
            self._sequences.append(_Sequence(pages, context_len, padded_len, groups))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._writer.write(layer, key, value)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        mixed = torch.zeros_like(query)
        for sequence in self._sequences:
            gathered = self._scratch.gather(layer, sequence.pages, sequence.context_len, sequence.padded_len)
            key, value = gathered.unsqueeze(1)
            for group in sequence.groups:
                rows = query[group.base : group.base + GROUP_ROWS].transpose(0, 1).unsqueeze(0)
                result = functional.scaled_dot_product_attention(
                    rows, key, value, attn_mask=group.mask, enable_gqa=True
                )
                mixed[group.start : group.end] = result[0].transpose(0, 1)[
                    group.start - group.base : group.end - group.base
                ]
        return mixed


def _mask(first_position: int, padded_len: int, like: Tensor) -> Tensor:
    """Additive mask `[GROUP_ROWS, padded_len]` for rows from `first_position` on."""
    mask = torch.full((GROUP_ROWS, padded_len), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(diagonal=first_position + 1)
