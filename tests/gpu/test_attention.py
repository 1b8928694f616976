"""Attention on a GPU, our Triton kernels above all, against float32 attention written out."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import Tensor  # noqa: E402

from engine_adapter.engine.attention.base import AttentionBackend  # noqa: E402
from engine_adapter.engine.attention.tiled import GRID_TOKENS  # noqa: E402
from engine_adapter.engine.attention.triton_fixed import FixedTritonAttention  # noqa: E402
from engine_adapter.engine.attention.triton_paged import (  # noqa: E402
    TritonAttention,
    decode,
    decode_plan,
    prefill,
    prefill_plan,
    rope_and_write,
)
from engine_adapter.engine.rope import rotate  # noqa: E402
from tests.gpu.paged import LAYER, Paged, attention, error, make_batch, make_paged  # noqa: E402

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF16: 1e-2, FP16: 2e-3, FP32: 3e-5}


def poisoned(query: Tensor) -> Tensor:
    return torch.full_like(query, float("nan"))


def random_query(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The query part of a fused product: rows lie further apart than their heads are wide."""
    generator = torch.Generator("cuda").manual_seed(seed + 1000)
    wide = torch.randn(rows, heads + 2, dim, generator=generator, device="cuda").to(dtype)
    return wide[:, :heads]


def run_decode(paged: Paged, query: Tensor, spare: int = 5) -> Tensor:
    """By a plan for `spare` sequences more: up to four have settings and a merge of their own."""
    count = len(paged.contexts)
    plan = decode_plan(paged.pool, query.shape[1], count + spare)
    rows = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    contexts = torch.tensor(paged.contexts, dtype=torch.int32, device="cuda")
    out = poisoned(query)
    plan.update(rows, contexts)
    decode(query, paged.pool[:, LAYER], paged.tables, out, plan)
    return out


def assert_decoded(out: Tensor, paged: Paged, query: Tensor) -> None:
    limit = LIMIT[query.dtype]
    for i in range(len(paged.contexts)):
        expected = attention(query[i : i + 1], *paged.context(i))
        assert error(out[i : i + 1], expected) < limit, (i, paged.contexts[i])


@pytest.mark.parametrize(
    "block_tokens, head_dim, group",
    [
        (16, 64, 1), (32, 64, 3), (64, 64, 8), (32, 64, 4),
        (16, 128, 4), (32, 128, 8), (64, 128, 1), (16, 128, 3),
    ],
)  # fmt: skip
def test_decode(block_tokens: int, head_dim: int, group: int) -> None:
    seed = block_tokens * 1000 + head_dim + group
    generator = torch.Generator().manual_seed(seed)
    contexts = [1, 2, 15, 16, 17, 63, 64, 65, *torch.randint(1, 3000, (9,), generator=generator).tolist()]
    paged = make_paged(
        contexts, kv_heads=2, head_dim=head_dim, block_tokens=block_tokens, dtype=BF16, seed=seed
    )
    query = random_query(len(contexts), 2 * group, head_dim, BF16, seed)
    assert_decoded(run_decode(paged, query), paged, query)
    assert paged.pool[:, 1 - LAYER].isnan().all()


@pytest.mark.parametrize(
    "contexts",
    [[32768], [1], [32767, 5], [4096] * 32, [4000 + i for i in range(64)], [32768, *[100] * 20]],
    ids=["1x32k", "1x1", "32k+5", "32x4k", "64x4k", "32k+20x100"],
)
@pytest.mark.parametrize("spare", [0, 5])
def test_decode_of_the_8b_shape(contexts: list[int], spare: int) -> None:
    paged = make_paged(contexts, kv_heads=8, head_dim=128, block_tokens=32, dtype=BF16, seed=len(contexts))
    query = random_query(len(contexts), 32, 128, BF16, len(contexts))
    assert_decoded(run_decode(paged, query, spare), paged, query)


@pytest.mark.parametrize("block_tokens", [128, 1024])
def test_decode_with_tiles_that_are_part_of_a_page(block_tokens: int) -> None:
    contexts = [1, 127, 128, 129, 1023, 1024, 1025, 2500]
    paged = make_paged(contexts, kv_heads=4, head_dim=64, block_tokens=block_tokens, dtype=BF16, seed=3)
    query = random_query(len(contexts), 8, 64, BF16, 3)
    assert_decoded(run_decode(paged, query), paged, query)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_other_types(dtype: torch.dtype) -> None:
    paged = make_paged([700, 1, 33], kv_heads=2, head_dim=128, block_tokens=16, dtype=dtype, seed=4)
    query = random_query(3, 8, 128, dtype, 4)
    assert_decoded(run_decode(paged, query), paged, query)
    check_step(paged, [(0, 300), (300, 301), (301, 310)], 310, heads=8, seed=5)


def test_decode_in_a_graph_follows_the_contexts() -> None:
    """One graph of eight rows, replayed for other contexts, other tables and fewer sequences."""
    first = make_paged([3000] * 8, kv_heads=8, head_dim=128, block_tokens=32, dtype=BF16, seed=6)
    query = random_query(8, 32, 128, BF16, 6)
    plan = decode_plan(first.pool, 32, 8)
    rows = torch.arange(9, dtype=torch.int32, device="cuda")
    contexts = torch.tensor(first.contexts, dtype=torch.int32, device="cuda")
    tables, out = first.tables.clone(), poisoned(query)

    def launch() -> None:
        plan.update(rows, contexts)
        decode(query, first.pool[:, LAYER], tables, out, plan)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    order = torch.randperm(8).tolist()
    for lengths in ([3000] * 8, [1, 2999, 32, 33, 2000, 64, 1500, 7], [2048, 0, 0, 5, 0, 0, 0, 0]):
        tables.copy_(first.tables[order])
        contexts.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for i, length in enumerate(lengths):
            if length == 0:
                assert (out[i] == 0).all(), "a padding row gives 0"
                continue
            key, value = first.context(order[i])
            assert error(out[i : i + 1], attention(query[i : i + 1], key[:length], value[:length])) < 1e-2


def check_step(
    paged: Paged,
    rows: list[tuple[int, int]],
    num_rows: int,
    *,
    heads: int,
    seed: int,
    backend: AttentionBackend | None = None,
) -> None:
    """`write` and `attend` of the contract, with the rows' KV taken out of the pages first."""
    kv_heads, block_tokens, dim = paged.pool.shape[3:]
    dtype = paged.pool.dtype
    query = random_query(num_rows, heads, dim, dtype, seed)
    key = torch.zeros(num_rows, kv_heads, dim, dtype=dtype, device="cuda")
    value = torch.zeros_like(key)
    expected = []
    for i, (start, end) in enumerate(rows):
        keys, values = paged.context(i)
        expected.append(attention(query[start:end], keys, values))
        key[start:end], value[start:end] = keys[start - end :], values[start - end :]
        for position in range(len(keys) - (end - start), len(keys)):
            page = int(paged.tables[i, position // block_tokens])
            paged.pool[page, LAYER, :, :, position % block_tokens] = float("nan")
    before = paged.pool.isnan().sum()
    if backend is None:
        backend = TritonAttention(paged.pool, heads, max_rows=num_rows, max_sequences=len(rows))
    step = backend.plan(make_batch(paged, rows, num_rows))
    step.write(LAYER, key, value)
    out = step.attend(LAYER, query)
    assert out.isfinite().all()
    for (start, end), right in zip(rows, expected, strict=True):
        assert error(out[start:end], right) < LIMIT[dtype], (start, end)
    written = sum(end - start for start, end in rows) * 2 * kv_heads * dim
    assert before - paged.pool.isnan().sum() == written, "what was written is the rows' KV and nothing else"


@pytest.mark.parametrize(
    "block_tokens, kv_heads, group, head_dim",
    [(16, 8, 4, 128), (32, 8, 4, 128), (32, 3, 3, 64), (64, 3, 3, 64), (16, 2, 8, 64), (64, 4, 1, 128)],
)
def test_mixed_batches(block_tokens: int, kv_heads: int, group: int, head_dim: int) -> None:
    """Chunks at any start, single rows, short chunks behind long contexts, and padding rows between them."""
    contexts = [300, 1, 1025, 64, 2000, 97, 33, 500]
    rows = [(0, 200), (200, 201), (205, 206), (206, 270), (280, 283), (283, 300), (301, 302), (302, 402)]
    paged = make_paged(
        contexts, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens, dtype=BF16, seed=7
    )
    check_step(paged, rows, 416, heads=kv_heads * group, seed=block_tokens)


@pytest.mark.parametrize(
    "count, context",
    [(2, 32768), (31, 20000), (32, 32), (129, 9000), (1000, 1000), (2048, 8192), (4096, 4096)],
)
def test_one_chunk_of_the_8b_shape(count: int, context: int) -> None:
    paged = make_paged([context], kv_heads=8, head_dim=128, block_tokens=32, dtype=BF16, seed=count)
    query = random_query(count, 32, 128, BF16, count)
    plan = prefill_plan(paged.pool, 32, 1, count)
    out = poisoned(query)
    plan.update(
        torch.tensor([[0, count]], dtype=torch.int32, device="cuda"),
        torch.tensor([context], dtype=torch.int32, device="cuda"),
    )
    prefill(query, paged.pool[:, LAYER], paged.tables, out, plan)
    assert error(out, attention(query, *paged.context(0))) < 1e-2


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_deterministic_attention_has_the_same_bits_in_any_company(block_tokens: int) -> None:
    """A row alone, as a decode, in a piece of its tile and in its whole tile, among others or not."""
    contexts = [1000, 640, 77]
    paged = make_paged(contexts, kv_heads=8, head_dim=128, block_tokens=block_tokens, dtype=BF16, seed=12)
    backend = FixedTritonAttention(paged.pool, 32)
    query = random_query(1000, 32, 128, BF16, 12)

    def run(pieces: list[tuple[int, int, int]]) -> Tensor:
        """`pieces` are (sequence, first position, end position), each in the rows of its positions on the grid."""
        batch = make_batch(paged, [(0, 0)] * len(contexts), GRID_TOKENS)
        sequences = [piece[0] for piece in pieces]
        rows = [(first % GRID_TOKENS, first % GRID_TOKENS + end - first) for _, first, end in pieces]
        batch = replace(
            batch,
            block_tables=batch.block_tables[sequences],
            rows=np.array(rows, np.int32),
            context_lens=np.array([end for _, _, end in pieces], np.int32),
        )
        tile = torch.zeros(GRID_TOKENS, 32, 128, dtype=BF16, device="cuda")
        for (_, first, end), (start, stop) in zip(pieces, rows, strict=True):
            tile[start:stop] = query[first:end]
        return backend.plan(batch).attend(LAYER, tile)

    whole = run([(0, 896, 960)])
    for first, end in [(896, 960), (930, 960), (896, 897), (959, 960), (901, 933)]:
        part = run([(0, first, end)])
        assert torch.equal(
            part[first % 64 : first % 64 + end - first], whole[first % 64 : first % 64 + end - first]
        )
    among = run([(0, 930, 935), (1, 590, 600), (2, 76, 77), (1, 600, 610)])
    assert torch.equal(among[34:39], whole[34:39])
    assert error(whole, attention(query[896:960], *(x[:960] for x in paged.context(0)))) < 1e-2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("norms", ["with norms", "without norms"])
def test_rope_and_write(head_dim: int, norms: str) -> None:
    rows, kv_heads, group, block_tokens = 50, 4, 3, 32
    generator = torch.Generator("cuda").manual_seed(head_dim)
    fused = torch.randn(rows, (group + 2) * kv_heads, head_dim, generator=generator, device="cuda").to(BF16)
    query, key, value = fused.split([group * kv_heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(400, head_dim // 2, generator=generator, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    pool = torch.full((40, 2, 2, kv_heads, block_tokens, head_dim), float("nan"), dtype=BF16, device="cuda")
    tables = torch.randperm(40, generator=generator, device="cuda").int()[:36].view(3, 12)
    sequence = torch.arange(rows, device="cuda", dtype=torch.int32) % 4 - 1
    position = torch.randperm(380, generator=generator, device="cuda")[:rows].int()
    weights = [torch.rand(head_dim, generator=generator, device="cuda").to(BF16) for _ in range(2)]
    with_norms = norms == "with norms"

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        if with_norms:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
        at = position.long()
        return rotate(x, cos[at].unsqueeze(1), sin[at].unsqueeze(1))

    right_query, right_key, right_value = (
        expected(query, weights[0]),
        expected(key, weights[1]),
        value.clone(),
    )
    rope_and_write(
        query, key, value, cos, sin, pool[:, LAYER], tables, sequence, position,
        query_norm=weights[0] if with_norms else None, key_norm=weights[1] if with_norms else None,
    )  # fmt: skip
    assert error(query, right_query) < 4e-3
    for row in range(rows):
        if sequence[row] < 0:
            continue
        page = tables[sequence[row], position[row] // block_tokens]
        stored = pool[page, LAYER, :, :, position[row] % block_tokens]
        assert error(stored[0], right_key[row]) < 4e-3
        assert torch.equal(stored[1], right_value[row])
    written = int((sequence >= 0).sum()) * 2 * kv_heads * head_dim
    assert int(pool.isfinite().sum()) == written


def test_the_highest_slot_of_more_than_64_gib() -> None:
    """Element offsets pass 2^35: a 32-bit offset anywhere reads or writes elsewhere."""
    page_bytes, size = 4 << 20, 70 << 30
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < size + (4 << 30):
        pytest.skip("needs 74 GiB of free GPU memory")
    memory = torch.empty(size, dtype=torch.uint8, device="cuda")
    pool = memory.view(BF16).view(size // page_bytes, 32, 2, 8, 32, 128)
    pool = pool[:, 30:]  # the last layers, as layers 0 and 1 of the helpers
    highest = torch.arange(len(pool) - 1, len(pool) - 200, -1, device="cuda")
    paged = make_paged(
        [900, 2000, 31, 1], kv_heads=8, head_dim=128, block_tokens=32, dtype=BF16, seed=8, pages=highest, pool=pool
    )  # fmt: skip
    query = random_query(4, 32, 128, BF16, 8)
    assert_decoded(run_decode(paged, query), paged, query)
    attention_ = TritonAttention(pool, 32, max_rows=512, max_sequences=4)
    rows = [(0, 300), (300, 500), (500, 501), (501, 502)]
    step = attention_.plan(make_batch(paged, rows, 502))
    fresh = torch.randn(502, 2, 8, 128, device="cuda").to(BF16)
    step.write(LAYER, fresh[:, 0], fresh[:, 1])
    query = random_query(502, 32, 128, BF16, 9)
    out = step.attend(LAYER, query)
    for i, (start, end) in enumerate(rows):
        keys, values = paged.context(i)
        assert torch.equal(keys[start - end :], fresh[start:end, 0])
        assert torch.equal(values[start - end :], fresh[start:end, 1])
        assert error(out[start:end], attention(query[start:end], keys, values)) < 1e-2
