"""Choosing victims in a class too large to be looked at as a whole; the reserve that the background keeps."""

from __future__ import annotations

import numpy as np

from bench.tables import FilledStore
from kvstore.layout import NONE, Tier, touch_key
from kvstore.moves import Outcome, StoreLimits
from kvstore.tables.slots import ClassKey
from tests.kvstore.store_rig import PAGE, Rig
from tests.kvstore.store_rig import chain as prompt

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


def test_the_background_begins_at_the_low_mark_and_goes_on_to_the_high_one() -> None:
    """Topped up at every tick, a tier paid a search for victims for each slot that had been taken."""
    rig = Rig(hbm=0, dram=200, nvme=0, limits=StoreLimits(reserve_fraction=0.2, reserve_slots=1))
    one = rig.attach(device=None)
    key = ClassKey(device=0, slot_bytes=PAGE)
    owner = rig.store._evictor.make_room(Tier.DRAM, key, 1)
    assert rig.store._evictor.reserve_of(owner) == 40
    in_dram(rig, one, 150)  # the high mark is not reached, the low one is not either
    rig.store.tick(rig.now_ms)
    assert len(owner.free) == 50
    in_dram(rig, one, 15, seed=1)
    rig.store.tick(rig.now_ms)
    assert len(owner.free) == 35, "between the marks nothing is evicted"
    in_dram(rig, one, 16, seed=2)
    rig.store.tick(rig.now_ms)
    assert len(owner.free) == 40
    assert rig.counter("evictions_dram") == 21
    assert rig.counter("evictions_dram_inline") == 0
    rig.check()


def test_the_reserve_of_hbm_is_not_taken_from_what_a_queued_request_wants() -> None:
    """At each turn of the background a request that waited lost blocks which then had to come from the disk again."""
    rig = Rig(hbm=8, limits=StoreLimits(reserve_fraction=0.0, reserve_slots=2))
    one = rig.attach()
    rig.write_through(one, prompt(1, seed=1))
    rig.write_through(one, prompt(7))
    rig.store.prefetch(
        now_ms=rig.now_ms,
        session=one,
        namespace=rig.namespaces[one],
        lease=2,
        hashes=prompt(7),
        deadline_ms=0,
    )
    rig.store.tick(rig.now_ms)
    assert rig.counter("evictions_hbm") == 1, "the block that nobody wants"
    rig.store.cancel(one, 2)
    rig.store.tick(rig.now_ms)
    assert rig.counter("evictions_hbm") == 2
    rig.check()


def test_an_eviction_that_somebody_waits_for_is_counted() -> None:
    rig = Rig(hbm=0, dram=32, nvme=0, limits=StoreLimits(reserve_fraction=0.0, reserve_slots=0))
    one = rig.attach(device=None)
    in_dram(rig, one, 30)
    rig.store.tick(rig.now_ms)
    in_dram(rig, one, 10, seed=1)
    assert rig.counter("evictions_dram_inline") == rig.counter("evictions_dram") >= 8
    rig.check()


def in_dram(rig: Rig, session: int, count: int, seed: int = 0) -> None:
    """An engine without HBM of ours brings a prompt straight into DRAM."""
    room = rig.room(session, count)
    hashes = prompt(count, seed=seed)
    state = rig.store._state
    rows = state.table.reserve(
        hashes=hashes,
        namespaces=np.full(count, rig.namespaces[session], dtype=np.uint32),
        depths=np.arange(count, dtype=np.uint32),
        parents=np.full(count, NONE, dtype=np.uint32),
        touches=touch_key(rig.now_ms, np.arange(count, dtype=np.uint32)),
    )
    state.complete(Tier.DRAM, rows, room.dram_slots, 0)
    state.table.publish(rows)
    rig.step(session, dram=room.dram_slots)
