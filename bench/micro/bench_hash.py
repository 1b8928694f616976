"""The hash chain: the one thing done per block, compiled and in Python side by side."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvstore.hash_chain import IS_COMPILED, hash_chain, hash_chain_in_python
from kvstore.identity import HashChain, hash_blocks, namespace_digest, packed_tokens

KEY = bytes(range(32))
PARTS = {"model": b"m", "weights": b"w", "dtype": b"float32", "block_tokens": b"32", "groups": b"g"}


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_hash_1024_blocks(benchmark: BenchmarkFixture, block_tokens: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 1024 * block_tokens, dtype=np.uint32)
    hashes = benchmark(hash_blocks, KEY, bytes(16), tokens, block_tokens)
    assert len(hashes) == 1024


@pytest.mark.parametrize("how", ["compiled", "python"])
def test_chain_of_131072_tokens(benchmark: BenchmarkFixture, how: str) -> None:
    """4,096 blocks of 32 tokens, from an array to packed hashes."""
    if how == "compiled" and not IS_COMPILED:
        pytest.skip("the hash chain was built without a C compiler")
    chain = hash_chain if how == "compiled" else hash_chain_in_python
    data = np.random.default_rng(0).integers(0, 128_256, 131_072, dtype=np.uint32).tobytes()
    assert len(benchmark(chain, KEY, bytes(16), data, 128)) == 4096 * 16


def test_pack_131072_tokens_of_a_list(benchmark: BenchmarkFixture) -> None:
    tokens = np.random.default_rng(0).integers(0, 128_256, 131_072).tolist()
    assert len(benchmark(packed_tokens, tokens)) == 131_072


def test_extend_a_conversation_of_4096_blocks_by_one(benchmark: BenchmarkFixture) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 32, dtype=np.uint32)
    chain = HashChain(KEY, 32, np.tile(tokens, 4096))
    benchmark(chain.extend, tokens)
    assert len(chain) > 4096


def test_digest_of_a_namespace(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(namespace_digest, PARTS)) == 32
