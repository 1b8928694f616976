"""What comes from storage into DRAM, who waits for it, and what becomes of reads that fail."""

from __future__ import annotations

import numpy as np

from kvstore.layout import Tier
from kvstore.moves import MoveKind, MoveStatus, Outcome, SealOutcome, StoreLimits
from kvstore.tiering.health import FAILURES_IN_A_ROW, RETRY_MS
from tests.kvstore.store_rig import Rig, chain, copies

HBM, DRAM, MISS, PROMOTING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.MISS, Outcome.PROMOTING


def on_disk(rig: Rig, session: int, hashes: np.ndarray) -> None:
    """Brings a prompt to storage and takes it from everywhere else."""
    rig.write_through(session, hashes)
    rig.write_down()
    rig.evict_hbm()
    rig.evict_dram()


def test_reads_go_on_while_writes_are_paused_and_are_misses_once_they_fail_likewise() -> None:
    """A disk that gave nothing stayed in use: each hit on it was a wait and then a miss, and its blocks were lost."""
    rig = Rig(hbm=48, dram=96, nvme=96, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, paths=1))
    one = rig.attach()
    on_disk(rig, one, chain(40))
    rig.write_through(one, chain(40, seed=1))
    rig.write_down(status=MoveStatus.IO_ERROR)
    rig.evict_hbm()
    rig.evict_dram()
    rig.acquire(one, chain(2), lease=5)
    rig.write_down()
    assert rig.outcomes(one, chain(2)) == [DRAM] * 2
    rig.evict_dram()
    rig.acquire(one, chain(40), lease=6)
    failing = rig.store.take_moves(0, FAILURES_IN_A_ROW)
    assert len(failing) == FAILURES_IN_A_ROW
    rig.done(failing, MoveStatus.IO_ERROR)
    assert rig.store.health(0).reads.paused
    assert rig.store.take_changed() == [(one, [5, 6])], "nobody waits for the rest"
    assert rig.outcomes(one, chain(40)) == [MISS] * 40
    assert len(rig.store.take_moves(0, 1000)) == 0
    rig.check()
    rig.now_ms += RETRY_MS
    rig.acquire(one, chain(40), lease=7)
    tried = rig.store.take_moves(0, 1000)
    assert len(tried) == 1
    rig.done(tried)
    assert not rig.store.health(0).reads.paused
    rig.write_down()
    assert rig.outcomes(one, chain(40)) == [DRAM] * 40, (
        "the disk is well again, and nothing on it was given up"
    )
    rig.check()


def test_a_block_that_cannot_be_read_does_not_keep_a_path_paused() -> None:
    """Kept, it would be the one that is tried each time."""
    rig = Rig(hbm=48, dram=96, nvme=96, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, paths=1))
    one = rig.attach()
    on_disk(rig, one, chain(40))
    rig.acquire(one, chain(40), lease=5)
    rig.write_down(status=MoveStatus.IO_ERROR)
    rig.now_ms += RETRY_MS
    rig.acquire(one, chain(1), lease=6)
    assert len(rig.write_down(status=MoveStatus.IO_ERROR)) == 1
    rig.now_ms += RETRY_MS
    assert rig.outcomes(one, chain(1)) == [MISS]
    assert rig.tier(Tier.NVME).quarantined_slots == 1
    rig.check()


def test_a_paused_disk_that_nobody_asks_for_is_tried_all_the_same() -> None:
    """With reads paused and no request for it a path was said to fail for ever, however well it was again."""
    rig = Rig(hbm=48, dram=96, nvme=96, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, paths=1))
    one = rig.attach()
    on_disk(rig, one, chain(40))
    grant = rig.acquire(one, chain(40), lease=5)
    rig.step(one, hbm=grant.hbm_slots)
    rig.write_down(status=MoveStatus.IO_ERROR)
    assert rig.store.health(0).reads.paused
    for _ in range(3):
        rig.now_ms += 2 * RETRY_MS
        rig.store.tick(rig.now_ms)
        rig.store.tick(rig.now_ms)
        assert len(rig.write_down(status=MoveStatus.IO_ERROR)) == 1
        rig.check()
    assert rig.tier(Tier.NVME).sealed_slots == 40, "and none of its blocks is given up for that"
    rig.now_ms += RETRY_MS
    rig.store.tick(rig.now_ms)
    assert len(rig.store.take_moves(0, 10)) == 1
    rig.store.mover_dead(0, rig.now_ms)  # with what was to tell
    rig.store.take_moves(0, 10)
    rig.now_ms += RETRY_MS
    rig.store.tick(rig.now_ms)
    assert len(rig.write_down()) == 1
    assert not rig.store.health(0).reads.paused
    rig.store.tick(rig.now_ms)
    assert len(rig.write_down()) == 0
    rig.check()


# ------------------------------------------------------------ promotion


def test_a_disk_hit_is_promoted_and_then_a_dram_hit() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    grant = rig.acquire(one, chain(4), lease=5)
    assert grant.outcomes.tolist() == [PROMOTING] * 4
    rig.check()
    moves = rig.store.take_moves(0, 10)
    assert moves["kind"].tolist() == [MoveKind.READ] * 4
    assert moves["hash"].tolist() == chain(4).tolist()
    assert rig.store.take_changed() == []
    rig.done(moves[:2])
    assert rig.store.take_changed() == []
    rig.done(moves[2:])
    assert rig.store.take_changed() == [(one, [5])]
    assert rig.outcomes(one, chain(4)) == [DRAM] * 4
    rig.check()


def test_what_is_computed_again_is_found_in_memory_where_no_memory_has_it() -> None:
    """A block that the disk had stayed private when it was computed again: the next request computed it, too."""
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    grant = rig.acquire(one, chain(4), private=True)
    assert grant.outcomes.tolist() == [MISS] * 4
    sealed = rig.step(one, seals=rig.seals(one, chain(4), grant.hbm_slots, grant.hbm_generations))
    assert sealed == [SealOutcome.PUBLISHED] * 4
    rig.check()
    rig.step(one, hbm=grant.hbm_slots)
    assert rig.outcomes(one, chain(4)) == [HBM] * 4
    rig.evict_hbm()
    assert rig.outcomes(one, chain(4)) == [PROMOTING] * 4  # the disk has them still
    rig.check()


def test_what_is_computed_again_while_dram_has_it_stays_private() -> None:
    """Copies in memory are compared with each other: two that were computed apart may differ in their last bits."""
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(4))
    grant = rig.acquire(one, chain(4), private=True)
    assert rig.outcomes(one, chain(4)) == [PROMOTING] * 4
    rig.done(rig.store.take_moves(0, 10))
    sealed = rig.step(one, seals=rig.seals(one, chain(4), grant.hbm_slots, grant.hbm_generations))
    assert sealed == [SealOutcome.DUPLICATE] * 4
    rig.step(one, hbm=grant.hbm_slots)
    assert rig.outcomes(one, chain(4)) == [DRAM] * 4
    rig.check()


def test_one_disk_read_serves_all_who_wait() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach()
    on_disk(rig, one, chain(4))
    for lease in range(8):
        assert (
            rig.acquire((one, other)[lease % 2], chain(4), lease=lease).outcomes.tolist() == [PROMOTING] * 4
        )
    moves = rig.write_down()
    assert len(moves) == 4
    changed = rig.store.take_changed()
    assert {session: sorted(leases) for session, leases in changed} == {
        one: [0, 2, 4, 6],
        other: [1, 3, 5, 7],
    }
    rig.check()


def test_reads_go_before_writes() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(2))
    rig.write_through(one, chain(2, seed=1))
    rig.acquire(one, chain(2), lease=2)
    assert rig.store.take_moves(0, 2)["kind"].tolist() == [MoveKind.READ] * 2
    assert rig.store.take_moves(0, 2)["kind"].tolist() == [MoveKind.WRITE] * 2
    rig.check()


def test_a_checksum_that_fails_is_a_miss_is_counted_and_is_removed() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(3))
    rig.acquire(one, chain(3), lease=5)
    moves = rig.store.take_moves(0, 10)
    rig.done(moves[:1], MoveStatus.CORRUPT)
    rig.done(moves[1:])
    assert rig.store.take_changed() == [(one, [5])]
    assert rig.counter("checksum_failures") == 1
    assert rig.outcomes(one, chain(3)) == [MISS] * 3
    assert rig.store.explain(namespace=rig.namespaces[one], hashes=chain(1)).cause == "corrupt"
    assert rig.tier(Tier.NVME).free_slots == 30
    rig.check()


def test_a_read_that_fails_does_not_come_back_for_ever() -> None:
    """Elsewhere a bad sector was asked for again and again by the request that waited for it."""
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(2))
    rig.acquire(one, chain(2), lease=5)
    rig.write_down(status=MoveStatus.IO_ERROR)
    assert rig.store.take_changed() == [(one, [5])]
    assert rig.outcomes(one, chain(2)) == [MISS] * 2
    assert rig.tier(Tier.NVME).quarantined_slots == 2
    rig.check()


def test_a_mover_that_dies_fails_its_moves_and_frees_what_it_had() -> None:
    rig = Rig()
    one = rig.attach()
    on_disk(rig, one, chain(3))
    rig.write_through(one, chain(3, seed=1))
    rig.acquire(one, chain(3), lease=5)
    moves = rig.store.take_moves(0, 5)  # three reads, two writes
    assert rig.tier(Tier.DRAM).held_slots == 5
    rig.store.mover_dead(0, rig.now_ms)
    rig.check()
    assert rig.store.take_changed() == [(one, [5])]
    assert rig.tier(Tier.DRAM).held_slots == 0
    assert rig.outcomes(one, chain(3)) == [MISS] * 3  # the path is down: compute rather than wait for it
    rig.done(moves)  # a late answer
    rig.check()
    rig.store.take_moves(0, 0)  # a new mover
    assert rig.outcomes(one, chain(3)) == [PROMOTING] * 3
    rig.write_down()
    rig.store.tick(rig.now_ms)
    rig.write_down()
    assert rig.tier(Tier.NVME).sealed_slots == 6
    rig.check()


def test_a_mover_of_a_dead_daemon_keeps_its_slots_until_it_is_reaped() -> None:
    """Its I/O goes on: neither the slot that it reads into nor the one that it writes may be given to others."""
    rig = Rig(dram=6, nvme=8)
    one = rig.attach()
    on_disk(rig, one, chain(2))
    rig.write_through(one, chain(2, seed=1))
    rig.acquire(one, chain(2), lease=5)
    moves = rig.store.take_moves(0, 10)
    rig.recover()
    rig.resume(one)
    rig.check()
    assert rig.tier(Tier.DRAM).held_slots == 4
    assert rig.tier(Tier.NVME).filling_slots == 2
    room = rig.room(one, 6)
    assert not set(room.dram_slots.tolist()) & set(moves["dram_slot"].tolist())
    rig.store.mover_dead(0, rig.now_ms)
    assert rig.tier(Tier.DRAM).held_slots == len(room.dram_slots)
    assert rig.tier(Tier.NVME).filling_slots == 0
    rig.check()


def test_a_chain_longer_than_dram_is_promoted_in_parts() -> None:
    rig = Rig(hbm=32, dram=8, nvme=32)
    one = rig.attach()
    grant = rig.fill(one, chain(16), keep=True)
    for at in range(0, 16, 4):
        part = slice(at, at + 4)
        room = rig.room(one, 4)
        stores = copies(
            grant.hbm_slots[part], grant.hbm_generations[part], room.dram_slots, room.dram_generations
        )
        rig.step(one, stores=stores, dram=room.dram_slots)
        rig.write_down()
    rig.step(one, hbm=grant.hbm_slots)
    rig.evict_hbm()
    rig.evict_dram()
    rig.store.tick(rig.now_ms)
    assert rig.store.explain(namespace=rig.namespaces[one], hashes=chain(16)).cached_blocks == 16
    grant = rig.acquire(one, chain(16), lease=3)
    assert grant.outcomes.tolist() == [PROMOTING] * 4 + [Outcome.LATER] * 12
    rig.write_down()
    assert rig.store.take_changed() == [(one, [3])]
    rig.check()
