"""The order of rows in arrays, beside a plain list."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eviction import order as module
from eviction.order import Order

ROWS = 40
batches = st.lists(st.integers(0, ROWS - 1), max_size=12, unique=True)


class OrderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # Segments so small that they are begun, made one and dropped all the time.
        self.sizes = mock.patch.multiple(module, _FEWEST_SEGMENT=4, _MOST_SEGMENT=16)
        self.sizes.start()
        self.order, self.model = Order(ROWS), list[int]()

    def teardown(self) -> None:
        self.sizes.stop()

    @rule(rows=batches, times=st.sampled_from([1, 3]))
    def append(self, rows: list[int], times: int) -> None:
        for _ in range(times):
            self.order.append(np.array(rows, dtype=np.uint32))
        self.model = [row for row in self.model if row not in rows] + rows

    @rule(rows=batches)
    def remove(self, rows: list[int]) -> None:
        self.order.remove(np.array(rows, dtype=np.uint32))
        self.model = [row for row in self.model if row not in rows]

    @rule(count=st.integers(0, ROWS), kept=st.integers(0, 3))
    def take(self, count: int, kept: int) -> None:
        taken = self.order.take(count, lambda rows: rows % 4 >= kept)
        expected = [row for row in self.model if row % 4 >= kept][:count]
        assert taken.tolist() == expected
        self.model = [row for row in self.model if row not in expected]

    @rule()
    def clear(self) -> None:
        self.order.clear()
        self.model = []

    @invariant()
    def agrees(self) -> None:
        self.order.check_integrity()
        assert self.order.rows().tolist() == self.model
        assert len(self.order) == len(self.model)
        assert set(np.flatnonzero(self.order.has(np.arange(ROWS, dtype=np.uint32))).tolist()) == set(
            self.model
        )


OrderMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestOrder = OrderMachine.TestCase


def test_the_log_stays_a_few_times_as_long_as_the_order() -> None:
    """A cache that is hit more often than it evicts appends the same rows again and again."""
    order, rng = Order(20_000), np.random.default_rng(0)
    for _ in range(4000):
        start = int(rng.integers(0, 19_000))
        order.append(np.arange(start, start + 1000, dtype=np.uint32))
    assert sum(len(segment.rows) for segment in order._segments) < 6 * len(order)
    order.check_integrity()
