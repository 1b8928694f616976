"""The contract of attention backends, against the definition written out in double precision."""

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBackend, AttentionBatch
from engine_adapter.engine.attention.sdpa import SdpaAttention
from engine_adapter.engine.attention.tiled import GRID_TOKENS, TiledAttention
from engine_adapter.engine.settings import EngineSettings
from engine_adapter.engine.tiles import cut_tiles
from kvstore.errors import ConfigError
from tests.engine_adapter.engine.interpreted import needs_interpreter
from tests.engine_adapter.engine.test_scheduler import Chunk, request

HEADS, KV_HEADS, DIM, LAYERS, PAGES = 6, 2, 16, 3, 40


def make_pool(block_tokens: int) -> Tensor:
    return torch.full((PAGES, LAYERS, 2, KV_HEADS, block_tokens, DIM), float("nan"))


def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`query` `[rows, heads, dim]` are the last rows of the context `key`, `value` `[context, kv_heads, dim]`."""
    rows, context = len(query), len(key)
    key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("rhd,chd->hrc", query.double(), key) / DIM**0.5
    visible = torch.arange(context)[None] <= torch.arange(context - rows, context)[:, None]
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hrc,chd->rhd", weights, value).float()


def make_triton(pool: Tensor) -> AttentionBackend:
    from engine_adapter.engine.attention.triton_paged import TritonAttention

    return TritonAttention(pool, HEADS, max_rows=GRID_TOKENS, max_sequences=3)


def make_fixed_triton(pool: Tensor) -> AttentionBackend:
    from engine_adapter.engine.attention.triton_fixed import FixedTritonAttention

    return FixedTritonAttention(pool, HEADS)


every_backend = pytest.mark.parametrize(
    "kind",
    [
        SdpaAttention,
        TiledAttention,
        pytest.param(make_triton, marks=needs_interpreter),
        pytest.param(make_fixed_triton, marks=needs_interpreter),
    ],
)


@pytest.mark.parametrize("block_tokens", [16, 32])
@every_backend
def test_backends_compute_attention(kind: Callable[[Tensor], AttentionBackend], block_tokens: int) -> None:
    """Three sequences, filled in two passes: a chunk behind a context, a single row, and padding rows between."""
    generator = torch.Generator().manual_seed(1)
    pool = make_pool(block_tokens)
    backend = kind(pool)
    pages = np.random.default_rng(1).permutation(PAGES).astype(np.int32)
    width = 128 // block_tokens
    tables = pages[: 3 * width].reshape(3, width)
    history: list[list[Tensor]] = [[], [], []]
    # Rows stand at their position on the grid of 64, which the flat backend does not mind.
    for rows, contexts in (
        ([(0, 40), (0, 0), (0, 0)], [40, 0, 0]),
        ([(40, 57), (5, 6), (20, 30)], [57, 6, 30]),
    ):
        if contexts[1]:  # the second and third begin with what earlier passes left in the pages
            for index in (1, 2):
                before = contexts[index] - (rows[index][1] - rows[index][0])
                kv = torch.randn(before, 2, KV_HEADS, DIM, generator=generator)
                fill(pool, tables[index], kv)
                history[index] = [kv]
        used = [i for i in range(3) if contexts[i]]
        batch = AttentionBatch(
            num_rows=GRID_TOKENS,
            block_tables=tables[used],
            rows=np.array([rows[i] for i in used], np.int32),
            context_lens=np.array([contexts[i] for i in used], np.int32),
        )
        step = backend.plan(batch)
        query = torch.randn(GRID_TOKENS, HEADS, DIM, generator=generator)
        kv = torch.randn(GRID_TOKENS, 2, KV_HEADS, DIM, generator=generator)
        step.write(1, kv[:, 0], kv[:, 1])
        mixed = step.attend(1, query)
        assert mixed.isfinite().all()
        for i in used:
            start, end = rows[i]
            history[i].append(kv[start:end])
            whole = torch.cat(history[i])
            expected = naive(query[start:end], whole[:, 0], whole[:, 1])
            torch.testing.assert_close(mixed[start:end], expected, atol=1e-5, rtol=1e-5)
    assert pool[:, 0].isnan().all()
    assert pool[:, 2].isnan().all()


@every_backend
def test_sequences_that_own_all_rows_may_stand_in_any_order(
    kind: Callable[[Tensor], AttentionBackend],
) -> None:
    """Each row's KV went into the pages of the other sequence where the first one's rows lay behind the second one's
    and no row was padding: wrong answers, and wrong blocks for everybody."""
    generator = torch.Generator().manual_seed(2)
    pool = make_pool(16)
    backend = kind(pool)
    tables = np.arange(8, dtype=np.int32).reshape(2, 4)
    before = torch.randn(16, 2, KV_HEADS, DIM, generator=generator)
    fill(pool, tables[0], before)
    rows = ((16, GRID_TOKENS), (0, 16))
    batch = AttentionBatch(
        num_rows=GRID_TOKENS,
        block_tables=tables,
        rows=np.array(rows, np.int32),
        context_lens=np.array([GRID_TOKENS, 16], np.int32),
    )
    step = backend.plan(batch)
    query = torch.randn(GRID_TOKENS, HEADS, DIM, generator=generator)
    kv = torch.randn(GRID_TOKENS, 2, KV_HEADS, DIM, generator=generator)
    step.write(1, kv[:, 0], kv[:, 1])
    mixed = step.attend(1, query)
    for (start, end), history in zip(rows, ([before], []), strict=True):
        whole = torch.cat([*history, kv[start:end]])
        expected = naive(query[start:end], whole[:, 0], whole[:, 1])
        torch.testing.assert_close(mixed[start:end], expected, atol=1e-5, rtol=1e-5)


def fill(pool: Tensor, table: np.ndarray, kv: Tensor) -> None:
    block_tokens = pool.shape[4]
    for position, token in enumerate(kv):
        pool[int(table[position // block_tokens]), 1, :, :, position % block_tokens] = token


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="triton or flashinfer"):
        EngineSettings(attention="flash")


@needs_interpreter
def test_flashinfer_says_what_is_missing() -> None:
    from engine_adapter.engine.attention.flashinfer_paged import FlashInferAttention

    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("flashinfer is installed")
    with pytest.raises(ConfigError, match=r"not installed: pip install 'kvstore\[flashinfer\]'"):
        FlashInferAttention(make_pool(16), HEADS)


def test_positions_follow_from_the_contexts() -> None:
    batch = AttentionBatch(
        num_rows=8,
        block_tables=np.zeros((2, 1), np.int32),
        rows=np.array([[1, 4], [6, 7]], np.int32),
        context_lens=np.array([10, 1], np.int32),
    )
    assert batch.positions().tolist() == [0, 7, 8, 9, 0, 0, 0, 0]


def test_tiles_keep_rows_on_the_grid_and_tokens_in_order() -> None:
    chunks = [
        Chunk(request=request("a", 300), start=30, end=200),
        Chunk(request=request("b", 300), start=70, end=71),
        Chunk(request=request("c", 300), start=150, end=151),
        Chunk(request=request("d", 300), start=5, end=6),
    ]
    tiles = cut_tiles(chunks, 64)
    done = [chunk.start for chunk in chunks]
    for tile in tiles:
        rows: list[int] = []
        for piece in tile:
            assert piece.start == done[piece.chunk]
            done[piece.chunk] = piece.end
            assert piece.start // 64 == (piece.end - 1) // 64
            rows += [position % 64 for position in range(piece.start, piece.end)]
        assert len(rows) == len(set(rows))
    assert done == [chunk.end for chunk in chunks]
    assert len(tiles) == 4  # the decoding rows fit beside the first and last pieces of the prefill
