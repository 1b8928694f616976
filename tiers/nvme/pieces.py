"""Moves in pieces: what one thread carries out at a time.

A run of slots that lie side by side on the disk is one piece, for it is one call, up to a size. Of a large batch
several runs are one piece: what each costs beside its call (a job, a reply, a packet) came to 100 µs and more for
256 KiB, as long as the disk took. Of a small batch each run is a piece, so that every thread has one. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiers.base import Moves
from tiers.nvme.carry import IS_COMPILED, MAX_RUN_BYTES, MAX_RUN_SLOTS
from tiers.nvme.trailer import TRAILER_BYTES

try:
    from kvstore._slab_io import arrange as _arrange
except ImportError:  # built without a C compiler
    _arrange = None  # type: ignore[assignment]

__all__ = ["PIECE_BYTES", "QUEUED_PIECE_BYTES", "cut", "cut_in_python", "runs"]

PIECE_BYTES = 2 * MAX_RUN_BYTES
"""Most bytes of a piece: two calls, or more where they are smaller. At a fourth of it a disk of 4.6 GB/s was written at
0.77 to 0.9 of a plain loop (two cores): what a piece and its reply cost had no time to hide. Larger ones starve other
threads."""
QUEUED_PIECE_BYTES = 16 * MAX_RUN_BYTES
"""The same where a thread has several calls under way, so that a few threads do: as many bytes are with all of them."""


def cut(moves: Moves, shares: int, piece_bytes: int = PIECE_BYTES) -> list[Moves]:
    """`moves` by kind (reads first), slab and place, in at least `shares` pieces where there are as many.

    A piece is of one kind, slab and length. O(n log n).
    """
    if not IS_COMPILED:
        return cut_in_python(moves, shares, piece_bytes)
    arranged = np.empty(len(moves), dtype=moves.dtype)
    bounds = _arrange(np.ascontiguousarray(moves), shares, piece_bytes, MAX_RUN_BYTES, arranged)
    return [arranged[begin:end] for begin, end in bounds]


def cut_in_python(moves: Moves, shares: int, piece_bytes: int = PIECE_BYTES) -> list[Moves]:
    """As `cut`; no numpy per move."""
    if len(moves) <= 1:
        return [moves] if len(moves) else []
    moves = moves[np.lexsort((moves["nvme_offset"], moves["nvme_extent"], moves["kind"]))]
    strides = moves["length"].astype(np.uint64) + np.uint64(TRAILER_BYTES)
    alike = np.ones(len(moves) - 1, dtype=np.bool_)
    for name in ("kind", "nvme_extent", "length"):
        alike &= moves[name][1:] == moves[name][:-1]
    follows = alike & (moves["nvme_offset"][1:] == moves["nvme_offset"][:-1] + strides[:-1])
    begins = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    share = -(-len(moves) // shares)
    most, call = (_most(nbytes, strides[begins]) for nbytes in (piece_bytes, MAX_RUN_BYTES))
    runs_ = zip(
        begins.tolist(),
        [*begins[1:].tolist(), len(moves)],
        [False, *alike[begins[1:] - 1].tolist()],
        np.minimum(most, share).tolist(),
        np.minimum(most, np.maximum(call, share)).tolist(),
        strict=True,
    )
    bounds: list[list[int]] = []
    for begin, end, joins, together, alone in runs_:
        if joins and end - bounds[-1][0] <= together:
            bounds[-1][1] = end
        else:
            bounds += [[at, min(at + alone, end)] for at in range(begin, end, alone)]
    return [moves[begin:end] for begin, end in bounds]


def runs(piece: Moves) -> int:
    """How many calls a piece takes: one for each run of neighbours."""
    offsets = piece["nvme_offset"]
    strides = piece["length"][:-1].astype(np.uint64) + np.uint64(TRAILER_BYTES)
    return 1 + int((offsets[1:] != offsets[:-1] + strides).sum())


def _most(nbytes: int, strides: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Slots of each stride in `nbytes`, at least one."""
    return np.clip(nbytes // strides.astype(np.int64), 1, MAX_RUN_SLOTS)
