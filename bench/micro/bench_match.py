"""The local match over tables of 200,000 rows."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.tables import FilledStore
from kvstore.layout import NONE, TableShape, open_columns, table_bytes
from kvstore.match import match
from kvstore.tables.index import Index


@pytest.mark.parametrize("blocks", [1, 64, 1024, 4096])
def test_match_chained(benchmark: BenchmarkFixture, filled: FilledStore, blocks: int) -> None:
    chain = filled.chains[3][:blocks]
    found = benchmark(match, filled.columns, filled.index, filled.namespace, chain, device=0)
    assert found.hits == blocks


def test_match_4096_in_random_order(benchmark: BenchmarkFixture, filled: FilledStore) -> None:
    every = np.concatenate(filled.chains)
    keys = every[np.random.default_rng(0).permutation(len(every))[:4096]]
    found = benchmark(match, filled.columns, filled.index, filled.namespace, keys, device=0)
    assert found.hits == 4096


def test_match_4096_that_are_not_cached(benchmark: BenchmarkFixture, filled: FilledStore) -> None:
    keys = np.random.default_rng(1).integers(0, 1 << 64, (4096, 2), dtype=np.uint64)
    found = benchmark(match, filled.columns, filled.index, filled.namespace, keys, device=0)
    assert found.hits == 0


@pytest.mark.parametrize("state", ["present", "removed"])
def test_find_4096_rows(benchmark: BenchmarkFixture, state: str) -> None:
    """What was evicted must cost no more to miss than what is there costs to find."""
    shape = TableShape(max_rows=200_000, hbm_slots=1, dram_slots=1, nvme_slots=1)
    columns = open_columns(memoryview(bytearray(table_bytes(shape))), shape)
    index = Index(columns)
    index.clear()
    columns.hash[:] = np.random.default_rng(2).integers(0, 1 << 64, columns.hash.shape, dtype=np.uint64)
    rows = np.arange(200_000, dtype=np.uint32)
    assert index.insert(columns.hash, rows).all()
    wanted = columns.hash[:4096].copy()
    if state == "removed":
        index.remove(wanted, rows[:4096])
    found = benchmark(index.find, wanted)
    assert (found == (NONE if state == "removed" else rows[:4096])).all()
