"""The reference that `pressure` is put beside."""

from __future__ import annotations

from bench.lru_model import plain_lru_hits


def test_what_fits_is_always_there() -> None:
    assert plain_lru_hits([4, 4], [0, 1], [0, 1, 0], 8) == 12


def test_round_robin_just_over_capacity_never_hits() -> None:
    """Where LRU collapses: one block too many, and what is asked next has always just gone."""
    assert plain_lru_hits([4, 4], [0, 1], [0, 1, 0, 1], 7) == 0


def test_a_document_larger_than_the_cache_never_hits() -> None:
    assert plain_lru_hits([10], [0], [0, 0], 9) == 0


def test_only_leading_blocks_are_hits() -> None:
    """A visit of document 1 put out the first block of document 0: the others behind it are of no use."""
    assert plain_lru_hits([3, 1], [0, 1], [0], 3) == 0
    assert plain_lru_hits([3, 1], [0, 1], [1], 3) == 1
