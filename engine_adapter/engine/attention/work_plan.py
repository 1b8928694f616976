"""Cuts a pass of attention into work items on the device: which rows of which sequence meet which keys.

One small kernel a pass fills static buffers that the attention kernels of all layers read. Its inputs are device
tensors and its grid depends on maxima alone, so a captured graph serves any contexts: the length of a split follows
from the work there is. An item is a tile of one sequence's rows and a range of its keys, for every KV head.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as everywhere in Triton.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_adapter.engine.attention.tuning import KernelConfig

__all__ = ["ANY_ROWS", "MANY_ROWS", "ONE_ROW", "RowRange", "WorkPlan"]

_LANES = 4096  # items times sequences that a program compares at once
# Of an item, int32: sequence or -1, row of its first token, number of tokens, position of the first, first key, end of
# keys, number of splits of its keys, one to align.
_FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Which sequences a plan takes: those of `least` to `most` rows in the pass."""

    least: int
    most: int


ONE_ROW = RowRange(least=1, most=1)
MANY_ROWS = RowRange(least=2, most=2**30)
ANY_ROWS = RowRange(least=1, most=2**30)


class WorkPlan:
    """Static buffers for up to `max_sequences` sequences and `max_row_tiles` tiles of rows; allocated once.

    `target` is how many items the splitting aims at; with 1, keys are never split. Partial results of split keys are
    kept in `partial` `[max_items, kv_heads, tile_tokens * group, head_dim]` and `lse` (base 2), both float32; without
    splitting they are empty and the attention kernel writes its output itself.
    """

    def __init__(
        self,
        config: KernelConfig,
        pool: Tensor,
        num_heads: int,
        *,
        max_sequences: int,
        max_row_tiles: int,
        target: int,
        takes: RowRange,
    ) -> None:
        kv_heads, head_dim = pool.shape[3], pool.shape[5]
        self.config = config
        self.takes = takes
        self.group = num_heads // kv_heads
        self.tile_tokens = 1 if takes.most == 1 else config.tile_rows // self.group
        self.target = target
        self.max_sequences = max_sequences
        self.max_items = max_row_tiles + (target if target > 1 else 0)
        self.items = torch.full((self.max_items, _FIELDS), -1, dtype=torch.int32, device=pool.device)
        slots = self.max_items if target > 1 else 0
        shape = (slots, kv_heads, self.tile_tokens * self.group)
        self.partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=pool.device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=pool.device)

    @property
    def splits(self) -> bool:
        """Whether keys may be split, and results merged afterwards."""
        return self.target > 1

    def update(self, rows: Tensor, context_lens: Tensor) -> None:
        """Plan a pass: `context_lens` `[num_seqs]` int32, on the device, and the rows of each sequence.

        `rows` int32 are `[num_seqs, 2]`, half-open ranges, or `[num_seqs + 1]`, where each ends where the next begins.
        A sequence that this plan does not take costs nothing. One row with a context of 0 is a padding row: it gets
        an item without keys, whose result is 0. Only when no attention of the plan's last pass is still to be queued.
        """
        num_sequences = context_lens.shape[0]
        assert num_sequences <= self.max_sequences, (num_sequences, self.max_sequences)
        sequences = max(16, triton.next_power_of_2(self.max_sequences))
        items_a_program = max(1, min(32, _LANES // sequences))
        _plan_kernel[(triton.cdiv(self.max_items, items_a_program),)](
            rows,
            context_lens,
            self.items,
            num_sequences,
            self.max_items,
            self.target,
            LEAST=self.takes.least,
            MOST=self.takes.most,
            TILE_TOKENS=self.tile_tokens,
            TILE_KEYS=self.config.tile_keys,
            ROWS_STRIDE=rows.stride(0),
            SEQUENCES=sequences,
            ITEMS=items_a_program,
            FIELDS=_FIELDS,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_sequences", "max_items", "target"])
def _plan_kernel(
    rows: tl.tensor,
    context_lens: tl.tensor,  # [num_sequences]
    items: tl.tensor,
    num_sequences: tl.tensor,
    max_items: tl.tensor,
    target: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Each program repeats the sums over all sequences and writes `ITEMS` items."""
    sequences = tl.arange(0, SEQUENCES)
    inside = sequences < num_sequences
    start = tl.load(rows + ROWS_STRIDE * sequences, mask=inside, other=0)
    count = tl.load(rows + ROWS_STRIDE * sequences + 1, mask=inside, other=0) - start
    count = tl.where((count >= LEAST) & (count <= MOST), count, 0)
    context = tl.load(context_lens + sequences, mask=inside, other=0)
    row_tiles = (count + TILE_TOKENS - 1) // TILE_TOKENS
    key_tiles = (context + TILE_KEYS - 1) // TILE_KEYS
    work = tl.sum(row_tiles * key_tiles, 0)
    tiles_a_split = tl.maximum((work + target - 1) // target, 1)
    splits = tl.maximum((key_tiles + tiles_a_split - 1) // tiles_a_split, 1)
    ends = tl.cumsum(row_tiles * splits, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owner = tl.sum((ends[None, :] <= item[:, None]).to(tl.int32), 1)
    is_owner = sequences[None, :] == owner[:, None]
    my_rows = tl.sum(tl.where(is_owner, count[None, :], 0), 1)
    my_context = tl.sum(tl.where(is_owner, context[None, :], 0), 1)
    my_key_tiles = tl.sum(tl.where(is_owner, key_tiles[None, :], 0), 1)
    my_splits = tl.maximum(tl.sum(tl.where(is_owner, splits[None, :], 0), 1), 1)
    my_first = tl.sum(tl.where(is_owner, (ends - row_tiles * splits)[None, :], 0), 1)
    my_row_tiles = tl.sum(tl.where(is_owner, row_tiles[None, :], 0), 1)

    my_start = tl.sum(tl.where(is_owner, start[None, :], 0), 1)

    # The last rows see the most keys, so they come first.
    first = (my_row_tiles - 1 - (item - my_first) // my_splits) * TILE_TOKENS
    tokens = tl.minimum(my_rows - first, TILE_TOKENS)
    position = my_context - my_rows + first
    split = (item - my_first) % my_splits
    begin = split * my_key_tiles // my_splits * TILE_KEYS
    end = tl.minimum((split + 1) * my_key_tiles // my_splits * TILE_KEYS, position + tokens)

    fits = item < max_items
    at = items + item * FIELDS
    tl.store(at, tl.where(owner < num_sequences, owner, -1), mask=fits)
    tl.store(at + 1, my_start + first, mask=fits)
    tl.store(at + 2, tokens, mask=fits)
    tl.store(at + 3, position, mask=fits)
    tl.store(at + 4, begin, mask=fits)
    tl.store(at + 5, end, mask=fits)
    tl.store(at + 6, my_splits, mask=fits)
