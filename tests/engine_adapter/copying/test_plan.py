"""Cutting a batch: runs of neighbours, large and small pieces, portions and shares; nothing is lost or copied twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_adapter.copying.plan import Pieces, portions, ranges, runs, shares, split, staged

NBYTES = 4096
U64 = NDArray[np.uint64]


def addresses(slots: list[int], base: int = 1 << 40) -> U64:
    return np.asarray(slots, dtype=np.uint64) * np.uint64(NBYTES) + np.uint64(base)


def covered(*parts: Pieces) -> set[tuple[int, int]]:
    """(source, target) of every block of these pieces, each of which must be there once."""
    found = [
        (source + at, target + at)
        for pieces in parts
        for source, target, size in zip(
            pieces.sources.tolist(), pieces.targets.tolist(), pieces.sizes.tolist(), strict=True
        )
        for at in range(0, size, NBYTES)
    ]
    assert len(found) == len(set(found))
    return set(found)


def test_neighbours_on_both_sides_are_one_run() -> None:
    sources, targets = addresses([0, 1, 2, 9, 10, 20]), addresses([5, 6, 7, 8, 9, 1], base=1 << 41)
    assert runs(sources, targets, NBYTES, max_run_bytes=1 << 30).tolist() == [0, 3, 5]


def test_neighbours_on_one_side_are_not() -> None:
    assert runs(addresses([0, 1, 2]), addresses([0, 2, 4]), NBYTES, max_run_bytes=1 << 30).tolist() == [
        0,
        1,
        2,
    ]


def test_a_run_ends_at_a_border_of_either_side() -> None:
    """The driver refuses a copy that begins in one pinned range and ends in the next, though they are neighbours."""
    sources, targets = addresses([0, 1, 2, 3]), addresses([0, 1, 2, 3], base=1 << 41)
    for border in (sources[2:3], targets[2:3]):
        assert runs(sources, targets, NBYTES, borders=(border,), max_run_bytes=1 << 30).tolist() == [0, 2]


def test_a_run_has_a_greatest_length() -> None:
    sources, targets = addresses(list(range(7))), addresses(list(range(7)))
    assert runs(sources, targets, NBYTES, max_run_bytes=3 * NBYTES).tolist() == [0, 3, 6]
    assert runs(sources, targets, NBYTES, max_run_bytes=1).tolist() == list(range(7))


def test_long_runs_are_large_and_the_blocks_of_short_ones_stay_alone() -> None:
    sources, targets = addresses([0, 1, 2, 3, 8, 9]), addresses([0, 1, 2, 3, 8, 9])
    begins = runs(sources, targets, NBYTES, max_run_bytes=1 << 30)
    large, small = split(sources, targets, NBYTES, begins, large_from_bytes=3 * NBYTES)
    assert large.sizes.tolist() == [4 * NBYTES]
    assert small.sizes.tolist() == [NBYTES, NBYTES]
    assert small.sources.tolist() == sources[4:].tolist()


def test_neighbours_on_the_host_alone_can_be_staged() -> None:
    host, device = addresses([0, 1, 2, 3, 8, 20, 21]), addresses([5, 9, 1, 7, 3, 11, 13], base=1 << 41)
    pieces = Pieces(sources=host, targets=device, sizes=np.full(7, NBYTES, dtype=np.uint64))
    together, rest = staged(pieces, host, NBYTES, borders=(host[2:3],), from_bytes=2 * NBYTES)
    assert together.sources.tolist() == host[[0, 1, 2, 3, 5, 6]].tolist()
    assert together.targets.tolist() == device[[0, 1, 2, 3, 5, 6]].tolist()
    assert rest.sources.tolist() == host[4:5].tolist()
    together, rest = staged(pieces, host, NBYTES, borders=(host[2:3],), from_bytes=3 * NBYTES)
    assert (len(together), len(rest)) == (0, 7), "the border parts the only run of three"


@given(
    count=st.integers(0, 300),
    first=st.integers(1, 9),
    most=st.integers(1, 60),
    max_blocks=st.integers(1, 50),
)
def test_ranges_grow_and_cover_a_batch_once(count: int, first: int, most: int, max_blocks: int) -> None:
    cut = list(
        ranges(count, NBYTES, first_bytes=first * NBYTES, max_bytes=most * NBYTES, max_blocks=max_blocks)
    )
    assert [i for part in cut for i in part] == list(range(count))
    sizes = [len(part) for part in cut]
    assert all(size <= min(most, max_blocks) for size in sizes)
    assert sizes[:-1] == sorted(sizes[:-1])
    assert all(size == min(first << place, most, max_blocks) for place, size in enumerate(sizes[:-1]))


@given(
    sources=st.lists(st.integers(0, 40), unique=True, max_size=40),
    seed=st.integers(0, 2**16),
    longest=st.integers(1, 6),
    large_from=st.integers(1, 5),
    max_blocks=st.integers(1, 9),
    max_pieces=st.integers(1, 9),
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_every_block_is_copied_once(
    sources: list[int],
    seed: int,
    longest: int,
    large_from: int,
    max_blocks: int,
    max_pieces: int,
    weights: list[int],
) -> None:
    from_ = addresses(sources)
    to = addresses(
        sources if seed % 2 else np.random.default_rng(seed).permutation(len(sources)).tolist(), 1 << 41
    )
    begins = runs(from_, to, NBYTES, borders=(from_[3:4],), max_run_bytes=longest * NBYTES)
    both = split(from_, to, NBYTES, begins, large_from_bytes=large_from * NBYTES)
    cut = [
        part
        for pieces in both
        for portion in portions(pieces, max_bytes=max_blocks * NBYTES, max_pieces=max_pieces)
        for part in shares(portion, weights)
    ]
    assert covered(*cut) == set(zip(from_.tolist(), to.tolist(), strict=True))
    for pieces in both:
        for portion in portions(pieces, max_bytes=max_blocks * NBYTES, max_pieces=max_pieces):
            assert 1 <= len(portion) <= max_pieces
            assert len(portion) == 1 or portion.nbytes <= max_blocks * NBYTES
