"""Steps: seals, copies and releases, each of which may be said twice, late, or wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import FailedPrecondition
from kvstore.layout import Tier
from kvstore.moves import Outcome, SealOutcome
from tests.kvstore.store_rig import PAGE, Rig, chain, copies

PUBLISHED, DUPLICATE, STALE = SealOutcome.PUBLISHED, SealOutcome.DUPLICATE, SealOutcome.STALE


def test_a_seal_twice_is_published_twice() -> None:
    """A client that resumes says again what was not answered."""
    rig = Rig()
    one = rig.attach()
    grant = rig.acquire(one, chain(3))
    seals = rig.seals(one, chain(3), grant.hbm_slots, grant.hbm_generations)
    assert rig.step(one, seals=seals) == [PUBLISHED] * 3
    assert rig.step(one, seals=seals) == [PUBLISHED] * 3
    assert rig.step(one, seals=np.concatenate((seals, seals))) == [PUBLISHED] * 6
    rig.check()


def test_the_second_of_two_equal_blocks_stays_private() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.fill(one, chain(2))
    grant = rig.acquire(other, chain(0), reserve=2)
    seals = rig.seals(other, chain(2), grant.reserve_slots, grant.reserve_generations)
    assert rig.step(other, seals=seals) == [DUPLICATE] * 2
    assert rig.step(other, seals=seals) == [DUPLICATE] * 2
    rig.check()
    rig.step(other, hbm=grant.reserve_slots)
    assert rig.tier(Tier.HBM).free_slots == 14
    rig.check()


def test_one_block_under_two_slots_of_one_message() -> None:
    rig = Rig()
    one = rig.attach()
    grant = rig.acquire(one, chain(0), reserve=2)
    seals = rig.seals(
        one, np.concatenate((chain(1), chain(1))), grant.reserve_slots, grant.reserve_generations
    )
    assert rig.step(one, seals=seals) == [PUBLISHED, DUPLICATE]
    rig.check()


def test_seals_of_what_is_not_held_are_stale() -> None:
    """Elsewhere a stale handle published a slot that belonged to somebody else by then."""
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    grant = rig.acquire(one, chain(2))
    seals = rig.seals(one, chain(2), grant.hbm_slots, grant.hbm_generations)
    assert rig.step(other, seals=seals) == [STALE] * 2  # another session's
    wrong = seals.copy()
    wrong["generation"] += 1
    assert rig.step(one, seals=wrong) == [STALE] * 2  # another generation
    wrong["slot"] = [4_000_000_000, 77]
    assert rig.step(one, seals=wrong) == [STALE] * 2  # no slot at all, and one in no extent
    wrong = seals.copy()
    wrong["namespace"] = 3
    assert rig.step(one, seals=wrong) == [STALE] * 2  # a namespace that was not opened
    rig.step(one, hbm=grant.hbm_slots)
    assert rig.step(one, seals=seals) == [STALE] * 2  # given back
    rig.check()
    assert rig.outcomes(one, chain(2)) == [Outcome.MISS] * 2


def test_a_slot_sealed_as_another_block_than_it_was_reserved_for() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    grant = rig.acquire(one, chain(2))
    rig.acquire(other, chain(2), lease=4)
    swapped = rig.seals(one, chain(2)[::-1], grant.hbm_slots, grant.hbm_generations)
    assert rig.step(one, seals=swapped) == [PUBLISHED] * 2
    assert rig.store.take_changed() == [(other, [4])]
    rig.check()


def test_a_sealed_slot_cannot_be_sealed_as_another_block() -> None:
    rig = Rig()
    one = rig.attach()
    grant = rig.fill(one, chain(1), keep=True)
    again = rig.seals(one, chain(1, seed=1), grant.hbm_slots, grant.hbm_generations)
    assert rig.step(one, seals=again) == [STALE]
    rig.check()


def test_releasing_a_slot_to_fill_takes_its_reservation_back() -> None:
    rig = Rig()
    one = rig.attach()
    grant = rig.acquire(one, chain(4))
    rig.step(one, hbm=grant.hbm_slots[2:])
    rig.check()
    assert rig.store.stats().rows == 2
    assert rig.tier(Tier.HBM).free_slots == 14
    rig.step(one, hbm=grant.hbm_slots)  # two of them again: they are not its own any more
    assert rig.tier(Tier.HBM).free_slots == 16
    rig.check()


def test_a_release_never_overtakes_a_grant() -> None:
    """Elsewhere a release that was on its way freed slots that had just been granted again."""
    rig = Rig()
    one = rig.attach()
    first = rig.fill(one, chain(3), keep=True)
    seen = rig.message
    again = rig.acquire(one, chain(3))  # granted; not read yet
    assert again.hbm_slots.tolist() == first.hbm_slots.tolist()
    rig.step(one, hbm=first.hbm_slots, seen=seen)  # decided before
    held = rig.store._state.hbm.held_by(np.uint64(1 << one))
    assert held.tolist() == first.hbm_slots.tolist()
    rig.step(one, hbm=again.hbm_slots)  # decided after
    assert len(rig.store._state.hbm.held_by(np.uint64(1 << one))) == 0
    rig.check()


def test_a_release_of_what_another_session_holds_does_nothing() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    grant = rig.acquire(one, chain(2))
    rig.step(other, hbm=np.append(grant.hbm_slots, np.uint32(4_000_000_000)))
    assert rig.tier(Tier.HBM).filling_slots == 2
    rig.check()


def test_write_through_makes_a_second_copy() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(3))
    assert rig.tier(Tier.DRAM).sealed_slots == 3
    rig.evict_hbm()
    assert rig.outcomes(one, chain(3)) == [Outcome.HIT_DRAM] * 3
    rig.check()


def test_copies_that_cannot_be_true_are_passed_over() -> None:
    """A copy of a slot that was not held may have read anything: it must not become a block."""
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    grant = rig.fill(one, chain(2), keep=True)
    room = rig.room(one, 2)
    good = copies(grant.hbm_slots, grant.hbm_generations, room.dram_slots, room.dram_generations)
    unheld = good.copy()
    rig.step(one, hbm=grant.hbm_slots)
    rig.step(one, stores=unheld)  # the source is held no more
    wrong = good.copy()
    wrong["source_generation"] += 1
    rig.step(one, stores=wrong)
    rig.step(other, stores=good)
    wrong["source"] = 4_000_000_000
    rig.step(one, stores=wrong, loads=wrong)
    assert rig.tier(Tier.DRAM).sealed_slots == 0
    rig.check()


def test_a_store_twice_and_of_one_block_into_two_slots() -> None:
    rig = Rig()
    one = rig.attach()
    grant = rig.fill(one, chain(1), keep=True)
    room = rig.room(one, 2)
    source = np.repeat(grant.hbm_slots, 2), np.repeat(grant.hbm_generations, 2)
    both = copies(*source, room.dram_slots, room.dram_generations)
    rig.step(one, stores=both)
    rig.step(one, stores=both)
    assert rig.tier(Tier.DRAM).sealed_slots == 1
    assert rig.tier(Tier.DRAM).filling_slots == 1  # private, until it is released
    rig.step(one, dram=room.dram_slots)
    assert rig.tier(Tier.DRAM).free_slots == 15
    rig.check()


def test_a_load_into_a_slot_reserved_for_another_block() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.write_through(one, chain(1))
    rig.evict_hbm()
    load = rig.acquire(one, chain(1))
    fill = rig.acquire(one, chain(1, seed=1))
    rig.acquire(other, chain(1, seed=1), lease=6)
    rig.step(one, loads=copies(load.dram_slots, load.dram_generations, fill.hbm_slots, fill.hbm_generations))
    assert rig.store.take_changed() == [(other, [6])]
    rig.check()


def test_a_session_that_is_not_attached_says_nothing() -> None:
    rig = Rig()
    one = rig.attach()
    rig.store.lost(one, rig.now_ms)
    with pytest.raises(FailedPrecondition):
        rig.step(one)
    with pytest.raises(FailedPrecondition):
        rig.acquire(one, chain(1))
    assert rig.store.top_up(one, 1) is None


def test_explain_says_why() -> None:
    rig = Rig()
    one = rig.attach()
    namespace = rig.namespaces[one]
    assert rig.store.explain(namespace=namespace, hashes=chain(2)).cause == "never stored"
    grant = rig.acquire(one, chain(2))
    assert rig.store.explain(namespace=namespace, hashes=chain(2)).cause == "being filled"
    rig.step(one, hbm=grant.hbm_slots)
    rig.write_through(one, chain(2))
    told = rig.store.explain(namespace=namespace, hashes=chain(3))
    assert (told.cached_blocks, told.cause, told.blocks_by_tier) == (2, "never stored", {"hbm": 2})
    rig.evict_hbm()
    told = rig.store.explain(namespace=namespace, hashes=chain(2))
    assert (told.cached_blocks, told.cause, told.blocks_by_tier) == (2, "", {"dram": 2})
    rig.evict_dram()
    assert rig.store.explain(namespace=namespace, hashes=chain(2)).cause == "evicted"
    rig.fill(one, chain(2))
    assert rig.store.clear(None).removed == 2
    assert rig.store.explain(namespace=namespace, hashes=chain(2)).cause == "cleared"


def test_clear_keeps_what_is_held() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach(digest=b"another".ljust(32, b"."))
    held = rig.fill(one, chain(2), keep=True)
    rig.fill(one, chain(2, seed=1))
    rig.fill(other, chain(2, seed=2))
    rig.acquire(one, chain(1, seed=3))
    result = rig.store.clear(rig.namespaces[one])
    assert (result.removed, result.kept) == (2, 3)
    assert rig.outcomes(other, chain(2, seed=2)) == [Outcome.HIT_HBM] * 2
    assert rig.acquire(one, chain(2)).hbm_slots.tolist() == held.hbm_slots.tolist()
    rig.check()


def test_pins_keep_the_last_copy_until_their_time() -> None:
    rig = Rig(hbm=4, dram=0, nvme=0)
    one = rig.attach()
    rig.fill(one, chain(2))
    namespace = rig.namespaces[one]
    assert rig.store.pin(now_ms=rig.now_ms, namespace=namespace, hashes=chain(3), ttl_ms=1000) == 2
    assert rig.store.pin(now_ms=rig.now_ms, namespace=namespace, hashes=chain(1), ttl_ms=5000) == 1
    grant = rig.acquire(one, chain(4, seed=1))
    assert grant.outcomes.tolist() == [Outcome.MISS] * 2 + [Outcome.NO_SLOT] * 2
    rig.step(one, hbm=grant.hbm_slots)
    rig.store.tick(rig.now_ms + 2000)
    assert len(rig.acquire(one, chain(4, seed=1), lease=2).hbm_slots) == 4
    rig.check()
    assert rig.store.unpin(namespace=namespace, hashes=chain(1)) == 1
    rig.check()


def test_hbm_extents_are_whole_numbers_of_slots() -> None:
    rig = Rig(hbm=0)
    with pytest.raises(Exception, match="whole number"):
        rig.store.add_extent(tier=Tier.HBM, device=0, nbytes=3 * PAGE, slot_bytes=2 * PAGE)
    assert rig.store.extents(Tier.HBM) == []


def test_blocks_that_are_sealed_together_know_their_parents() -> None:
    """Of blocks sealed in one step without an acquire only the first knew its parent."""
    rig = Rig()
    session = rig.attach(device=None)
    hashes = chain(4)
    room = rig.room(session, 4)
    rig.step(session, seals=rig.seals(session, hashes, room.dram_slots, room.dram_generations))
    columns = rig.store._state.columns
    rows = rig.store._state.table.locate(hashes, rig.namespaces[session])
    assert columns.parent[rows].tolist() == [0xFFFFFFFF, *rows[:3].tolist()]
