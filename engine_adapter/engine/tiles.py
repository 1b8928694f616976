"""Cuts a step's chunks into tiles for deterministic mode; pure. See `attention.tiled` for why."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_adapter.engine.request import Chunk

__all__ = ["Piece", "cut_tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens `[start, end)` of `chunks[chunk]`, all within one grid cell."""

    chunk: int
    start: int
    end: int


def cut_tiles(chunks: Sequence[Chunk], grid_tokens: int) -> list[list[Piece]]:
    """Passes in the order to run them; within a tile no two pieces want the same row, later tokens come in later tiles.

    Pieces shorter than a cell (decoding requests, above all) share tiles where their rows are free.
    """
    tiles: list[list[Piece]] = []
    taken: list[int] = []  # per tile, its used rows as a bit mask
    for index, chunk in enumerate(chunks):
        first_allowed, start = 0, chunk.start
        while start < chunk.end:
            end = min(chunk.end, (start // grid_tokens + 1) * grid_tokens)
            rows = ((1 << (end - start)) - 1) << (start % grid_tokens)
            tile = next((t for t in range(first_allowed, len(tiles)) if not taken[t] & rows), len(tiles))
            if tile == len(tiles):
                tiles.append([])
                taken.append(0)
            tiles[tile].append(Piece(chunk=index, start=start, end=end))
            taken[tile] |= rows
            first_allowed, start = tile + 1, end
    return tiles
