"""The first of each value, against counting them one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tables.firsts import firsts


@given(
    values=st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 3), max_size=12),
    copies=st.sampled_from([1, 1, 40]),
)
def test_each_value_counts_where_it_comes_first(values: list[int], copies: int) -> None:
    values = values * copies
    wanted = [values.index(value) == place for place, value in enumerate(values)]
    assert firsts(np.array(values, dtype=np.uint64)).tolist() == wanted
