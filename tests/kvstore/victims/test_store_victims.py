"""What leaves a tier, and extents that change their class: the store itself."""

from __future__ import annotations

import pytest

import kvstore.victims.by_key
from kvstore.errors import InvalidArgument
from kvstore.layout import ExtentState, SlotState, Tier
from kvstore.moves import Outcome, StoreLimits
from tests.kvstore.store_rig import PAGE, Rig, chain

HBM, DRAM, MISS, PROMOTING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.MISS, Outcome.PROMOTING


# ------------------------------------------------------------ victims


def test_the_tail_of_the_oldest_prompt_goes_first() -> None:
    rig = Rig(hbm=8, dram=0, nvme=0)
    one = rig.attach()
    rig.fill(one, chain(4))
    rig.fill(one, chain(4, seed=1))
    rig.outcomes(one, chain(4))  # used again
    rig.acquire(one, chain(2, seed=2), lease=2)
    assert rig.outcomes(one, chain(4)) == [HBM] * 4
    grant = rig.acquire(one, chain(4, seed=1), lease=3)
    assert grant.outcomes.tolist()[:2] == [HBM] * 2  # its head is still there
    rig.check()


def test_hbm_victims_are_what_is_also_lower() -> None:
    rig = Rig(hbm=8)
    one = rig.attach()
    rig.fill(one, chain(4))  # in HBM alone, and older
    rig.write_through(one, chain(4, seed=1))
    grant = rig.acquire(one, chain(3, seed=2), lease=2)
    rig.step(one, hbm=grant.hbm_slots)
    assert rig.outcomes(one, chain(4)) == [HBM] * 4
    assert rig.counter("evictions_hbm") == 3
    assert rig.counter("evictions_hbm_last_copy") == 0
    rig.check()


def test_dram_victims_are_what_is_also_on_nvme() -> None:
    rig = Rig(dram=4)
    one = rig.attach()
    rig.write_through(one, chain(2))
    rig.write_down()
    rig.write_through(one, chain(2, seed=1))
    rig.write_through(one, chain(2, seed=2))  # needs two slots
    assert rig.counter("evictions_dram") == 2
    state = rig.store._state
    rows = state.table.find(chain(2), rig.namespaces[one])
    assert (state.columns.dram[rows] == 0xFFFFFFFF).all()
    rig.check()


def test_full_tiers_evict_and_never_fail() -> None:
    rig = Rig(hbm=4, dram=4, nvme=4)
    one = rig.attach()
    for seed in range(10):
        assert rig.fill(one, chain(3, seed=seed)).outcomes.tolist() == [MISS] * 3
        rig.write_through(one, chain(3, seed=seed))
        rig.write_down()
        rig.check()
    assert rig.counter("evictions_nvme") > 0
    assert rig.counter("evictions_nvme_last_copy") > 0
    assert rig.tier(Tier.NVME).sealed_slots == 4 - rig.tier(Tier.NVME).free_slots


def test_the_background_keeps_a_reserve() -> None:
    """Elsewhere every store evicted in line."""
    rig = Rig(hbm=64, dram=0, nvme=0, limits=StoreLimits(reserve_slots=8))
    one = rig.attach()
    rig.fill(one, chain(64))
    assert rig.tier(Tier.HBM).free_slots == 0
    rig.store.tick(rig.now_ms)
    assert rig.tier(Tier.HBM).free_slots == 8
    evicted = rig.counter("evictions_hbm")
    rig.fill(one, chain(8, seed=1))
    assert rig.counter("evictions_hbm") == evicted
    rig.check()


def test_victims_of_a_large_class_are_old_and_found_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.victims.by_key, "_WINDOW_SLOTS", 16)
    monkeypatch.setattr(kvstore.victims.by_key, "_SAMPLE_SLOTS", 64)
    rig = Rig(hbm=128, dram=0, nvme=0, limits=StoreLimits(victim_batch=8))
    one = rig.attach()
    for seed in range(16):
        rig.fill(one, chain(8, seed=seed))
    for seed in range(8):  # the first half is used again
        rig.outcomes(one, chain(8, seed=seed))
    grant = rig.acquire(one, chain(16, seed=100), lease=2)
    rig.step(one, hbm=grant.hbm_slots)
    for seed in range(8):
        assert rig.outcomes(one, chain(8, seed=seed)) == [HBM] * 8
    rig.check()
    # With everything held there is nothing to find, whatever the sample says.
    for seed in range(16):
        rig.acquire(one, chain(8, seed=seed), lease=seed)
    assert Outcome.NO_SLOT in rig.acquire(one, chain(128, seed=200), lease=99).outcomes
    rig.check()


# ------------------------------------------------------------ extents and classes


def test_dram_extents_take_a_class_on_demand_and_change_it_when_empty() -> None:
    rig = Rig(dram=0, nvme=0)
    rig.store.add_extent(tier=Tier.HBM, device=0, nbytes=8 * 2 * PAGE, slot_bytes=2 * PAGE)
    for _ in range(4):
        rig.store.add_extent(tier=Tier.DRAM, device=0, nbytes=4 * PAGE)
    small, large = rig.attach(), rig.attach(slot_bytes=2 * PAGE)
    rig.write_through(small, chain(16))
    assert {info.slot_bytes for info in rig.store.extents(Tier.DRAM)} == {PAGE}
    rig.step(large, want_room=2)
    rig.store.top_up(large, 1)
    rig.check()
    rig.store.tick(rig.now_ms)
    assert sorted(info.slot_bytes for info in rig.store.extents(Tier.DRAM)) == [PAGE, PAGE, PAGE, 2 * PAGE]
    slots = rig.store.top_up(large, 2)
    assert slots is not None
    assert len(slots.dram_slots) == 2
    rig.check()


def test_an_extent_drains_only_as_its_holders_let_go() -> None:
    rig = Rig(dram=0, nvme=0)
    rig.store.add_extent(tier=Tier.DRAM, device=0, nbytes=4 * PAGE)
    rig.store.add_extent(tier=Tier.DRAM, device=0, nbytes=4 * PAGE)
    small = rig.attach()
    large = rig.attach(device=None, slot_bytes=2 * PAGE)
    room = rig.room(small, 8)
    rig.step(large, want_room=1)
    assert rig.store.top_up(large, 1) is None
    rig.store.tick(rig.now_ms)
    states = [ExtentState(int(s)) for s in rig.store._state.columns.extent_state[:3]]
    assert states.count(ExtentState.DRAINING) == 1
    rig.check()
    rig.store.tick(rig.now_ms)
    assert rig.store.top_up(large, 2) is None
    rig.step(small, dram=room.dram_slots)
    rig.store.tick(rig.now_ms)
    assert rig.store.top_up(large, 3) is not None
    rig.check()


def test_a_drained_slot_is_stale_in_its_new_class() -> None:
    rig = Rig(dram=0, nvme=0)
    rig.store.add_extent(tier=Tier.DRAM, device=0, nbytes=4 * PAGE)
    one = rig.attach()
    room = rig.room(one, 1)
    generation = int(room.dram_generations[0])
    rig.step(one, dram=room.dram_slots)
    state = rig.store._state
    extent = rig.store.extents(Tier.DRAM)[0].extent
    state.dram.close_extent(extent)
    state.extents.drain(extent)
    rig.store.tick(rig.now_ms)
    assert rig.store.extents(Tier.DRAM)[0].slot_bytes == 0
    assert int(state.dram.generations(room.dram_slots)[0]) == generation + 1
    assert (state.dram.states(room.dram_slots) == SlotState.FREE).all()
    rig.check()


def test_impossible_extents_are_refused_and_leave_nothing() -> None:
    rig = Rig()
    before = len(rig.store.extents(Tier.DRAM))
    for wrong in (
        {"tier": Tier.DRAM, "device": 0, "nbytes": 1000},
        {"tier": Tier.HBM, "device": 0, "nbytes": PAGE},
        {"tier": Tier.HBM, "device": 7, "nbytes": PAGE, "slot_bytes": PAGE},
        {"tier": Tier.DRAM, "device": 0, "nbytes": PAGE, "slot_bytes": 100},
        {"tier": Tier.DRAM, "device": 0, "nbytes": PAGE, "extent": 0},
    ):
        with pytest.raises(InvalidArgument):
            rig.store.add_extent(**wrong)  # type: ignore[arg-type]
    assert len(rig.store.extents(Tier.DRAM)) == before
    rig.check()
