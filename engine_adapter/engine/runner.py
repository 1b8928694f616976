"""Runs one step: turns chunks into flat batches, runs the model over them, gives the logits and tokens that are wanted.

`FlatRunner` runs all chunks in one pass. `TiledRunner` is deterministic mode: passes of one tile each, whose shapes
never vary. Both read block tables when the step begins and have finished their kernels when `launch` returns; a runner
on a GPU (`cuda_runner`) returns while they are under way.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_adapter.engine.arriving import LateKv, step_over
from engine_adapter.engine.attention.base import AttentionBackend, AttentionBatch, StepAttention
from engine_adapter.engine.attention.tiled import GRID_TOKENS
from engine_adapter.engine.models.llama import Llama
from engine_adapter.engine.request import Chunk
from engine_adapter.engine.tiles import Piece, cut_tiles

__all__ = ["FlatRunner", "LaunchedStep", "Runner", "TiledRunner"]


class LaunchedStep(Protocol):
    """A step whose kernels are under way or have completed."""

    def wait(self) -> None:
        """Returns when all its kernels have completed: pages that it wrote may be committed. Call it first."""
        ...

    def tokens(self) -> list[int]:
        """The most likely token of each chunk that samples, in the order of the chunks."""
        ...

    def logits(self) -> Tensor:
        """Logits `[number of chunks that sample, vocab]`, in the same order; until the next launch."""
        ...


class Runner(Protocol):
    """Computes chunks; `tables[i]` is the block table of `chunks[i]`'s request.

    Steps complete in the order of their launches. A token that is `UNKNOWN` is the one that the launch before chose for
    that request.
    """

    def prepare(self) -> None:
        """Do now what the first steps would have to do once (compile, capture)."""
        ...

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> LaunchedStep:
        """Start a step. Chunks and tables are read before it returns.

        Raises LateKv where cached KV that it reads is under way and does not come; nothing of the step runs then.
        """
        ...


class _Ended:
    """A step that had completed when it was launched."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def wait(self) -> None:
        """See LaunchedStep."""
        if self._logits.is_cuda:
            torch.cuda.current_stream(self._logits.device).synchronize()

    def tokens(self) -> list[int]:
        """See LaunchedStep."""
        chosen: list[int] = self._logits.argmax(dim=-1).tolist()
        return chosen

    def logits(self) -> Tensor:
        """See LaunchedStep."""
        return self._logits


class FlatRunner:
    """One pass over all rows of the step: the fast way."""

    def __init__(self, model: Llama, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def prepare(self) -> None:
        """See Runner. There is nothing."""

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> LaunchedStep:
        """See Runner."""
        return _Ended(self.run(chunks, tables))

    def run(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> Tensor:
        """Logits `[number of chunks that sample, vocab]`, in the order of the chunks."""
        ends = np.cumsum([chunk.end - chunk.start for chunk in chunks])
        starts = np.concatenate(([0], ends[:-1]))
        batch = AttentionBatch(
            num_rows=int(ends[-1]),
            block_tables=_pad_tables(tables),
            rows=np.stack((starts, ends), axis=1).astype(np.int32),
            context_lens=np.array([chunk.end for chunk in chunks], np.int32),
        )
        token_ids = np.concatenate([np.array(c.request.tokens[c.start : c.end], np.int64) for c in chunks])
        hidden = _forward(self._model, token_ids, batch, step_over(chunks, self._attention.plan(batch)))
        last = [int(end) - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        return self._model.logits(hidden[last])


class TiledRunner:
    """Deterministic mode: a pass is always `GRID_TOKENS` rows, and a token's row is its position on the grid."""

    def __init__(self, model: Llama, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def prepare(self) -> None:
        """See Runner. There is nothing."""

    def launch(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> LaunchedStep:
        """See Runner."""
        return _Ended(self.run(chunks, tables))

    def run(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> Tensor:
        """Logits `[number of chunks that sample, vocab]`, in the order of the chunks."""
        wanted: dict[int, Tensor] = {}
        for tile in cut_tiles(chunks, GRID_TOKENS):
            hidden = self._forward(tile, chunks, tables)
            finals = [p for p in tile if chunks[p.chunk].samples and p.end == chunks[p.chunk].end]
            if finals:
                logits = self._model.logits(hidden)
                wanted.update((piece.chunk, logits[(piece.end - 1) % GRID_TOKENS]) for piece in finals)
        if not wanted:
            return torch.empty((0, self._model.config.vocab_size), device=self._model.device)
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
        attention = step_over([chunks[piece.chunk] for piece in tile], self._attention.plan(batch))
        return _forward(self._model, token_ids, batch, attention)


def _forward(
    model: Llama, token_ids: NDArray[np.int64], batch: AttentionBatch, attention: StepAttention
) -> Tensor:
    ids, positions = torch.from_numpy(token_ids), torch.from_numpy(batch.positions())
    try:
        return model.forward(ids.to(model.device), positions.to(model.device), attention)
    except LateKv:
        if model.device.type == "cuda":  # its pages may go back
            torch.cuda.current_stream(model.device).synchronize()
        raise


def _pad_tables(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
