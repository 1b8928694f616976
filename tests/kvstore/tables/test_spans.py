"""Runs of rows and slots as slices: they name the same places, or none is given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import NONE
from kvstore.tables.spans import span_of

LIMIT = 12


@given(st.lists(st.integers(0, LIMIT + 2) | st.just(NONE), max_size=6))
def test_a_slice_is_given_for_a_run_alone_and_names_the_same_places(places: list[int]) -> None:
    span = span_of(np.array(places, dtype=np.uint32), LIMIT)
    first = places[0] if places else 0
    is_run = places == list(range(first, first + len(places))) and first + len(places) <= LIMIT
    assert (span is not None) == (is_run or not places)
    if span is not None:
        assert np.arange(LIMIT)[span].tolist() == places


@pytest.mark.parametrize("places", [[3, 3], [3, 5, 4, 6], [4, 3], [3, 3, 5], [LIMIT - 1, LIMIT], [NONE]])
def test_what_only_looks_like_a_run_is_none(places: list[int]) -> None:
    assert span_of(np.array(places, dtype=np.uint32), LIMIT) is None
