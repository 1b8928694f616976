"""Sessions: lost, resumed by statement, stopped, dead; and the daemon that dies beneath them."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import FailedPrecondition, NotFound, ResourceExhausted
from kvstore.layout import Tier
from kvstore.moves import Outcome
from tests.kvstore.store_rig import NO_SLOTS, PAGE, Rig, chain, copies


def held(rig: Rig, session: int, tier: Tier = Tier.HBM) -> list[int]:
    """Slots that the tables say a session holds."""
    slots: list[int] = rig.store._state.pool(tier).held_by(np.uint64(1 << session)).tolist()
    return slots


def test_a_dead_worker_leaves_its_sealed_blocks_and_frees_the_rest() -> None:
    """Elsewhere killed workers leaked GPU memory, and half-filled blocks stayed visible."""
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.fill(one, chain(3), keep=True)
    rig.acquire(one, chain(3, seed=1), reserve=2)
    rig.acquire(other, chain(3, seed=1), lease=8)
    assert rig.store.dead(one, rig.now_ms) == 8
    rig.check()
    assert rig.store.take_changed() == [(other, [8])]
    assert rig.tier(Tier.HBM).free_slots == 13
    assert rig.outcomes(other, chain(3)) == [Outcome.HIT_HBM] * 3
    with pytest.raises(NotFound):
        rig.acquire(one, chain(1))


def test_the_next_worker_hits_what_the_dead_one_left() -> None:
    rig = Rig()
    one = rig.attach()
    rig.fill(one, chain(4), keep=True)
    rig.store.dead(one, rig.now_ms)
    assert rig.tier(Tier.HBM).orphan_slots == 4
    assert rig.outcomes(rig.attach(), chain(4)) == [Outcome.HIT_HBM] * 4
    assert rig.tier(Tier.HBM).orphan_slots == 0


def test_a_lost_session_keeps_its_slots_and_loses_its_reservations() -> None:
    """Elsewhere leases expired under a stopped but living process, whose late DMA then hit other blocks."""
    rig = Rig(hbm=8, dram=0, nvme=0)
    one, other = rig.attach(), rig.attach()
    sealed = rig.fill(one, chain(2), keep=True)
    filling = rig.acquire(one, chain(2, seed=1), reserve=1)
    rig.acquire(other, chain(2, seed=1), lease=8)
    rig.store.lost(one, rig.now_ms)
    rig.check()
    assert rig.store.take_changed() == [(other, [8])]
    mine = {*sealed.hbm_slots.tolist(), *filling.hbm_slots.tolist(), *filling.reserve_slots.tolist()}
    assert set(held(rig, one)) == mine
    for seed in range(1, 9):  # the others go on for as long as they like
        grant = rig.acquire(other, chain(3, seed=seed), lease=9)
        assert not mine & set(grant.hbm_slots.tolist())
        rig.step(other, hbm=grant.hbm_slots)
        rig.store.tick(rig.now_ms + 3_600_000)
        rig.check()


def test_resume_frees_what_is_not_stated() -> None:
    """The answer to a grant was lost: its slots must come back."""
    rig = Rig()
    one = rig.attach()
    known = rig.fill(one, chain(2), keep=True)
    rig.acquire(one, chain(3, seed=1), reserve=2)  # the answer never arrived
    rig.store.lost(one, rig.now_ms)
    rig.resume(one, hbm=known)
    assert held(rig, one) == known.hbm_slots.tolist()
    assert rig.tier(Tier.HBM).free_slots == 14
    rig.check()
    assert rig.outcomes(one, chain(2, seed=1)) == [Outcome.MISS] * 2


def test_a_statement_of_slots_that_are_not_its_own_grants_nothing() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    theirs = rig.fill(one, chain(2), keep=True)
    rig.store.lost(other, rig.now_ms)
    rig.resume(other, hbm=theirs)
    assert held(rig, other) == []
    rig.store.resume(
        now_ms=rig.now_ms,
        session=other,
        hbm_slots=np.array([4_000_000_000, 1], dtype=np.uint32),
        hbm_gens=np.array([0, 99], dtype=np.uint32),
        dram_slots=NO_SLOTS,
        dram_gens=NO_SLOTS,
    )
    assert held(rig, other) == []
    rig.check()


def test_after_a_crash_of_the_daemon_sealed_is_hit_and_filled_is_not() -> None:
    rig = Rig()
    one = rig.attach()
    sealed = rig.fill(one, chain(3), keep=True)
    filling = rig.acquire(one, chain(2, seed=1))
    rig.recover()
    rig.check()
    assert rig.store.find_session((1).to_bytes(16, "little")) == one
    assert set(held(rig, one)) == {*sealed.hbm_slots.tolist(), *filling.hbm_slots.tolist()}
    with pytest.raises(FailedPrecondition):
        rig.acquire(one, chain(1))
    with pytest.raises(FailedPrecondition):
        rig.store.activate(one)
    rig.store.resume(
        now_ms=rig.now_ms,
        session=one,
        hbm_slots=np.concatenate((sealed.hbm_slots, filling.hbm_slots)),
        hbm_gens=np.concatenate((sealed.hbm_generations, filling.hbm_generations)),
        dram_slots=NO_SLOTS,
        dram_gens=NO_SLOTS,
    )
    namespace = rig.store.open_namespace(one, b"namespace".ljust(32, b"."))
    assert namespace == rig.namespaces[one]
    # It goes on filling where it was, and its seal publishes.
    seals = rig.seals(one, chain(2, seed=1), filling.hbm_slots, filling.hbm_generations)
    assert rig.step(one, seals=seals) == [0, 0]
    rig.step(one, hbm=np.concatenate((sealed.hbm_slots, filling.hbm_slots)))
    assert rig.outcomes(one, chain(3)) == [Outcome.HIT_HBM] * 3
    assert rig.outcomes(one, chain(2, seed=1)) == [Outcome.HIT_HBM] * 2
    rig.check()


def test_a_session_some_of_whose_processes_are_dead_does_not_resume() -> None:
    rig = Rig()
    one = rig.attach()
    grant = rig.acquire(one, chain(2))
    rig.store.dying(one, rig.now_ms)
    with pytest.raises(FailedPrecondition):
        rig.resume(one, hbm=grant)
    assert held(rig, one) == grant.hbm_slots.tolist()
    rig.check()
    rig.store.dead(one, rig.now_ms)
    assert rig.tier(Tier.HBM).free_slots == 16


def test_sessions_are_bounded() -> None:
    rig = Rig()
    for _ in range(8):
        rig.attach()
    with pytest.raises(ResourceExhausted):
        rig.attach()
    rig.store.detach(3, rig.now_ms)
    assert rig.attach() == 3


def test_namespaces_are_bounded_and_those_nobody_uses_are_taken_over() -> None:
    rig = Rig()
    one = rig.attach()
    rig.fill(one, chain(1))
    for number in range(3):
        session = rig.attach(digest=bytes([number + 1]) * 32)
        if number:
            rig.fill(session, chain(1, seed=number))
        rig.store.detach(session, rig.now_ms)
    last = rig.attach(digest=b"x" * 32)  # takes the place of the one without blocks
    assert rig.namespaces[last] == 1
    with pytest.raises(ResourceExhausted):
        rig.store.open_namespace(last, b"y" * 32)
    assert rig.outcomes(last, chain(1)) == [Outcome.MISS]
    rig.check()


def test_orphan_hbm_is_not_evicted_but_dropped() -> None:
    rig = Rig(hbm=4, dram=0, nvme=0)
    one = rig.attach()
    rig.fill(one, chain(4))
    rig.store.dead(one, rig.now_ms)
    rig.store.tick(rig.now_ms)
    assert rig.tier(Tier.HBM).sealed_slots == 4
    large = rig.attach(slot_bytes=2 * PAGE)
    grant = rig.acquire(large, chain(1, seed=1))
    assert grant.outcomes.tolist() == [Outcome.NO_SLOT]  # another class: its memory is not this
    (orphan,) = rig.store.extents(Tier.HBM)
    assert orphan.nbytes == 4 * PAGE
    rig.store.drop_extent(orphan.extent)
    rig.store.tick(rig.now_ms)
    assert rig.store.stats().rows == 0
    rig.check()
    assert rig.store.explain(namespace=rig.namespaces[one], hashes=chain(1)).cause == "dropped"
    rig.store.add_extent(tier=Tier.HBM, device=0, nbytes=4 * PAGE, slot_bytes=2 * PAGE)
    assert rig.store.take_changed() == [(large, [1])]
    assert rig.acquire(large, chain(1, seed=1)).outcomes.tolist() == [Outcome.MISS]


def test_slots_of_a_dropped_extent_are_never_taken_for_what_they_were() -> None:
    rig = Rig(hbm=4, dram=0, nvme=0)
    one = rig.attach()
    grant = rig.acquire(one, chain(2))
    rig.store.lost(one, rig.now_ms)
    extent = rig.store.extents(Tier.HBM)[0].extent
    rig.store.drop_extent(extent)  # after a restart: its descriptor was not there
    rig.store.add_extent(tier=Tier.HBM, device=0, nbytes=4 * PAGE, slot_bytes=PAGE)
    rig.resume(one, hbm=grant)
    assert held(rig, one) == []
    seals = rig.seals(one, chain(2), grant.hbm_slots, grant.hbm_generations)
    assert rig.step(one, seals=seals) == [2, 2]
    rig.check()


def test_an_extent_that_an_attached_session_uses_is_not_dropped() -> None:
    rig = Rig()
    rig.acquire(rig.attach(), chain(1))
    with pytest.raises(FailedPrecondition):
        rig.store.drop_extent(rig.store.extents(Tier.HBM)[0].extent)
    rig.check()


def test_dead_during_a_load() -> None:
    """The row of a block that was being loaded stays, and so does its DRAM copy."""
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.write_through(one, chain(2))
    rig.evict_hbm()
    grant = rig.acquire(one, chain(2))
    assert grant.outcomes.tolist() == [Outcome.HIT_DRAM] * 2
    rig.store.dead(one, rig.now_ms)
    rig.check()
    again = rig.acquire(other, chain(2))
    assert again.outcomes.tolist() == [Outcome.HIT_DRAM] * 2
    rig.step(
        other, loads=copies(again.dram_slots, again.dram_generations, again.hbm_slots, again.hbm_generations)
    )
    rig.check()


def test_a_private_slot_of_two_readers_stays_until_both_let_go() -> None:
    """A release freed a slot that another session still held, after recovery had made it a private slot of both."""
    rig = Rig(hbm=4, dram=0, nvme=0)
    one, other = rig.attach(), rig.attach()
    slot = rig.fill(one, chain(1), keep=True).hbm_slots
    assert rig.acquire(other, chain(1)).outcomes.tolist() == [Outcome.HIT_HBM]
    columns = rig.store._state.columns
    columns.state[:] = 0  # the row is lost, the slot is not
    rig.recover()
    assert held(rig, one) == held(rig, other) == slot.tolist()
    rig.store.detach(one, rig.now_ms)
    assert held(rig, other) == slot.tolist()
    assert rig.tier(Tier.HBM).free_slots == 3
    rig.store.detach(other, rig.now_ms)
    rig.check()
    assert rig.tier(Tier.HBM).free_slots == 4
