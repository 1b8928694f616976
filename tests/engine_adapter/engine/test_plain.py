"""The block manager without a cache."""

import numpy as np
import pytest

from engine_adapter.base import Admission, BlockManager, RequestId
from engine_adapter.engine.plain import PlainBlockManager

A, B = RequestId("a"), RequestId("b")


def test_pages_are_given_and_come_back() -> None:
    blocks = PlainBlockManager(num_pages=8, page_bytes=4096, block_tokens=16)
    contract: BlockManager = blocks
    assert np.asarray(contract.kv_pages()).shape == (8, 4096)
    contract.enqueue(A, [1, 2])
    assert contract.admit(A, 33) == Admission(cached_tokens=0, cached_by_tier={})
    first = contract.pages(A).copy()
    assert len(first) == 3
    assert contract.reserve(A, 48)
    assert contract.reserve(A, 49)
    assert np.array_equal(contract.pages(A)[:3], first)
    blocks.check_integrity()
    assert contract.admit(B, 65) is None
    assert not contract.reserve(A, 16 * 9)
    assert len(contract.pages(A)) == 4
    assert contract.admit(B, 64) is not None
    assert not set(contract.pages(A)) & set(contract.pages(B))
    blocks.check_integrity()
    contract.release(A)
    contract.release(A)
    contract.release(RequestId("unknown"))
    assert contract.reserve(B, 128)
    blocks.check_integrity()
    with pytest.raises(ValueError, match="admitted already"):
        contract.admit(B, 1)
