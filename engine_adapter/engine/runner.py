"""Runs one step: turns chunks into flat batches, runs the model over them, returns the logits that are wanted.

`FlatRunner` runs all chunks in one pass. `TiledRunner` is deterministic mode: passes of one tile each, whose shapes
never vary. Both read block tables when the step begins and have finished their kernels when they return.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.attention.base import AttentionBackend, AttentionBatch
from engine_adapter.engine.attention.tiled import GRID_TOKENS
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.request import Chunk
from engine_adapter.engine.tiles import Piece, cut_tiles

__all__ = ["FlatRunner", "Runner", "TiledRunner"]


class Runner(Protocol):
    """Computes chunks; `tables[i]` is the block table of `chunks[i]`'s request."""

    def run(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> Tensor:
        """Logits `[number of chunks that sample, vocab]`, in the order of the chunks."""
        ...


class FlatRunner:
    """One pass over all rows of the step: the fast way."""

    def __init__(self, model: Llama, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def run(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> Tensor:
        ends = np.cumsum([chunk.end - chunk.start for chunk in chunks])
        starts = np.concatenate(([0], ends[:-1]))
        batch = AttentionBatch(
            num_rows=int(ends[-1]),
            block_tables=_pad_tables(tables),
            rows=np.stack((starts, ends), axis=1).astype(np.int32),
            context_lens=np.array([chunk.end for chunk in chunks], np.int32),
        )
        token_ids = np.concatenate([np.array(c.request.tokens[c.start : c.end], np.int64) for c in chunks])
        hidden = self._model.forward(
            torch.from_numpy(token_ids), torch.from_numpy(batch.positions()), self._attention.plan(batch)
        )
        last = [int(end) - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        return self._model.logits(hidden[last])


class TiledRunner:
    """Deterministic mode: a pass is always `GRID_TOKENS` rows, and a token's row is its position on the grid."""

    def __init__(self, model: Llama, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def run(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> Tensor:
        wanted: dict[int, Tensor] = {}
        for tile in cut_tiles(chunks, GRID_TOKENS):
            hidden = self._forward(tile, chunks, tables)
            finals = [p for p in tile if chunks[p.chunk].samples and p.end == chunks[p.chunk].end]
            if finals:
                logits = self._model.logits(hidden)
                wanted.update((piece.chunk, logits[(piece.end - 1) % GRID_TOKENS]) for piece in finals)
        if not wanted:
            return torch.empty((0, self._model.config.vocab_size))
        return torch.stack([wanted[index] for index in sorted(wanted)])

    def _forward(
        self, tile: list[Piece], chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]
    ) -> Tensor:
        token_ids = np.zeros(GRID_TOKENS, np.int64)
        rows = np.empty((len(tile), 2), np.int32)
        for i, piece in enumerate(tile):
            start = piece.start % GRID_TOKENS
            rows[i] = start, start + piece.end - piece.start
            token_ids[rows[i, 0] : rows[i, 1]] = chunks[piece.chunk].request.tokens[piece.start : piece.end]
        batch = AttentionBatch(
            num_rows=GRID_TOKENS,
            block_tables=_pad_tables([tables[piece.chunk] for piece in tile]),
            rows=rows,
            context_lens=np.array([piece.end for piece in tile], np.int32),
        )
        return self._model.forward(
            torch.from_numpy(token_ids), torch.from_numpy(batch.positions()), self._attention.plan(batch)
        )


def _pad_tables(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
