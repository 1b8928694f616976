"""The paged attention kernel: tiles of query rows against the pages of their sequence, split over keys or not.

One kernel serves decode (a tile is the query heads of one KV head), short chunks behind long prefixes and long
prefill (a tile is several tokens times those heads). It walks keys with a running softmax in base 2 as in
FlashAttention-2; keys are split as in Flash-Decoding and merged by a second kernel. Addresses within the pool are
64-bit: `page * page_stride` passes 2^31 elements.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as everywhere in Triton.

import math

import triton
import triton.language as tl
from torch import Tensor

from engine_adapter.engine.attention.work_plan import WorkPlan

__all__ = ["attend"]

# Rows and splits that a program of the merge takes at once. One sequence on an H200 took 5 µs more for each further 16
# splits: a few sequences have many splits, so those are merged by more programs in fewer steps.
_MERGE = (4, 16)
_MERGE_OF_FEW = (1, 64)
_FEW_SEQUENCES = 4


def attend(query: Tensor, pool_layer: Tensor, block_tables: Tensor, out: Tensor, plan: WorkPlan) -> None:
    """Attention of the sequences that `plan` takes, as planned by its last `update`.

    `query` and `out` `[num_rows, num_heads, head_dim]`, heads and dims dense; `pool_layer` `[page, K|V, kv_head,
    token, head_dim]`, pages dense inside; `block_tables` `[num_seqs, max_pages]` int32, the sequences of the update.
    Other rows of `out` are left alone. Allocates nothing and waits for nothing: may be captured in a graph.
    """
    _, _, kv_heads, block_tokens, head_dim = pool_layer.shape
    config = plan.config
    _attend_kernel[(kv_heads, plan.max_items)](
        query,
        out,
        plan.partial,
        plan.lse,
        pool_layer,
        block_tables,
        plan.items,
        query.stride(0),
        out.stride(0),
        block_tables.stride(0),
        pool_layer.stride(0),
        math.log2(math.e) / math.sqrt(head_dim),
        KV_HEADS=kv_heads,
        GROUP=plan.group,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        TILE_TOKENS=plan.tile_tokens,
        TILE_ROWS=config.tile_rows,
        TILE_KEYS=config.tile_keys,
        SPLITS=plan.splits,
        FIELDS=plan.items.shape[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if plan.splits:
        tile_rows = plan.tile_tokens * plan.group
        few = plan.tile_tokens == 1 and plan.max_sequences <= _FEW_SEQUENCES
        rows, splits = _MERGE_OF_FEW if few else _MERGE
        _merge_kernel[(kv_heads, plan.max_items, triton.cdiv(tile_rows, rows))](
            out,
            plan.partial,
            plan.lse,
            plan.items,
            out.stride(0),
            KV_HEADS=kv_heads,
            GROUP=plan.group,
            HEAD_DIM=head_dim,
            TILE_ROWS=tile_rows,
            ROWS=rows,
            SPLITS=splits,
            FIELDS=plan.items.shape[1],
            num_warps=4,
        )


@triton.jit
def _walk(
    query: tl.tensor,  # [TILE_ROWS, HEAD_DIM]
    mixed: tl.tensor,  # [TILE_ROWS, HEAD_DIM] float32, sum of values under weights relative to `top`
    total: tl.tensor,  # [TILE_ROWS] sum of those weights
    top: tl.tensor,  # [TILE_ROWS] largest score so far, base 2
    position: tl.tensor,  # [TILE_ROWS] last key that each row sees
    pool: tl.tensor,  # at the layer and the KV head's keys
    table: tl.tensor,  # the sequence's row of the block tables
    begin: tl.tensor,
    end: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add keys `[begin, end)`. Unmasked, every row sees all of them and their number is a multiple of TILE_KEYS."""
    keys = tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, HEAD_DIM)
    values = pool + KV_HEADS * BLOCK_TOKENS * HEAD_DIM
    last = tl.maximum(end - 1, 0)
    # Page numbers are read one tile ahead, so that the keys of the next tile do not wait for them.
    pages = tl.load(table + tl.minimum(begin + keys, last) // BLOCK_TOKENS)
    for start in tl.range(begin, end, TILE_KEYS):
        key = start + keys
        # A key beyond the end reads the last one again instead: a page's unwritten rest may hold NaN.
        offset = tl.minimum(key, last) % BLOCK_TOKENS if MASKED else key % BLOCK_TOKENS
        address = pages.to(tl.int64) * page_stride + offset * HEAD_DIM
        pages = tl.load(table + tl.minimum(key + TILE_KEYS, last) // BLOCK_TOKENS)
        k = tl.load(pool + address[:, None] + dims[None, :])
        # The precision is float32's alone: three TF32 products, where one would keep 10 bits of its 23.
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3")
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & (key[None, :] < end)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has seen nothing yet has no maximum to be relative to.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        v = tl.load(values + address[:, None] + dims[None, :])
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="tf32x3")
        top = new_top
    return mixed, total, top


@triton.jit
def _read_item(item: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Row and number of the item's tokens, position of the first, first key, end of keys: see `work_plan`."""
    row = tl.load(item + 1).to(tl.int64)
    return row, tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)


@triton.jit
def _store_part(
    partial: tl.tensor,
    lse: tl.tensor,
    slot: tl.tensor,
    mixed: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    is_row: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Keep what one split found; a row that saw none of its keys has weight 0 in the merge."""
    dims = tl.arange(0, HEAD_DIM)
    tl.store(partial + slot[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_row[:, None])
    weight = top + tl.log2(tl.maximum(total, 1e-30))
    tl.store(lse + slot, tl.where(total > 0, weight, float("-inf")), mask=is_row)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(
    query: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    items: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """One program: one item and one KV head. Up to the first token's position nothing is masked."""
    head = tl.program_id(0)
    item = tl.program_id(1)
    sequence = tl.load(items + item * FIELDS)
    first_row, num_tokens, first_position, begin, end = _read_item(items + item * FIELDS)
    if sequence < 0:  # after all loads, so that none waits for another
        return
    index = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    token = tl.minimum(index // GROUP, num_tokens - 1)  # what stands in no row repeats the last
    place = (head * GROUP + index % GROUP) * HEAD_DIM
    q = tl.load(query + ((first_row + token) * query_stride + place)[:, None] + dims[None, :])

    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = pool + head * (BLOCK_TOKENS * HEAD_DIM)
    mixed = tl.zeros([TILE_ROWS, HEAD_DIM], dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    masked_from = begin
    if TILE_TOKENS > 1:
        masked_from += tl.maximum(tl.minimum(end, first_position + 1) - begin, 0) // TILE_KEYS * TILE_KEYS
        mixed, total, top = _walk(
            q, mixed, total, top, first_position + token, keys, table, begin, masked_from, page_stride, scale,
            KV_HEADS, HEAD_DIM, BLOCK_TOKENS, TILE_KEYS, False,
        )  # fmt: skip
    mixed, total, top = _walk(
        q, mixed, total, top, first_position + token, keys, table, masked_from, end, page_stride, scale,
        KV_HEADS, HEAD_DIM, BLOCK_TOKENS, TILE_KEYS, True,
    )  # fmt: skip
    is_row = index < num_tokens * GROUP
    mixed = mixed / tl.maximum(total, 1e-30)[:, None]  # 0 where there was no key
    if SPLITS:
        tile = (item.to(tl.int64) * KV_HEADS + head) * (TILE_TOKENS * GROUP)
        _store_part(partial, lse, tile + index, mixed, total, top, is_row, HEAD_DIM)
    else:
        target = out + ((first_row + token) * out_stride + place)[:, None] + dims[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _merge_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    items: tl.tensor,
    out_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """One program: `ROWS` rows of one tile and one KV head, over the splits that follow the tile's first item."""
    head = tl.program_id(0)
    item = tl.program_id(1)
    sequence = tl.load(items + item * FIELDS)
    first_row, num_tokens, _, begin, _ = _read_item(items + item * FIELDS)
    num_splits = tl.load(items + item * FIELDS + 6)
    if (sequence < 0) | (begin > 0):  # begin > 0: not the first split
        return

    index = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    is_row = index < num_tokens * GROUP
    slot = (item.to(tl.int64) * KV_HEADS + head) * TILE_ROWS + index  # [ROWS], of the first split
    mixed = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        places = slot[None, :] + split[:, None] * (KV_HEADS * TILE_ROWS)  # [SPLITS, ROWS]
        there = (split < num_splits)[:, None] & is_row[None, :]
        scores = tl.load(lse + places, mask=there, other=float("-inf"))
        parts = tl.load(
            partial + places[:, :, None] * HEAD_DIM + dims[None, None, :], mask=there[:, :, None], other=0.0
        )
        new_top = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    safe = tl.where(total > 0, total, 1.0)
    mixed = mixed / safe[:, None]
    place = (head * GROUP + index % GROUP) * HEAD_DIM
    target = out + ((first_row + index // GROUP) * out_stride + place)[:, None] + dims[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=is_row[:, None])
