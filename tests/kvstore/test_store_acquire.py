"""Acquire: what is a hit, what is to be filled, what is waited for, and what is held before the answer."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from kvstore.layout import NONE, Tier
from kvstore.moves import MissCause, Outcome, StoreLimits
from tests.kvstore.store_rig import NO_SLOTS, PAGE, Rig, chain, copies

HBM, DRAM, MISS, PENDING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.MISS, Outcome.PENDING


def test_cold_prompt_is_filled_and_then_hit_by_others() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    grant = rig.acquire(one, chain(8), reserve=2)
    assert grant.outcomes.tolist() == [MISS] * 8
    assert len(set(grant.hbm_slots.tolist() + grant.reserve_slots.tolist())) == 10
    assert rig.step(one, seals=rig.seals(one, chain(8), grant.hbm_slots, grant.hbm_generations)) == [0] * 8
    again = rig.acquire(other, chain(8))
    assert again.outcomes.tolist() == [HBM] * 8
    assert again.hbm_slots.tolist() == grant.hbm_slots.tolist()  # shared, read-only
    rig.check()


def test_what_is_granted_is_held_before_the_answer() -> None:
    """Elsewhere a crash between reply and bookkeeping left slots in use that looked free."""
    rig = Rig()
    one = rig.attach()
    state = rig.store._state
    grant = rig.acquire(one, chain(4), reserve=1)
    given = np.concatenate((grant.hbm_slots, grant.reserve_slots))
    assert ((state.hbm.holders[given] >> np.uint64(one)) & np.uint64(1)).all()


def test_filled_is_not_sealed() -> None:
    """Elsewhere blocks were visible to others before they were complete."""
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.acquire(one, chain(4))
    grant = rig.acquire(other, chain(4))
    assert grant.outcomes.tolist() == [PENDING] * 4
    assert (grant.hbm_slots == NONE).all()
    rig.check()


def test_64_requests_compute_one_prompt_once() -> None:
    """Elsewhere 64 requests computed one system prompt 64 times."""
    rig = Rig(hbm=64)
    one = rig.attach()
    grants = [rig.acquire(one, chain(16), lease=lease) for lease in range(64)]
    fillers = [grant for grant in grants if Outcome.MISS in grant.outcomes]
    assert len(fillers) == 1
    assert all(set(grant.outcomes.tolist()) == {PENDING} for grant in grants[1:])
    assert rig.store.take_changed() == []
    first = fillers[0]
    seals = rig.seals(one, chain(16), first.hbm_slots, first.hbm_generations)
    rig.step(one, seals=seals[:8])
    assert rig.store.take_changed() == []  # not before all that they wait for has come
    rig.step(one, seals=seals[8:])
    assert rig.store.take_changed() == [(one, list(range(1, 64)))]
    for lease in range(1, 64):
        assert rig.acquire(one, chain(16), lease=lease).outcomes.tolist() == [HBM] * 16
    assert rig.tier(Tier.HBM).free_slots == 48
    rig.check()


def test_when_the_filler_aborts_one_of_the_others_fills() -> None:
    """Elsewhere an aborted request left its blocks pending for ever."""
    rig = Rig()
    one = rig.attach()
    grants = [rig.acquire(one, chain(4), lease=lease) for lease in range(5)]
    rig.step(one, hbm=grants[0].hbm_slots)
    assert rig.store.take_changed() == [(one, [1, 2, 3, 4])]
    outcomes = [set(rig.acquire(one, chain(4), lease=lease).outcomes.tolist()) for lease in range(1, 5)]
    assert outcomes == [{MISS}, {PENDING}, {PENDING}, {PENDING}]
    rig.check()


def test_a_longer_prompt_hits_the_shared_part_and_fills_the_rest() -> None:
    rig = Rig()
    one = rig.attach()
    rig.fill(one, chain(4))
    grant = rig.acquire(one, chain(7))
    assert grant.outcomes.tolist() == [HBM] * 4 + [MISS] * 3
    rig.check()


def test_blocks_behind_a_hole_are_computed_again_and_the_hole_is_filled() -> None:
    """A chain with a missing block in its middle (an I/O error, a dropped write) is a miss from there on, not wrong."""
    rig = Rig()
    one = rig.attach()
    rig.fill(one, chain(6))
    state = rig.store._state
    hole = state.table.find(chain(6)[2:3], rig.namespaces[one])
    state.drop_copies(Tier.HBM, state.columns.hbm[0, hole], MissCause.EVICTED)
    grant = rig.acquire(one, chain(6))
    assert grant.outcomes.tolist() == [HBM] * 2 + [MISS] * 4
    assert rig.step(one, seals=rig.seals(one, chain(6), grant.hbm_slots, grant.hbm_generations)[2:]) == [
        0,
        1,
        1,
        1,
    ]
    rig.check()


def test_no_blocks_reserve_only() -> None:
    """A prompt shorter than a block has no hash, and still needs slots to decode into."""
    rig = Rig()
    grant = rig.acquire(rig.attach(), chain(0), reserve=3)
    assert len(grant.outcomes) == 0
    assert len(grant.reserve_slots) == 3
    rig.check()


def test_first_leaves_out_what_the_client_holds() -> None:
    rig = Rig()
    one = rig.attach()
    rig.fill(one, chain(4))
    grant = rig.acquire(one, chain(6), first=3)
    assert grant.outcomes.tolist() == [HBM, MISS, MISS]
    rows = rig.store._state.table.locate(chain(6), rig.namespaces[one])
    assert (
        len(set((rig.store._state.columns.touch[rows] >> np.uint64(20)).tolist())) == 1
    )  # all touched together
    assert rig.store._state.columns.parent[rows[4]] == rows[3]
    rig.check()


def test_the_same_hash_in_another_namespace_is_a_miss() -> None:
    """Same tokens under another model, dtype, LoRA or salt must never be a hit, even were the keys to collide."""
    rig = Rig()
    one, other = rig.attach(), rig.attach(digest=b"another".ljust(32, b"."))
    rig.fill(one, chain(4))
    grant = rig.acquire(other, chain(4))
    assert grant.outcomes.tolist() == [MISS] * 4
    rig.check()


def test_a_namespace_must_be_opened_first() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach(digest=b"another".ljust(32, b"."))
    rig.namespaces[one] = rig.namespaces[other]
    with pytest.raises(FailedPrecondition):
        rig.acquire(one, chain(1))


def test_another_geometry_is_no_hit_under_the_same_namespace() -> None:
    """Elsewhere a changed layout read blocks of the old one."""
    rig = Rig()
    rig.store.add_extent(tier=Tier.HBM, device=0, nbytes=8 * 2 * PAGE, slot_bytes=2 * PAGE)
    small, large = rig.attach(), rig.attach(slot_bytes=2 * PAGE)
    rig.fill(small, chain(3))
    grant = rig.acquire(large, chain(3))
    assert grant.outcomes.tolist() == [MISS] * 3
    sizes = rig.store._state.hbm.slot_bytes(grant.hbm_slots)
    assert set(sizes.tolist()) == {2 * PAGE}
    rig.check()


def test_slots_are_of_the_sessions_own_device() -> None:
    rig = Rig(devices=2)
    rig.store.add_extent(tier=Tier.HBM, device=1, nbytes=8 * PAGE, slot_bytes=PAGE)
    near, far = rig.attach(device=0), rig.attach(device=1)
    rig.fill(near, chain(3))
    grant = rig.acquire(far, chain(3), reserve=1)
    assert grant.outcomes.tolist() == [MISS] * 3  # the other device's memory cannot be read from here
    assert set(rig.store._state.hbm.devices(np.append(grant.hbm_slots, grant.reserve_slots)).tolist()) == {1}
    assert rig.step(far, seals=rig.seals(far, chain(3), grant.hbm_slots, grant.hbm_generations)) == [1, 1, 1]
    rig.check()


def test_private_fill_waits_for_nobody() -> None:
    rig = Rig()
    one = rig.attach()
    rig.acquire(one, chain(4), lease=1)
    grant = rig.acquire(one, chain(4), lease=2, private=True)
    assert grant.outcomes.tolist() == [MISS] * 4
    # It is sooner than the one who had reserved the blocks.
    assert rig.step(one, seals=rig.seals(one, chain(4), grant.hbm_slots, grant.hbm_generations)) == [0] * 4
    rig.check()


def test_one_hash_twice_in_a_chain() -> None:
    """Not a chain that any engine makes; it must not enter a hash twice."""
    rig = Rig()
    one = rig.attach()
    twice = np.concatenate((chain(2), chain(2)))
    grant = rig.acquire(one, twice)
    assert grant.outcomes.tolist() == [MISS] * 4
    rig.check()
    assert sorted(rig.step(one, seals=rig.seals(one, twice, grant.hbm_slots, grant.hbm_generations))) == [
        0,
        0,
        1,
        1,
    ]
    rig.check()


def test_short_of_slots_nothing_is_given_from_the_first_that_lacks_one() -> None:
    rig = Rig(hbm=4, dram=0, nvme=0)
    one = rig.attach()
    grant = rig.acquire(one, chain(6), lease=7, reserve=2)
    assert grant.outcomes.tolist() == [MISS] * 4 + [Outcome.NO_SLOT] * 2
    assert len(grant.reserve_slots) == 0
    assert (grant.hbm_slots[4:] == NONE).all()
    assert rig.store.take_changed() == []
    rig.step(one, hbm=grant.hbm_slots[:2])
    assert rig.store.take_changed() == [(one, [7])]
    rig.check()


def test_a_lease_that_waits_for_slots_is_not_told_without_cause() -> None:
    """A wake-up at each look would turn a full cache into a storm of calls."""
    rig = Rig(hbm=6, dram=6, nvme=0)
    one = rig.attach()
    rig.write_through(one, chain(3))
    rig.evict_hbm()
    held = rig.acquire(one, chain(4, seed=1), lease=1)
    grant = rig.acquire(one, chain(3), lease=2)
    assert grant.outcomes.tolist() == [DRAM, DRAM, Outcome.NO_SLOT]
    assert (grant.dram_slots[2:] == NONE).all()
    for _ in range(3):
        assert rig.store.take_changed() == []
    rig.check()
    rig.step(one, hbm=held.hbm_slots)
    assert rig.store.take_changed() == [(one, [2])]


def test_what_a_call_lets_go_itself_wakes_nobody() -> None:
    """A chain whose tail is in HBM and whose head has to be loaded into a full HBM would ask again and again."""
    rig = Rig(hbm=4, dram=4, nvme=0)
    one = rig.attach()
    rig.write_through(one, chain(2))
    rig.acquire(one, chain(2, seed=1), lease=1)
    state = rig.store._state
    head = state.table.find(chain(1), rig.namespaces[one])
    state.drop_copies(Tier.HBM, state.columns.hbm[0, head], MissCause.EVICTED)
    rig.acquire(one, chain(1, seed=2), lease=2)
    # HBM is full now, but for one block that may go, and that is the chain's tail.
    grant = rig.acquire(one, chain(2), lease=3)
    assert grant.outcomes.tolist() == [Outcome.NO_SLOT] * 2
    for _ in range(3):
        assert rig.store.take_changed() == []
    assert rig.tier(Tier.DRAM).held_slots == 0
    assert rig.tier(Tier.HBM).held_slots == 3
    # For others that block may go.
    assert rig.acquire(one, chain(1, seed=3), lease=4).outcomes.tolist() == [MISS]
    rig.check()


def test_waiters_for_slots_are_told_in_order() -> None:
    rig = Rig(hbm=4, dram=0, nvme=0)
    one = rig.attach()
    held = rig.acquire(one, chain(4), lease=1)
    for lease in (2, 3, 4):
        assert rig.acquire(one, chain(2, seed=lease), lease=lease).outcomes.tolist() == [Outcome.NO_SLOT] * 2
    rig.step(one, hbm=held.hbm_slots[:2])
    assert rig.store.take_changed() == [(one, [2])]
    rig.step(one, hbm=held.hbm_slots[2:])
    assert rig.store.take_changed() == [(one, [3, 4])]


def test_dram_hit_gives_the_slot_to_copy_and_the_slot_to_copy_into() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.write_through(one, chain(3))
    rig.evict_hbm()
    grant = rig.acquire(one, chain(3))
    assert grant.outcomes.tolist() == [DRAM] * 3
    # Somebody is loading it: one copy is enough.
    assert rig.acquire(other, chain(3), lease=5).outcomes.tolist() == [PENDING] * 3
    loads = copies(grant.dram_slots, grant.dram_generations, grant.hbm_slots, grant.hbm_generations)
    rig.step(one, loads=loads, dram=grant.dram_slots)
    assert rig.store.take_changed() == [(other, [5])]
    assert rig.acquire(other, chain(3)).outcomes.tolist() == [HBM] * 3
    rig.check()
    rig.step(one, loads=loads)  # said twice
    rig.check()


def test_a_request_that_waits_takes_no_hbm_from_what_another_is_queued_for() -> None:
    """What DRAM had of a request that had to wait for the disk was given HBM in which another had its blocks. It gave
    all of that back until the rest came, and the other had to wait for the disk, too."""
    rig = Rig(hbm=8, limits=StoreLimits(reserve_slots=0, reserve_fraction=0.0))
    one = rig.attach()
    rig.write_through(one, chain(6))
    rig.write_down()
    rig.evict_hbm()
    rig.evict_dram()
    rig.acquire(one, chain(4))
    rig.done(rig.store.take_moves(0, 100))
    rig.store.cancel(one, 1)
    rig.write_through(one, chain(5, seed=1))
    rig.store.prefetch(
        now_ms=rig.now_ms,
        session=one,
        namespace=rig.namespaces[one],
        lease=2,
        hashes=chain(5, seed=1),
        deadline_ms=0,
    )
    waits = rig.acquire(one, chain(6), lease=1)
    assert waits.outcomes.tolist() == [DRAM] * 3 + [Outcome.LATER] + [Outcome.PROMOTING] * 2
    assert (waits.hbm_slots[3:] == NONE).all()
    assert (waits.dram_slots[3:] == NONE).all()
    rig.check()
    rig.step(one, hbm=waits.hbm_slots[:3], dram=waits.dram_slots[:3])
    assert rig.counter("evictions_hbm") == 6, "those above, and no more"
    rig.store.take_changed()
    rig.done(rig.store.take_moves(0, 100))
    assert rig.store.take_changed() == [(one, [1])]
    assert rig.acquire(one, chain(6), lease=1).outcomes.tolist() == [DRAM] * 6
    rig.check()


def test_a_load_that_is_given_up_wakes_those_who_wait_for_it() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    rig.write_through(one, chain(2))
    rig.evict_hbm()
    grant = rig.acquire(one, chain(2))
    rig.acquire(other, chain(2), lease=5)
    rig.step(one, hbm=grant.hbm_slots, dram=grant.dram_slots)
    assert rig.store.take_changed() == [(other, [5])]
    assert rig.acquire(other, chain(2)).outcomes.tolist() == [DRAM] * 2
    rig.check()


def test_without_hbm_dram_is_the_top_tier() -> None:
    rig = Rig()
    one = rig.attach(device=None)
    grant = rig.acquire(one, chain(3), reserve=2)
    assert grant.outcomes.tolist() == [MISS] * 3
    assert (grant.hbm_slots == NONE).all()
    assert len(grant.reserve_slots) == 0
    room = rig.room(one, 3)
    assert rig.step(one, seals=rig.seals(one, chain(3), room.dram_slots, room.dram_generations)) == [0] * 3
    rig.step(one, dram=room.dram_slots)
    again = rig.acquire(one, chain(3))
    assert again.outcomes.tolist() == [DRAM] * 3
    assert (again.hbm_slots == NONE).all()
    rig.check()


def test_credit_is_what_is_lacked_not_more() -> None:
    rig = Rig(hbm=32)
    one = rig.attach()
    rig.step(one, want_slots=4)
    rig.message += 1
    slots = rig.store.top_up(one, rig.message)
    assert slots is not None
    assert len(slots.hbm_slots) == 4
    assert rig.store.top_up(one, rig.message + 1) is None
    # It has not read them when it says again that it lacks four.
    rig.step(one, want_slots=4, seen=rig.message - 1)
    assert rig.store.top_up(one, rig.message + 1) is None
    rig.step(one, want_slots=4)
    assert rig.store.top_up(one, rig.message + 1) is not None
    rig.check()


def test_credit_is_shared_fairly() -> None:
    rig = Rig(hbm=8, dram=0, nvme=0)
    one, other = rig.attach(), rig.attach()
    rig.step(one, want_slots=100)
    rig.step(other, want_slots=100)
    first = rig.store.top_up(one, 1)
    second = rig.store.top_up(other, 2)
    assert first is not None
    assert second is not None
    assert len(first.hbm_slots) == 4
    assert len(second.hbm_slots) >= 2
    rig.check()


def test_limits_are_kept() -> None:
    rig = Rig(
        hbm=16,
        limits=StoreLimits(max_message_blocks=8, max_held_slots=5, max_reserve=4, max_waiting_leases=2),
    )
    one = rig.attach()
    with pytest.raises(InvalidArgument):
        rig.acquire(one, chain(9))
    with pytest.raises(InvalidArgument):
        rig.acquire(one, chain(1), reserve=5)
    with pytest.raises(InvalidArgument):
        rig.acquire(one, chain(1), first=2)
    grant = rig.acquire(one, chain(8), lease=1)
    assert grant.outcomes.tolist() == [MISS] * 5 + [Outcome.NO_SLOT] * 3
    rig.acquire(one, chain(1, seed=1), lease=2)
    with pytest.raises(ResourceExhausted):
        rig.acquire(one, chain(1, seed=1), lease=3)
    rig.check()


def test_a_full_table_of_rows_never_fails_a_request() -> None:
    rig = Rig(hbm=16, rows=4, dram=0, nvme=0)
    one = rig.attach()
    grant = rig.acquire(one, chain(8))
    assert grant.outcomes.tolist() == [MISS] * 8
    outcomes = rig.step(one, seals=rig.seals(one, chain(8), grant.hbm_slots, grant.hbm_generations))
    assert outcomes == [0] * 4 + [1] * 4
    rig.check()


def test_nothing_held_is_a_victim() -> None:
    """Elsewhere a freed slot was reused while somebody read it."""
    rig = Rig(hbm=6, dram=0, nvme=0)
    reader, writer = rig.attach(), rig.attach()
    kept = rig.fill(reader, chain(3), keep=True)
    rig.fill(writer, chain(3, seed=1))
    for seed in range(2, 12):
        grant = rig.acquire(writer, chain(5, seed=seed))
        assert not set(grant.hbm_slots.tolist()) & set(kept.hbm_slots.tolist())
        rig.step(writer, hbm=grant.hbm_slots)
        rig.store.cancel(writer, 1)
        rig.check()
    assert rig.acquire(reader, chain(3)).hbm_slots.tolist() == kept.hbm_slots.tolist()


def test_what_this_call_gives_is_not_evicted_by_this_call() -> None:
    rig = Rig(hbm=6, dram=0, nvme=0)
    one = rig.attach()
    rig.fill(one, chain(4))
    grant = rig.acquire(one, chain(6))
    assert grant.outcomes.tolist() == [HBM] * 4 + [MISS] * 2
    assert len(set(grant.hbm_slots.tolist())) == 6
    rig.check()


def test_cancel_ends_a_wait() -> None:
    rig = Rig()
    one = rig.attach()
    filler = rig.acquire(one, chain(2), lease=1)
    rig.acquire(one, chain(2), lease=2)
    rig.store.cancel(one, 2)
    rig.step(one, hbm=filler.hbm_slots)
    assert rig.store.take_changed() == []
    rig.check()


def test_empty_arrays_are_fine_everywhere() -> None:
    rig = Rig()
    one = rig.attach()
    assert rig.step(one, hbm=NO_SLOTS, dram=NO_SLOTS) == []
    assert len(rig.acquire(one, chain(0)).outcomes) == 0
    assert len(rig.store.take_moves(0, 10)) == 0
    rig.check()
