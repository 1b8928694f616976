"""The hash chain: the one thing done per block in Python."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvstore.identity import HashChain, hash_blocks, namespace_digest

KEY = bytes(range(32))
PARTS = {"model": b"m", "weights": b"w", "dtype": b"float32", "block_tokens": b"32", "groups": b"g"}


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_hash_1024_blocks(benchmark: BenchmarkFixture, block_tokens: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 1024 * block_tokens, dtype=np.uint32)
    hashes = benchmark(hash_blocks, KEY, bytes(16), tokens, block_tokens)
    assert len(hashes) == 1024


def test_extend_a_conversation_of_4096_blocks_by_one(benchmark: BenchmarkFixture) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 32, dtype=np.uint32)
    chain = HashChain(KEY, 32, np.tile(tokens, 4096))
    benchmark(chain.extend, tokens)
    assert len(chain) > 4096


def test_digest_of_a_namespace(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(namespace_digest, PARTS)) == 32
