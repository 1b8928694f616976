"""What goes from DRAM to storage, what a flush tells, and what becomes of writes that fail."""

from __future__ import annotations

from kvstore.layout import Tier
from kvstore.moves import FlushLeft, MoveKind, MoveStatus, Outcome, StoreLimits
from kvstore.tiering.health import RETRY_MS
from tests.kvstore.store_rig import PAGE, Rig, chain

HBM, DRAM, MISS, PROMOTING = Outcome.HIT_HBM, Outcome.HIT_DRAM, Outcome.MISS, Outcome.PROMOTING


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
