"""Tiers: what goes first, write-behind, promotion, storage that fails, extents that change class."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore.victims.by_key
from kvstore.errors import InvalidArgument
from kvstore.layout import ExtentState, SlotState, Tier
from kvstore.moves import FlushLeft, MoveKind, MoveStatus, Outcome, SealOutcome, StoreLimits
from kvstore.tiering.health import FAILURES_IN_A_ROW, RETRY_MS
from tests.kvstore.store_rig import PAGE, Rig, chain, copies

HBM, DRAM, MISS, PROMOTING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.MISS, Outcome.PROMOTING


def on_disk(rig: Rig, session: int, hashes: np.ndarray) -> None:
    """Brings a prompt to storage and takes it from everywhere else."""
    rig.write_through(session, hashes)
    rig.write_down()
    rig.evict_hbm()
    rig.evict_dram()


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


# ------------------------------------------------------------ write-behind


def test_blocks_in_dram_are_written_in_the_order_of_their_seals() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(3))
    rig.write_through(one, chain(3, seed=1))
    moves = rig.store.take_moves(0, 4)
    assert set(moves["kind"].tolist()) == {MoveKind.WRITE}
    hashes = {tuple(h) for h in moves["hash"].tolist()}
    assert {tuple(h) for h in chain(3).tolist()} < hashes
    assert moves["dram_slot"].tolist() == sorted(moves["dram_slot"].tolist())
    assert moves["nvme_slot"].tolist() == sorted(moves["nvme_slot"].tolist())
    assert moves["dram_offset"].tolist() == [slot * PAGE for slot in moves["dram_slot"].tolist()]
    assert moves["nvme_offset"].tolist() == [slot * 2 * PAGE for slot in moves["nvme_slot"].tolist()]
    assert set(moves["length"].tolist()) == {PAGE}
    by_hash = {tuple(m["hash"].tolist()): m for m in moves}
    child = by_hash[tuple(chain(2)[1].tolist())]
    assert child["parent"].tolist() == chain(1)[0].tolist()
    assert child["depth"] == 1
    rig.check()
    rig.done(moves)
    assert rig.tier(Tier.NVME).sealed_slots == 4
    assert len(rig.store.take_moves(0, 10)) == 2
    rig.check()


def test_a_slot_that_is_being_written_down_is_held() -> None:
    """Elsewhere the source of a write was reused under it."""
    rig = Rig(dram=4)
    one = rig.attach()
    rig.write_through(one, chain(4))
    moves = rig.store.take_moves(0, 10)
    assert rig.tier(Tier.DRAM).held_slots == 4
    rig.evict_dram()
    assert rig.tier(Tier.DRAM).sealed_slots == 4
    assert rig.store.clear(None).removed == 0
    grant = rig.fill(one, chain(2, seed=1), keep=True)
    rig.step(one, want_room=2)
    assert rig.store.top_up(one, 99) is None
    rig.done(moves)
    assert rig.store.top_up(one, 99) is not None
    assert len(grant.hbm_slots) == 2
    rig.check()


def test_a_full_queue_drops_counts_and_catches_up() -> None:
    rig = Rig(limits=StoreLimits(max_writes=4))
    one = rig.attach()
    rig.write_through(one, chain(6))
    assert rig.store.stats().queued_writes == 4
    assert rig.counter("dropped_writes") == 2
    rig.write_down()
    rig.store.tick(rig.now_ms)
    rig.write_down()
    assert rig.tier(Tier.NVME).sealed_slots == 6
    rig.check()


def test_a_flush_of_more_than_storage_holds_ends_and_says_what_did_not_fit() -> None:
    """With DRAM larger than NVMe a flush wrote the same blocks again and again, to its deadline."""
    rig = Rig(hbm=32, dram=32, nvme=8)
    one = rig.attach()
    rig.write_through(one, chain(24))
    mark = rig.store.flush()
    written = 0
    for _ in range(100):
        if not rig.store.left_of(mark).coming:
            break
        rig.store.tick(rig.now_ms)
        written += len(rig.write_down())
    assert written == 24, "each once"
    assert rig.store.left_of(mark) == FlushLeft(coming=0, missing=16, unfit=16)
    assert rig.tier(Tier.NVME).sealed_slots == 8
    rig.check()


def test_blocks_that_do_not_fit_are_not_written_for_ever() -> None:
    """With DRAM larger than NVMe, and more to write than one queue takes, the same blocks went down again and again."""
    rig = Rig(
        hbm=32, dram=32, nvme=8, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, max_writes=4)
    )
    one = rig.attach()
    rig.write_through(one, chain(24))
    for _ in range(50):
        rig.now_ms += 1_000
        rig.store.tick(rig.now_ms)
        rig.write_down()
    assert rig.counter("writes") == 24
    rig.now_ms += 5_000
    rig.outcomes(one, chain(4))
    rig.write_through(one, chain(6, seed=1))  # two of which are dropped, so DRAM is looked through
    for _ in range(50):
        rig.now_ms += 1_000
        rig.store.tick(rig.now_ms)
        rig.write_down()
    assert rig.counter("writes") <= 24 + 6 + 4, "and those that were used again"
    rig.check()


def test_flush_tells_what_is_still_to_come() -> None:
    rig = Rig(limits=StoreLimits(max_writes=4))
    one = rig.attach()
    rig.write_through(one, chain(6))
    mark = rig.store.flush()
    assert len(mark) == 6
    assert rig.store.left_of(mark) == FlushLeft(coming=6, missing=6)
    rig.write_down()
    assert rig.store.left_of(mark) == FlushLeft(coming=2, missing=2)
    rig.write_down()
    assert rig.store.left_of(mark) == FlushLeft(coming=0, missing=0)
    assert len(rig.store.flush()) == 0


def test_a_flush_does_not_wait_for_a_block_that_was_lost() -> None:
    """A block that was evicted or cleared before it was written kept a flush waiting to its deadline."""
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(6))
    mark = rig.store.flush()
    rig.evict_hbm()
    rig.store.clear(None)
    assert rig.store.left_of(mark) == FlushLeft(coming=0, missing=0)
    rig.write_down()
    rig.check()


def test_a_flush_does_not_wait_for_a_block_that_only_hbm_has() -> None:
    """A block that DRAM had to let go of before it was written kept a flush waiting, though nothing can write it."""
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(6))
    mark = rig.store.flush()
    rig.evict_dram()
    left = rig.store.left_of(mark)
    assert left.coming == 0
    assert left.missing > 0, "and the answer says that they are not on disk"
    rig.check()


def test_the_durable_index_learns_each_change_once() -> None:
    rig = Rig(nvme=4)
    one = rig.attach()
    rig.write_through(one, chain(2))
    rig.write_down()
    changes = rig.store.index_changes.take(0, 1000)
    assert changes.published["hash"].tolist() == chain(2).tolist()
    assert changes.published["parent"][1].tolist() == chain(1)[0].tolist()
    assert len(changes.freed) == 0
    assert len(rig.store.index_changes.take(0, 1000).published) == 0
    rig.evict_hbm()
    rig.evict_dram()
    rig.store.clear(None)
    changes = rig.store.index_changes.take(0, 1000)
    assert changes.freed.tolist() == [0, 1]
    assert len(changes.published) == 0


def test_a_write_that_fails_costs_its_slot_and_not_the_block() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(2))
    rig.write_down(status=MoveStatus.IO_ERROR)
    assert rig.tier(Tier.NVME).quarantined_slots == 2
    assert rig.counter("io_errors") == 2
    rig.evict_hbm()
    assert rig.outcomes(one, chain(2)) == [DRAM] * 2
    rig.check()


def test_a_sync_that_fails_costs_no_slot_and_its_blocks_are_written_again() -> None:
    """An fdatasync that failed took every slot that it was to cover out of use, and nobody wrote their blocks again."""
    rig = Rig(limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, paths=1))
    one = rig.attach()
    rig.write_through(one, chain(8))
    assert len(rig.write_down(status=MoveStatus.NOT_SYNCED)) == 8
    assert rig.tier(Tier.NVME).quarantined_slots == 0
    assert rig.store.health(0).writes.failures == 8
    for _ in range(3):
        rig.store.tick(rig.now_ms)
        rig.write_down(status=MoveStatus.NOT_SYNCED)
    assert rig.store.health(0).writes.paused
    rig.now_ms += RETRY_MS
    for _ in range(2):
        rig.store.tick(rig.now_ms)
        rig.write_down()
    rig.store.tick(rig.now_ms)
    rig.write_down()
    assert rig.tier(Tier.NVME).sealed_slots == 8
    rig.check()


def test_a_disk_that_fails_all_writes_is_paused_and_tried_again_by_one() -> None:
    """A full disk was given every block, for ever, and each cost a slot for good."""
    rig = Rig(hbm=48, dram=96, nvme=96, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, paths=1))
    one = rig.attach()
    rig.write_through(one, chain(40))
    assert len(rig.write_down(status=MoveStatus.IO_ERROR)) == 40
    assert rig.store.health(0).writes.paused
    assert rig.tier(Tier.NVME).quarantined_slots == 0, "the slots are well: their disk is not"
    for _ in range(3):
        rig.store.tick(rig.now_ms)
        assert len(rig.write_down()) == 0
        rig.now_ms += RETRY_MS
        rig.store.tick(rig.now_ms)
        tried = rig.store.take_moves(0, 1000)
        assert len(tried) == 1
        assert len(rig.store.take_moves(0, 1000)) == 0, "one at a time"
        rig.done(tried, MoveStatus.IO_ERROR)
    rig.now_ms += RETRY_MS
    rig.store.tick(rig.now_ms)
    assert len(rig.write_down()) == 1
    assert not rig.store.health(0).writes.paused
    written = 0
    for _ in range(2):
        rig.store.tick(rig.now_ms)
        written += len(rig.write_down())
    assert written == 39, "none of them was given up"
    rig.check()


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
