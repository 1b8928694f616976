"""Giving out free slots and choosing victims, over a million."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from eviction.lru import Lru
from kvstore.tables.runs import FreeRuns

SLOTS = 1_000_000


@pytest.mark.parametrize("count", [1, 64, 4096])
@pytest.mark.parametrize("state", ["empty", "fragmented"])
def test_allocate(benchmark: BenchmarkFixture, count: int, state: str) -> None:
    """Taken and given back. Fragmented: half of all slots are free, in no order."""
    free = np.ones(SLOTS, dtype=np.bool_)
    if state == "fragmented":
        free[np.random.default_rng(0).permutation(SLOTS)[: SLOTS // 2]] = False
    runs = FreeRuns(free)
    for base in range(0, SLOTS, 16384):
        runs.add_range(base, min(16384, SLOTS - base))

    def take_and_give() -> int:
        taken = runs.take(count)
        runs.give(taken)
        return len(taken)

    assert benchmark(take_and_give) == count


@pytest.mark.parametrize("count", [64, 4096])
def test_victims_of_100_000(benchmark: BenchmarkFixture, count: int) -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 60, 100_000, dtype=np.uint64)
    eligible = rng.random(100_000) < 0.9
    assert len(benchmark(Lru().victims, keys, eligible, count)) == count
