"""How a batch of moves is cut: by calls, and into shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.moves import MoveKind
from kvstore.wire.packed import MOVE
from tiers.base import Moves
from tiers.nvme.pieces import QUEUED_PIECE_BYTES, cut, cut_in_python

LENGTH = 256 << 10
STRIDE = LENGTH + 4096


def moves_of(
    slots: list[int], kind: MoveKind = MoveKind.READ, length: int = LENGTH, extent: int = 0
) -> Moves:
    moves = np.zeros(len(slots), dtype=MOVE)
    moves["id"] = np.arange(1, len(slots) + 1)
    moves["kind"], moves["length"], moves["nvme_extent"] = kind, length, extent
    moves["nvme_offset"] = np.array(slots, dtype=np.uint64) * np.uint64(length + 4096)
    return moves


def slots_of(pieces: list[Moves]) -> list[list[int]]:
    return [(piece["nvme_offset"] // np.uint64(STRIDE)).tolist() for piece in pieces]


def test_neighbours_are_one_piece_up_to_a_size() -> None:
    assert slots_of(cut(moves_of([5, 3, 4]), shares=8)) == [[3, 4, 5]]
    assert [len(piece) for piece in cut(moves_of(list(range(40))), shares=8)] == [16, 16, 8], "a call each"
    assert [len(piece) for piece in cut(moves_of(list(range(256))), shares=2)] == [32] * 8, "two calls each"


def test_a_small_batch_gives_every_thread_a_piece() -> None:
    """A prefix of eight scattered blocks was read by one thread, one block behind the other."""
    assert slots_of(cut(moves_of([0, 2, 4, 6, 8, 10, 12, 14]), shares=8)) == [[at] for at in range(0, 16, 2)]


def test_of_a_large_batch_several_runs_are_one_piece() -> None:
    """Each of 256 scattered blocks was a job, a reply and a packet by itself, which took longer than the disk."""
    pieces = cut(moves_of(list(range(0, 512, 2))), shares=8)
    assert [len(piece) for piece in pieces] == [32] * 8


@pytest.mark.parametrize("length, most", [(2 << 20, 4), (8 << 20, 1), (4096, 512)])
def test_a_piece_is_bounded_in_bytes_and_slots(length: int, most: int) -> None:
    pieces = cut(moves_of(list(range(1024)), length=length), shares=1)
    assert {len(piece) for piece in pieces} == {most}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(MoveKind), st.integers(0, 2), st.sampled_from([4096, 16384]), st.integers(0, 40)
        ),
        max_size=60,
    ),
    st.integers(1, 9),
)
def test_nothing_is_lost_and_a_piece_is_of_one_kind(
    wanted: list[tuple[MoveKind, int, int, int]], shares: int
) -> None:
    moves = np.concatenate(
        [moves_of([slot], kind, length, extent) for kind, extent, length, slot in wanted] or [moves_of([])]
    )
    moves["id"] = np.arange(len(moves))
    pieces = cut(moves, shares)
    for piece, other in zip(pieces, cut_in_python(moves, shares), strict=True):
        assert piece.tobytes() == other.tobytes(), "the compiled one is the twin's equal"
    assert sorted(int(at) for piece in pieces for at in piece["id"]) == list(range(len(moves)))
    for piece in pieces:
        assert all(len(np.unique(piece[name])) == 1 for name in ("kind", "nvme_extent", "length"))
        assert (np.diff(piece["nvme_offset"].astype(np.int64)) >= 0).all()
    kinds = [int(piece["kind"][0]) for piece in pieces]
    assert kinds == sorted(kinds), "reads first"


@pytest.mark.parametrize("length", [16 << 10, 256 << 10, 2 << 20, 8 << 20])
@pytest.mark.parametrize("step", [1, 2], ids=["runs", "scattered"])
@pytest.mark.parametrize("shares", [1, 2, 8])
def test_large_batches_are_cut_as_the_twin_cuts_them(length: int, step: int, shares: int) -> None:
    slots = np.random.default_rng(5).permutation(512) * step
    moves = moves_of(slots.tolist(), MoveKind.WRITE, length)
    compiled, python = (how(moves, shares, QUEUED_PIECE_BYTES) for how in (cut, cut_in_python))
    assert [piece.tobytes() for piece in compiled] == [piece.tobytes() for piece in python]
