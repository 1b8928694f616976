"""The block manager that has everything cached, with nothing behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.filled import FilledBlocks, filled_pool
from engine_adapter.base import RequestId

BLOCK = 4


def blocks(*, cached: int, own: int) -> FilledBlocks:
    return FilledBlocks(torch.zeros(cached + own, 4096, dtype=torch.uint8), BLOCK, cached_pages=cached)


def test_all_but_the_last_token_is_cached() -> None:
    manager = blocks(cached=8, own=4)
    admission = manager.admit(RequestId("a"), 17)
    assert admission is not None
    assert admission.cached_tokens == 16
    table = manager.pages(RequestId("a"))
    assert len(table) == 5
    assert (table[:4] < 8).all()
    assert len(set(table[:4].tolist())) == 4
    assert table[4] >= 8, "what is written lies in no page that another request reads"


def test_without_cached_pages_nothing_is_a_hit() -> None:
    manager = blocks(cached=0, own=4)
    admission = manager.admit(RequestId("a"), 16)
    assert admission is not None
    assert admission.cached_tokens == 0
    assert sorted(manager.pages(RequestId("a")).tolist()) == [0, 1, 2, 3]


def test_pages_come_back_and_run_out() -> None:
    manager = blocks(cached=8, own=2)
    a, b, c = (RequestId(name) for name in "abc")
    assert manager.admit(a, 9) is not None
    assert manager.admit(b, 9) is not None
    assert manager.admit(c, 9) is None
    assert not manager.reserve(a, 13)
    manager.release(b)
    assert manager.reserve(a, 13)
    manager.release(a)
    manager.release(a)
    assert manager.admit(c, 16) is not None


def test_requests_that_share_pages_read_them_at_different_times() -> None:
    """Side by side they would be read once for all of them, from the GPU's own cache, and nothing would be measured."""
    manager = blocks(cached=64, own=64)
    tables = []
    for number in range(12):
        request = RequestId(str(number))
        assert manager.admit(request, 16 * BLOCK + 1) is not None
        tables.append(manager.pages(request)[:16])
    assert len(set(np.concatenate(tables[:4]).tolist())) == 64, "no page is shared while there are others"
    for place in range(16):
        read = [int(table[place]) for table in tables]
        assert len(set(read)) == len(read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_reads_as_normal_numbers(dtype: torch.dtype) -> None:
    pool = filled_pool(16, 4096, dtype, torch.device("cpu"))
    assert pool.shape == (16, 4096)
    values = pool.view(dtype).float()
    assert abs(float(values.mean())) < 0.1
    assert float(values.std()) == pytest.approx(1.0, abs=0.1)
