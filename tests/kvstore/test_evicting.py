"""Choosing victims in a class too large to be looked at as a whole."""

from __future__ import annotations

import numpy as np

from bench.tables import FilledStore
from kvstore.moves import Outcome

CHAIN = 4096


def test_a_large_class_gives_up_its_oldest_chains_and_keeps_what_is_used() -> None:
    """The search looks at a sample and at a few windows; what is in use everywhere else must not pay for that."""
    filled = FilledStore(30 * CHAIN)
    rng = np.random.default_rng(1)
    hot = filled.chains[3::10]
    for _ in range(60):
        filled.put(rng.integers(0, 1 << 64, (1024, 2), dtype=np.uint64))
        for chain in hot:
            grant = filled.acquire(chain)
            assert (grant.outcomes == Outcome.HIT_HBM).all(), "what is used after each store stays"
            filled.step(released=grant.hbm_slots)
        filled.store.tick(filled.now_ms)
    assert filled.store.stats().counters["evictions_hbm"] > 40_000
    cold = [filled.match(chain) for chain in filled.chains if not any(chain is used for used in hot)]
    assert cold[0] < CHAIN
    assert sum(hits == CHAIN for hits in cold) > len(cold) // 3, "no more went than had to"
    newest, oldest = sum(cold[-8:]), sum(cold[:8])
    assert newest > oldest
    assert filled.store.check_integrity() == []
