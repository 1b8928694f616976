"""Random paged KV on a GPU with everything unwritten poisoned, and what attention over it must give, in float32."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch

__all__ = ["Paged", "attention", "error", "make_batch", "make_paged"]

LAYER, LAYERS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """A pool whose sequence `i` holds `contexts[i]` tokens; NaN wherever none was written, the other layer too."""

    pool: Tensor
    tables: Tensor  # [num_seqs, max_pages] int32, on the device
    contexts: tuple[int, ...]

    def context(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[context, kv_heads, head_dim]` of one sequence."""
        block_tokens = self.pool.shape[4]
        length = self.contexts[index]
        pages = self.tables[index, : -(-length // block_tokens)].long()
        gathered = (
            self.pool[pages, LAYER].permute(1, 0, 3, 2, 4).flatten(1, 2)
        )  # [K|V, tokens, kv_heads, head_dim]
        return gathered[0, :length], gathered[1, :length]


def make_paged(
    contexts: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    seed: int,
    pages: Tensor | None = None,
    pool: Tensor | None = None,
) -> Paged:
    """Contexts in shuffled pages; `pages` names those to take, of `pool` where that is given."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    needed = [-(-length // block_tokens) for length in contexts]
    if pages is None:
        pages = torch.randperm(sum(needed) + 3, generator=generator, device=device)
    if pool is None:
        shape = (int(pages.max()) + 1, LAYERS, 2, kv_heads, block_tokens, head_dim)
        pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    # Whatever stands behind a sequence's pages in its table is the number of no page.
    tables = torch.full((len(contexts), max(needed)), 2**30, dtype=torch.int32, device=device)
    taken = 0
    for i, (length, count) in enumerate(zip(contexts, needed, strict=True)):
        mine = pages[taken : taken + count]
        taken += count
        tables[i, :count] = mine
        shape = (count, 2, kv_heads, block_tokens, head_dim)
        fresh = torch.randn(shape, generator=generator, device=device).to(dtype)
        rest = count * block_tokens - length
        if rest:
            fresh[-1, :, :, block_tokens - rest :] = float("nan")
        pool[mine, LAYER] = fresh
    return Paged(pool=pool, tables=tables, contexts=tuple(contexts))


def make_batch(paged: Paged, rows: list[tuple[int, int]], num_rows: int) -> AttentionBatch:
    """The contract's batch of all sequences of `paged`."""
    return AttentionBatch(
        num_rows=num_rows,
        block_tables=paged.tables.cpu().numpy(),
        rows=np.array(rows, np.int32),
        context_lens=np.array(paged.contexts, np.int32),
    )


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """float32 attention of `query` `[rows, heads, dim]`, the last rows of the context; one KV head at a time."""
    rows, context = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    first = context - rows
    hidden = torch.arange(context, device=query.device)[None] > torch.arange(
        first, context, device=query.device
    ).unsqueeze(1)
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    for head in range(key.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        scores = torch.einsum("rhd,cd->hrc", query[:, heads].float(), key[:, head].float())
        scores = (scores / query.shape[2] ** 0.5).masked_fill_(hidden, float("-inf"))
        out[:, heads] = torch.einsum("hrc,cd->rhd", torch.softmax(scores, -1), value[:, head].float())
    return out


def error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of what was expected; NaN where either has one."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())
