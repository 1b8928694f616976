"""The pure store: acquire, touch, fill, attach."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.blocks import SMALL
from bench.tables import FilledStore
from kvstore.moves import Grant, Outcome

ROUNDS = 60


@pytest.mark.parametrize("blocks", [1, 1024, 4096])
def test_acquire_hits(benchmark: BenchmarkFixture, filled: FilledStore, blocks: int) -> None:
    """The release of the call before is not timed."""
    chains = itertools.cycle([chain[:blocks] for chain in filled.chains if len(chain) >= blocks])
    grants: list[Grant] = []

    def release() -> tuple[tuple[object], dict[str, object]]:
        if grants:
            filled.step(released=grants.pop().hbm_slots)
        return (next(chains),), {}

    def acquire(chain: np.ndarray) -> None:
        grants.append(filled.acquire(chain))

    benchmark.pedantic(acquire, setup=release, rounds=ROUNDS)  # type: ignore[no-untyped-call]
    assert (grants[0].outcomes == Outcome.HIT_HBM).all()
    filled.step(released=grants.pop().hbm_slots)


def test_touch_4096(benchmark: BenchmarkFixture, filled: FilledStore) -> None:
    """An acquire from behind the end of a chain holds nothing and touches all of it."""
    chain = filled.chains[5]
    grant = benchmark(filled.acquire, chain, first=len(chain))
    assert len(grant.outcomes) == 0


@pytest.mark.parametrize("blocks", [64, 4096])
def test_store_and_evict(benchmark: BenchmarkFixture, blocks: int) -> None:
    """A full store: each new chain is acquired, sealed and released, and takes the place of another one."""
    full = FilledStore(50_000)
    rng = np.random.default_rng(3)
    chains = [
        rng.integers(0, 1 << 64, (blocks, 2), dtype=np.uint64) for _ in range(ROUNDS + 20_000 // blocks)
    ]
    new = iter(chains)
    for _ in range(20_000 // blocks):
        full.put(next(new))
    benchmark.pedantic(full.put, setup=lambda: ((next(new),), {}), rounds=ROUNDS)  # type: ignore[no-untyped-call]


def test_attach_and_detach(benchmark: BenchmarkFixture, filled: FilledStore) -> None:
    def attach() -> None:
        session = filled.store.attach(
            now_ms=filled.now_ms,
            name="another",
            token_digest=bytes(range(1, 17)),
            device=0,
            slot_bytes=SMALL.slot_bytes,
            members=1,
        )
        filled.store.activate(session)
        filled.store.detach(session, filled.now_ms)

    benchmark(attach)
