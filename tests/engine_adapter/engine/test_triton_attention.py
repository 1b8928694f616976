"""The Triton kernels under the interpreter: the cutting of work, rope fused with the write, and decode over statics."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBatch
from engine_adapter.engine.rope import rotate
from tests.engine_adapter.engine.interpreted import needs_interpreter
from tests.engine_adapter.engine.test_attention import naive

pytestmark = needs_interpreter

HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 6, 2, 16, 16


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_pool(pages: int) -> Tensor:
    return torch.full((pages, 2, 2, KV_HEADS, BLOCK_TOKENS, DIM), float("nan"))


@pytest.mark.parametrize("target", [1, 2, 7, 40])
@pytest.mark.parametrize("least", [1, 2])
def test_a_plan_covers_each_visible_key_of_each_row_once(target: int, least: int) -> None:
    from engine_adapter.engine.attention.tuning import KernelConfig
    from engine_adapter.engine.attention.work_plan import RowRange, WorkPlan

    config = KernelConfig(tile_rows=16, tile_keys=32, num_warps=1, num_stages=1, waves=1)
    rows = [[0, 1], [1, 1], [3, 20], [20, 21], [21, 60], [60, 65]]
    contexts = [500, 9, 17, 1, 333, 900]
    plan = WorkPlan(
        config,
        make_pool(1),
        HEADS,
        max_sequences=9,
        max_row_tiles=9 + 65 // 5,
        target=target,
        takes=RowRange(least=least, most=1000),
    )
    plan.update(ints(rows), ints(contexts))
    seen = {(s, r): [] for s, (start, end) in enumerate(rows) for r in range(start, end)}
    whole = 0
    for sequence, row, tokens, position, begin, end, splits, _ in plan.items.tolist():
        if sequence < 0:
            continue
        assert begin % config.tile_keys == 0
        assert splits == 1 or target > 1
        whole += 1
        for token in range(tokens):
            assert position + token == contexts[sequence] - (rows[sequence][1] - row - token)
            seen[sequence, row + token] += range(begin, min(end, position + token + 1))
    for (sequence, row), keys in seen.items():
        start, end = rows[sequence]
        taken = end - start >= least
        assert keys == (list(range(contexts[sequence] - (end - row - 1))) if taken else [])
    assert whole <= plan.max_items


def test_decode_over_static_tensors_takes_any_contexts_and_padding() -> None:
    from engine_adapter.engine.attention.triton_paged import decode, decode_plan

    generator = torch.Generator().manual_seed(2)
    pool = make_pool(16)
    tables = torch.randperm(16, generator=generator).int().view(4, 4)
    kv = torch.randn(4, 64, 2, KV_HEADS, DIM, generator=generator)
    plan = decode_plan(pool, HEADS, 4)
    for contexts in ([64, 1, 17, 40], [3, 0, 0, 64]):
        pool.fill_(float("nan"))
        for i, length in enumerate(contexts):
            for position in range(length):
                page = int(tables[i, position // BLOCK_TOKENS])
                pool[page, 1, :, :, position % BLOCK_TOKENS] = kv[i, position]
        query = torch.randn(4, HEADS, DIM, generator=generator)
        out = torch.full_like(query, float("nan"))
        plan.update(ints([0, 1, 2, 3, 4]), ints(contexts))
        decode(query, pool[:, 1], tables, out, plan)
        for i, length in enumerate(contexts):
            if length:
                key, value = kv[i, :length].unbind(1)
                torch.testing.assert_close(
                    out[i : i + 1], naive(query[i : i + 1], key, value), atol=1e-5, rtol=1e-5
                )
            else:
                assert (out[i] == 0).all()


@pytest.mark.parametrize("max_sequences", [1, 5], ids=["few", "many"])
def test_more_splits_than_a_step_of_the_merge_takes(max_sequences: int) -> None:
    from engine_adapter.engine.attention.triton_paged import decode, decode_plan
    from engine_adapter.engine.attention.tuning import KernelConfig

    tokens, pages = 1100, 69
    pool = make_pool(pages)
    kv = torch.randn(2, tokens, KV_HEADS, DIM, generator=torch.Generator().manual_seed(8))
    for position in range(tokens):
        pool[position // BLOCK_TOKENS, 1, :, :, position % BLOCK_TOKENS] = kv[:, position]
    config = KernelConfig(tile_rows=16, tile_keys=BLOCK_TOKENS, num_warps=1, num_stages=1, waves=20)
    plan = decode_plan(pool, HEADS, max_sequences, config)
    plan.update(ints([0, 1]), ints([tokens]))
    assert int((plan.items[:, 0] >= 0).sum()) == pages
    query = torch.randn(1, HEADS, DIM)
    out = torch.full_like(query, float("nan"))
    decode(query, pool[:, 1], torch.arange(pages, dtype=torch.int32)[None], out, plan)
    torch.testing.assert_close(out, naive(query, kv[0], kv[1]), atol=1e-5, rtol=1e-5)


def test_offsets_have_64_bits(tmp_path: Path) -> None:
    """Pages that lie 16 GiB into the pool, of which only those are ever touched: it is a sparse file."""
    from engine_adapter.engine.attention.triton_paged import TritonAttention

    page_elements = 2 << 20
    sparse = np.memmap(tmp_path / "pool", np.float32, "w+", shape=(2048, page_elements))
    elements = torch.from_numpy(sparse)
    payload = 2 * 2 * KV_HEADS * BLOCK_TOKENS * DIM
    pool = elements[:, :payload].view(len(elements), 2, 2, KV_HEADS, BLOCK_TOKENS, DIM)
    last = len(pool) - 1
    assert last * pool.stride(0) > 2**31
    batch = AttentionBatch(
        num_rows=21,
        block_tables=np.array([[last, last - 1], [last - 2, last - 3]], np.int32),
        rows=np.array([[0, 20], [20, 21]], np.int32),
        context_lens=np.array([20, 1], np.int32),
    )
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(21, HEADS, DIM, generator=generator)
    kv = torch.randn(2, 21, KV_HEADS, DIM, generator=generator)
    step = TritonAttention(pool, HEADS, max_rows=21, max_sequences=2).plan(batch)
    step.write(1, kv[0], kv[1])
    out = step.attend(1, query)
    assert torch.equal(pool[last, 1, 0, :, 3], kv[0, 3])
    assert torch.equal(pool[last - 2, 1, 1, :, 0], kv[1, 20])
    for rows in (slice(0, 20), slice(20, 21)):
        expected = naive(query[rows], kv[0, rows], kv[1, rows])
        torch.testing.assert_close(out[rows], expected, atol=1e-5, rtol=1e-5)


def test_a_rehearsal_runs_every_kernel_and_touches_no_page() -> None:
    from engine_adapter.engine.attention.triton_paged import TritonAttention

    pool = make_pool(4)
    step = TritonAttention(pool, HEADS, max_rows=300, max_sequences=3).rehearsal(7)
    assert len({(plan.config, plan.target) for plan in step._plans}) == 5
    query, kv = torch.randn(7, HEADS, DIM), torch.randn(2, 7, KV_HEADS, DIM)
    step.write(1, kv[0], kv[1])
    assert (step.attend(1, query) == 0).all()
    assert pool.isnan().all()


@pytest.mark.parametrize("norms", ["with norms", "without norms"])
def test_rope_and_write_rotates_and_fills_the_rows_pages(norms: str) -> None:
    from engine_adapter.engine.attention.triton_paged import rope_and_write

    generator = torch.Generator().manual_seed(3)
    pool, rows = make_pool(8), 5
    fused = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    query, key, value = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles = torch.rand(70, DIM // 2, generator=generator)
    weights = torch.rand(2, DIM, generator=generator)
    positions, sequences = [0, 63, 17, 5, 40], [1, 0, -1, 0, 1]
    tables = torch.randperm(8, generator=generator).int().view(2, 4)

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        if norms == "with norms":
            x = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6)
        at = angles[positions].unsqueeze(1)
        return rotate(x, at.cos(), at.sin())

    right_query, right_key, right_value = rotated(query, weights[0]), rotated(key, weights[1]), value.clone()
    named = {"query_norm": weights[0], "key_norm": weights[1]} if norms == "with norms" else {}
    rope_and_write(
        query, key, value, angles.cos(), angles.sin(), pool[:, 1], tables, ints(sequences), ints(positions), **named
    )  # fmt: skip
    torch.testing.assert_close(query, right_query)
    expected = make_pool(8)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        if sequence >= 0:
            page = int(tables[sequence, position // BLOCK_TOKENS])
            expected[page, 1, 0, :, position % BLOCK_TOKENS] = right_key[row]
            expected[page, 1, 1, :, position % BLOCK_TOKENS] = right_value[row]
    torch.testing.assert_close(pool, expected, equal_nan=True)


def test_a_pool_that_the_kernels_cannot_read_is_refused() -> None:
    from engine_adapter.engine.attention.triton_paged import check_pool
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match="power of two"):
        check_pool(torch.empty(1, 1, 2, 2, 16, 48), 4)
    with pytest.raises(ConfigError, match="share"):
        check_pool(make_pool(1), 5)
    with pytest.raises(ConfigError, match="dense"):
        check_pool(torch.empty(1, 1, 2, 2, DIM, 16).transpose(4, 5), 4)


def test_the_small_kernels_agree_with_torch() -> None:
    from engine_adapter.engine.kernels.activation import silu_mul
    from engine_adapter.engine.kernels.norm import add_rms_norm, rms_norm

    generator = torch.Generator().manual_seed(4)
    x, residual = torch.randn(2, 3, 48, generator=generator)
    weight = torch.rand(48, generator=generator)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (48,), weight, 1e-5)
    )
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (48,), weight, 1e-5))
    assert torch.equal(residual, total)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up)
