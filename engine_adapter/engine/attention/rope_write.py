"""Rotates queries and keys, and writes keys and values into their pages, in one kernel.

Rotation and the optional norm of each head are computed in float32, whatever the tensors' type.
"""

# ruff: noqa: N803, N806 - constants of a kernel are in capitals, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rope_and_write", "write"]


def rope_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool_layer: Tensor,
    block_tables: Tensor,
    seq_of_row: Tensor,
    positions: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> None:
    """Rotate `query` in place; write `key`, rotated, and `value` as they belong to positions of sequences.

    `query` `[rows, num_heads, head_dim]`, `key` and `value` `[rows, kv_heads, head_dim]`: views of one fused product
    will do, heads and dims dense. `cos`, `sin` `[max_tokens, head_dim / 2]`. `seq_of_row`, `positions` `[rows]`, int32
    or int64; a negative sequence writes nothing (its position must still be one of the table). `query_norm` and
    `key_norm` `[head_dim]`: RMSNorm of each head before the rotation (Qwen3); both or none.
    """
    _, _, kv_heads, block_tokens, head_dim = pool_layer.shape
    group = query.shape[1] // kv_heads
    _rope_write_kernel[(query.shape[0], kv_heads)](
        query,
        key,
        value,
        cos,
        sin,
        pool_layer,
        block_tables,
        seq_of_row,
        positions,
        cos if query_norm is None else query_norm,
        cos if key_norm is None else key_norm,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        block_tables.stride(0),
        pool_layer.stride(0),
        norm_eps,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        HALF=head_dim // 2,
        BLOCK_TOKENS=block_tokens,
        NORMS=query_norm is not None,
        num_warps=4,
    )


def write(
    key: Tensor,
    value: Tensor,
    pool_layer: Tensor,
    block_tables: Tensor,
    seq_of_row: Tensor,
    positions: Tensor,
) -> None:
    """Write `key` and `value` `[rows, kv_heads, head_dim]` as they are; the rest as for `rope_and_write`."""
    _, _, kv_heads, block_tokens, head_dim = pool_layer.shape
    _write_kernel[(key.shape[0], kv_heads)](
        key,
        value,
        pool_layer,
        block_tables,
        seq_of_row,
        positions,
        key.stride(0),
        value.stride(0),
        block_tables.stride(0),
        pool_layer.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        num_warps=1,
    )


@triton.jit
def _page_place(
    table: tl.tensor,
    position: tl.tensor,
    head: tl.tensor,
    page_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> tl.tensor:
    """Element of the layer's pool where a head's key of `position` begins; 64-bit."""
    page = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)
    return page * page_stride + (head * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_DIM


@triton.jit
def _norm_heads(
    first: tl.tensor,  # [heads, HALF]
    second: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    half = tl.arange(0, HALF)
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    factor = tl.rsqrt(mean + eps)[:, None]
    first = first * factor * tl.load(weight + half).to(tl.float32)[None, :]
    second = second * factor * tl.load(weight + HALF + half).to(tl.float32)[None, :]
    return first, second


@triton.jit(do_not_specialize=["table_stride"])
def _rope_write_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    seq_of_row: tl.tensor,
    positions: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    norm_eps: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """One program: one row, one KV head and the query heads that share it. Loads come first."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HEAD_DIM: tl.constexpr = 2 * HALF
    half = tl.arange(0, HALF)
    dims = tl.arange(0, HEAD_DIM)
    position = tl.load(positions + row)
    sequence = tl.load(seq_of_row + row)
    one = key + row * key_stride + head * HEAD_DIM + half[None, :]
    low = tl.load(one).to(tl.float32)
    high = tl.load(one + HALF).to(tl.float32)
    stored = pool.dtype.element_ty
    v = tl.load(value + row * value_stride + head * HEAD_DIM + dims).to(stored)
    c = tl.load(cos + position.to(tl.int64) * HALF + half).to(tl.float32)
    s = tl.load(sin + position.to(tl.int64) * HALF + half).to(tl.float32)
    member = tl.arange(0, GROUP_PADDED)
    at = query + row * query_stride + (head * GROUP + member[:, None]) * HEAD_DIM + half[None, :]
    inside = (member < GROUP)[:, None]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        first, second = _norm_heads(first, second, query_norm, norm_eps, HALF)
    dtype = query.dtype.element_ty
    tl.store(at, (first * c[None, :] - second * s[None, :]).to(dtype), mask=inside)
    tl.store(at + HALF, (second * c[None, :] + first * s[None, :]).to(dtype), mask=inside)
    if sequence < 0:
        return
    if NORMS:
        low, high = _norm_heads(low, high, key_norm, norm_eps, HALF)
    table = block_tables + sequence.to(tl.int64) * table_stride
    target = pool + _page_place(table, position, head, page_stride, HEAD_DIM, BLOCK_TOKENS)
    tl.store(target + half[None, :], (low * c[None, :] - high * s[None, :]).to(stored))
    tl.store(target + HALF + half[None, :], (high * c[None, :] + low * s[None, :]).to(stored))
    tl.store(target + KV_HEADS * BLOCK_TOKENS * HEAD_DIM + dims, v)


@triton.jit(do_not_specialize=["table_stride"])
def _write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    seq_of_row: tl.tensor,
    positions: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """One program: one row and one KV head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence = tl.load(seq_of_row + row)
    if sequence < 0:
        return
    dims = tl.arange(0, HEAD_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride
    target = pool + _page_place(table, tl.load(positions + row), head, page_stride, HEAD_DIM, BLOCK_TOKENS)
    dtype = pool.dtype.element_ty
    k = tl.load(key + row * key_stride + head * HEAD_DIM + dims)
    v = tl.load(value + row * value_stride + head * HEAD_DIM + dims)
    tl.store(target + dims, k.to(dtype))
    tl.store(target + KV_HEADS * BLOCK_TOKENS * HEAD_DIM + dims, v.to(dtype))
