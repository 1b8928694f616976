"""Disks that hang, and disks without room for another slab: what the store makes of what it is told."""

from __future__ import annotations

import numpy as np

from kvstore.layout import ExtentState, Tier
from kvstore.moves import MoveKind, MoveStatus, Outcome
from kvstore.tiering.paths import NO_SLAB_MS
from tests.kvstore.store_rig import PAGE, Rig, chain

HBM, DRAM, MISS, PROMOTING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.MISS, Outcome.PROMOTING


def on_disk(rig: Rig, session: int, hashes: np.ndarray) -> None:
    """Brings a prompt to storage and takes it from everywhere else."""
    rig.write_through(session, hashes)
    rig.write_down()
    rig.evict_hbm()
    rig.evict_dram()


def two_slabs(**sizes: int) -> Rig:
    """A path of two extents of 16 slots, of which the first is full."""
    rig = Rig(**({"hbm": 64, "dram": 64, "nvme": 16} | sizes))
    rig.store.add_extent(tier=Tier.NVME, device=0, nbytes=16 * 2 * PAGE)
    return rig


def slabs_of(moves: np.ndarray) -> set[int]:
    return set(moves["nvme_extent"].tolist())


def test_a_path_without_room_for_another_slab_goes_on_with_those_it_has() -> None:
    """A full file system paused all writes to its path, also those into slabs that were there."""
    rig = two_slabs()
    one = rig.attach()
    rig.write_through(one, chain(16))
    first = rig.write_down()
    assert len(slabs_of(first)) == 1
    rig.write_through(one, chain(40, seed=1))
    moves = rig.store.take_moves(0, 8)
    (extent,) = slabs_of(moves)
    assert {extent} != slabs_of(first)
    assert rig.store.paths.slab_failed(extent)
    assert rig.store.paths.slab_failed(extent), "told twice is told once"
    rig.done(moves, MoveStatus.IO_ERROR)
    rig.check()
    assert rig.tier(Tier.NVME).quarantined_slots == 0
    assert rig.counter("io_errors") == 0, "nothing was tried"
    assert not rig.store.health(0).writes.paused
    for _ in range(20):
        rig.store.tick(rig.now_ms)
        moves = rig.write_down()
        assert slabs_of(moves) <= slabs_of(first)
    assert rig.counter("writes") == 16 + 40, "in place of older blocks"
    rig.check()
    rig.now_ms += NO_SLAB_MS
    rig.write_through(one, chain(8, seed=2))
    rig.store.tick(rig.now_ms)
    assert extent in slabs_of(rig.write_down()), "another is asked for again"
    assert rig.tier(Tier.NVME).sealed_slots > 16
    rig.check()


def test_a_path_without_any_slab_fails_its_writes() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(4))
    moves = rig.store.take_moves(0, 10)
    assert not rig.store.paths.slab_failed(*slabs_of(moves))
    rig.done(moves, MoveStatus.IO_ERROR)
    assert rig.store.health(0).writes.failures == 4
    rig.check()


def test_whoever_gets_the_number_of_an_extent_that_had_no_slab_has_one() -> None:
    """What failed in a slab that was loaded under that number counted as not tried: its readers asked for ever."""
    rig = two_slabs()
    one = rig.attach()
    rig.write_through(one, chain(16))
    rig.write_down()
    rig.write_through(one, chain(8, seed=1))
    moves = rig.store.take_moves(0, 8)
    (extent,) = slabs_of(moves)
    assert rig.store.paths.slab_failed(extent)
    rig.done(moves, MoveStatus.IO_ERROR)
    rig.store.drop_extent(extent)
    assert not rig.store._state.unmade.any()


def test_a_restart_finishes_what_drains_for_want_of_a_slab() -> None:
    rig = two_slabs()
    one = rig.attach()
    rig.write_through(one, chain(16))
    rig.write_down()
    rig.write_through(one, chain(8, seed=1))
    moves = rig.store.take_moves(0, 8)
    assert rig.store.paths.slab_failed(*slabs_of(moves))
    rig.recover()
    rig.store.mover_dead(0, rig.now_ms)
    rig.store.tick(rig.now_ms)
    states = [rig.store._state.extents.state(extent) for extent in rig.store._state.extents.of(Tier.NVME)]
    assert ExtentState.DRAINING not in states
    rig.check()


def test_a_disk_that_hangs_is_a_miss_and_serves_again_once_it_answers() -> None:
    """Who waited for a hung disk waited until its mover was killed, a minute later."""
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(8))
    assert rig.acquire(one, chain(4), lease=5).outcomes.tolist() == [PROMOTING] * 4
    moves = rig.store.take_moves(0, 2)
    rig.store.paths.hangs(0)
    assert rig.store.take_changed() == [(one, [5])], "also for what its mover has"
    grant = rig.acquire(one, chain(8), lease=6)
    assert grant.outcomes.tolist() == [MISS] * 8
    rig.step(one, hbm=grant.hbm_slots)
    assert len(rig.store.take_moves(0, 10)) == 0
    rig.check()
    rig.store.paths.answers(0)
    rig.done(moves)
    assert rig.outcomes(one, chain(2)) == [DRAM] * 2
    grant = rig.acquire(one, chain(8), lease=7)
    assert grant.outcomes.tolist()[2:] == [PROMOTING] * 6
    rig.step(one, hbm=grant.hbm_slots, dram=grant.dram_slots)
    rig.write_down()
    assert rig.outcomes(one, chain(8)) == [DRAM] * 8
    rig.check()


def test_nothing_is_written_to_a_disk_that_hangs_and_all_of_it_later() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(4))
    rig.store.paths.hangs(0)
    rig.write_through(one, chain(4, seed=1))
    rig.store.tick(rig.now_ms)
    assert len(rig.store.take_moves(0, 10)) == 0
    rig.store.mover_dead(0, rig.now_ms)
    rig.write_down()
    rig.store.tick(rig.now_ms)
    rig.write_down()
    assert rig.tier(Tier.NVME).sealed_slots == 8
    rig.check()


def test_a_block_that_hangs_on_one_disk_does_not_touch_the_other() -> None:
    rig = Rig()
    rig.store.add_extent(tier=Tier.NVME, device=1, nbytes=16 * 2 * PAGE)
    one = rig.attach()
    on_disk(rig, one, chain(4))
    rig.write_through(one, chain(4, seed=1))
    rig.write_down(path=1)
    rig.evict_hbm()
    rig.evict_dram()
    assert rig.acquire(one, chain(4), lease=5).outcomes.tolist() == [PROMOTING] * 4
    rig.store.take_moves(0, 10)
    rig.store.paths.hangs(0)
    assert rig.acquire(one, chain(4, seed=1), lease=6).outcomes.tolist() == [PROMOTING] * 4
    rig.write_down(path=1)
    assert rig.outcomes(one, chain(4, seed=1)) == [DRAM] * 4
    rig.check()


def test_writes_have_a_bound_of_their_own_beside_reads() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    rig.write_through(one, chain(4, seed=1))
    rig.acquire(one, chain(4), lease=5)
    kinds = rig.store.take_moves(0, 10, writes=1)["kind"].tolist()
    assert kinds == [MoveKind.READ] * 4 + [MoveKind.WRITE]
    assert len(rig.store.take_moves(0, 10, writes=0)) == 0
    rig.check()
