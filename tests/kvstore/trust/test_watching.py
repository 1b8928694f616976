"""The canary of the store: which blocks are looked at, what counts as wrong, and how a wrong block is taken back."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.layout import Tier
from kvstore.moves import MissCause, MoveKind, MoveStatus, Outcome, StoreLimits
from tests.kvstore.store_rig import Rig, chain, copies

RIGHT, WRONG = (1, 2), (3, 4)


class Watched(Rig):
    """A store that checks every block it serves, and movers that say checksums."""

    def __init__(self, *, rows: int = 256) -> None:
        super().__init__(rows=rows, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0, canary_every=1))
        self.session = self.attach()
        self.reader = self.attach(device=None)

    def answer(
        self, moves: NDArray[np.void], checksum: tuple[int, int], status: MoveStatus = MoveStatus.OK
    ) -> None:
        """A mover's answers, as the daemon passes them on."""
        statuses = np.full(len(moves), status, dtype=np.uint8)
        sums = np.full((len(moves), 2), checksum, dtype=np.uint64)
        believed = self.store.watching.learn(0, moves["id"], statuses, sums)
        self.store.moves_done(now_ms=self.now_ms, path=0, ids=moves["id"], statuses=believed)

    def moves(self, kind: MoveKind) -> NDArray[np.void]:
        """What the mover is told to do, all of one kind."""
        moves = self.store.take_moves(0, 100)
        assert set(moves["kind"].tolist()) <= {kind}
        return moves

    def written(self, blocks: int = 1) -> NDArray[np.uint64]:
        """Blocks in DRAM and on disk alone, with their checksum known."""
        hashes = chain(blocks)
        self.write_through(self.session, hashes)
        self.answer(self.moves(MoveKind.WRITE), RIGHT)
        self.evict_hbm()
        return hashes

    def serve(self, hashes: NDArray[np.uint64]):  # type: ignore[no-untyped-def]
        """Somebody reads blocks out of DRAM and keeps them."""
        return self.acquire(self.reader, hashes)

    @property
    def wrong(self) -> int:
        return self.counter("wrong_blocks")


@pytest.fixture
def rig() -> Watched:
    return Watched()


def test_what_is_served_is_checked_and_found_right(rig: Watched) -> None:
    hashes = rig.written()
    grant = rig.serve(hashes)
    checks = rig.moves(MoveKind.VERIFY)
    assert checks["dram_slot"].tolist() == grant.dram_slots.tolist()
    rig.answer(checks, RIGHT)
    assert (rig.wrong, rig.counter("canary_blocks")) == (0, 1)
    assert rig.store.watching.take_wrong() == []
    assert len(rig.moves(MoveKind.VERIFY)) == 0
    rig.check()


def test_a_block_that_nobody_holds_is_dropped_when_its_bytes_have_changed(rig: Watched) -> None:
    hashes = rig.written()
    rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
    rig.answer(rig.moves(MoveKind.VERIFY), WRONG)
    assert rig.wrong == 1
    (wrong,) = rig.store.watching.take_wrong()
    assert wrong.hash == hashes[0].tobytes()
    assert rig.tier(Tier.DRAM).sealed_slots == 0
    assert rig.tier(Tier.NVME).sealed_slots == 1, "the disk's copy has a checksum of its own"
    rig.check()
    assert rig.outcomes(rig.reader, hashes) == [Outcome.PROMOTING]


def test_a_block_that_is_held_is_found_no_more_and_free_when_the_last_lets_go(rig: Watched) -> None:
    hashes = rig.written()
    grant = rig.serve(hashes)
    other = rig.attach(device=None)
    again = rig.acquire(other, hashes)
    assert again.dram_slots.tolist() == grant.dram_slots.tolist()
    rig.answer(rig.moves(MoveKind.VERIFY), WRONG)
    rig.check()
    third = rig.attach(device=None)
    assert rig.outcomes(third, hashes) == [Outcome.PROMOTING]
    rig.store.take_moves(0, 100)
    rig.step(rig.reader, dram=grant.dram_slots)
    rig.check()
    free = rig.tier(Tier.DRAM).free_slots
    rig.step(other, dram=again.dram_slots)
    assert rig.tier(Tier.DRAM).free_slots == free + 1
    rig.check()


def test_a_load_of_a_wrong_block_is_not_published(rig: Watched) -> None:
    """It was on its way to HBM when it was found: its copy there is as wrong."""
    hashes = rig.written()
    engine = rig.attach()
    grant = rig.acquire(engine, hashes)
    assert grant.outcomes.tolist() == [Outcome.HIT_DRAM]
    waiting = rig.attach()
    assert rig.acquire(waiting, hashes, lease=5).outcomes.tolist() == [Outcome.PENDING]
    rig.answer(rig.moves(MoveKind.VERIFY), WRONG)
    rig.check()
    assert rig.store.take_changed() == [(waiting, [5])], "who waited for that copy is told"
    loads = copies(grant.dram_slots, grant.dram_generations, grant.hbm_slots, grant.hbm_generations)
    rig.step(engine, loads=loads, hbm=grant.hbm_slots, dram=grant.dram_slots)
    assert rig.tier(Tier.HBM).sealed_slots == 0
    rig.check()


def test_blocks_that_only_memory_has_are_compared_with_their_first_check(rig: Watched) -> None:
    hashes = chain(1)
    rig.write_through(rig.session, hashes)
    rig.evict_hbm()
    rig.store.health(0).writes.ended(good=0, failed=64, now_ms=rig.now_ms)  # nothing goes down meanwhile
    for checksum, wrong in ((RIGHT, 0), (RIGHT, 0), (WRONG, 1)):
        rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
        rig.answer(rig.moves(MoveKind.VERIFY), checksum)
        assert rig.wrong == wrong
    assert rig.store.explain(namespace=rig.namespaces[rig.session], hashes=hashes).cause == "corrupt"
    rig.check()


def test_a_slot_that_was_given_to_another_block_meanwhile_says_nothing(rig: Watched) -> None:
    hashes = rig.written()
    rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
    checks = rig.moves(MoveKind.VERIFY)
    rig.evict_dram()
    rig.answer(checks, WRONG)
    assert rig.wrong == 0
    rig.check()


def test_a_write_of_bytes_that_changed_is_not_believed(rig: Watched) -> None:
    """What it wrote would be found right for ever after: its checksum was made of the wrong bytes."""
    hashes = chain(1)
    rig.write_through(rig.session, hashes)
    rig.evict_hbm()
    writes = rig.moves(MoveKind.WRITE)
    rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
    rig.answer(rig.moves(MoveKind.VERIFY), RIGHT)
    rig.answer(writes, WRONG)
    assert rig.wrong == 1
    assert rig.tier(Tier.NVME).sealed_slots == 0
    rig.store.tick(rig.now_ms)
    assert rig.tier(Tier.DRAM).sealed_slots == 0
    rig.check()


def test_a_promoted_block_is_compared_with_what_was_read(rig: Watched) -> None:
    hashes = rig.written()
    rig.evict_dram()
    assert rig.acquire(rig.reader, hashes).outcomes.tolist() == [Outcome.PROMOTING]
    rig.answer(rig.moves(MoveKind.READ), RIGHT)
    rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
    rig.answer(rig.moves(MoveKind.VERIFY), WRONG)
    assert rig.wrong == 1


def test_a_report_ends_a_block_in_every_tier(rig: Watched) -> None:
    hashes = rig.written(3)
    handle = rig.namespaces[rig.session]
    assert rig.store.watching.report(handle, hashes[1:2], "recomputed: differs") == 1
    assert rig.store.watching.report(handle, hashes[1:2], "again") == 0
    assert rig.wrong == 1
    assert [tier.sealed_slots for tier in rig.store.stats().tiers] == [0, 1, 1], "what is below it as well"
    explained = rig.store.explain(namespace=handle, hashes=hashes)
    assert (explained.cached_blocks, explained.cause) == (1, MissCause.CORRUPT.name.lower())
    rig.check()


@pytest.mark.parametrize("held", [False, True])
def test_a_report_of_a_block_in_hbm(rig: Watched, held: bool) -> None:
    hashes = chain(2)
    grant = rig.fill(rig.session, hashes, keep=held)
    assert rig.store.watching.report(rig.namespaces[rig.session], hashes[:1], "x") == 1
    rig.check()
    assert rig.outcomes(rig.attach(), hashes)[0] is Outcome.MISS
    if held:
        rig.step(rig.session, hbm=grant.hbm_slots)
    rig.check()


def test_a_block_that_a_mover_is_at_work_on_is_taken_back_when_it_has_ended(rig: Watched) -> None:
    hashes = rig.written()
    rig.evict_dram()
    rig.acquire(rig.reader, hashes)
    reads = rig.moves(MoveKind.READ)
    rig.store.watching.report(rig.namespaces[rig.session], hashes, "x")
    rig.check()
    rig.answer(reads, RIGHT)
    rig.store.tick(rig.now_ms)
    assert [tier.sealed_slots for tier in rig.store.stats().tiers] == [0, 0, 0]
    rig.check()


def test_a_dead_mover_leaves_no_check_behind(rig: Watched) -> None:
    for _ in range(3):
        hashes = rig.written() if not rig.counter("writes") else chain(1)
        rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
        assert len(rig.moves(MoveKind.VERIFY)) == 1
        rig.store.mover_dead(0, rig.now_ms)
    rig.check()


def test_few_are_checked_at_once_and_none_where_that_is_asked_for() -> None:
    rig = Watched()
    hashes = rig.written(12)
    for lease in range(30):
        grant = rig.acquire(rig.reader, hashes, lease=lease)
        rig.step(rig.reader, dram=grant.dram_slots)
    assert 0 < len(rig.store.take_moves(0, 100)) <= 8
    silent = Rig(limits=StoreLimits(canary_every=0))
    session = silent.attach()
    silent.write_through(session, chain(4))
    silent.write_down()
    silent.outcomes(silent.attach(device=None), chain(4))
    assert len(silent.store.take_moves(0, 100)) == 0
