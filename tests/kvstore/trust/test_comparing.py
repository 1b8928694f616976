"""Checksums that engines make and compare: what movers need not look at, who may have it, what a difference ends."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client.copied import checksums_of
from kvstore.layout import Tier
from kvstore.moves import Grant, MoveKind, MoveStatus, Outcome, StoreLimits
from tests.kvstore.store_rig import PAGE, Rig, chain, copies

RIGHT, WRONG = (1, 2), (3, 4)


class Comparing(Rig):
    """A store, an engine that compares what it loads, and movers that say checksums."""

    def __init__(self) -> None:
        super().__init__(rows=256, devices=2, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0))
        self.store.add_extent(tier=Tier.HBM, device=1, nbytes=16 * PAGE, slot_bytes=PAGE)
        self.engine = self.attach_comparing()

    def attach_comparing(self, device: int = 0) -> int:
        session = self.attach(device=device)
        self.store.sharing.verifies(session, True)
        return session

    def answer(self, moves: NDArray[np.void], checksum: tuple[int, int]) -> None:
        """A mover's answers, as the daemon passes them on: those that it looks at have this checksum."""
        statuses = np.full(len(moves), MoveStatus.OK, dtype=np.uint8)
        sums = np.full((len(moves), 2), checksum, dtype=np.uint64)
        writes = moves["kind"] == MoveKind.WRITE
        known = writes & (moves["unread"] != 0)
        sums[known] = moves["checksum"][known]
        believed = self.store.watching.learn(0, moves["id"], statuses, sums)
        self.store.moves_done(now_ms=self.now_ms, path=0, ids=moves["id"], statuses=believed)

    def moves(self, kind: MoveKind) -> NDArray[np.void]:
        moves = self.store.take_moves(0, 100)
        assert set(moves["kind"].tolist()) <= {kind}
        return moves

    def stored(self, blocks: int = 1, checksum: tuple[int, int] = RIGHT) -> NDArray[np.uint64]:
        """Blocks in DRAM and on disk, with their checksums said by the engine."""
        hashes = chain(blocks)
        self.write_through(self.engine, hashes, np.full((blocks, 2), checksum, dtype=np.uint64))
        self.answer(self.moves(MoveKind.WRITE), WRONG)
        self.evict_hbm()
        return hashes

    def promoted(self, blocks: int = 1) -> NDArray[np.uint64]:
        """Blocks that a mover has read from the disk without looking at them."""
        hashes = self.stored(blocks)
        self.evict_dram()
        assert self.outcomes(self.engine, hashes)[0] == Outcome.PROMOTING
        reads = self.moves(MoveKind.READ)
        assert reads["unread"].all()
        self.answer(reads, RIGHT)
        return hashes

    def loaded(
        self, hashes: NDArray[np.uint64], session: int | None = None
    ) -> tuple[Grant, NDArray[np.void]]:
        """A grant of blocks in DRAM, and the copies that it asks for."""
        grant = self.acquire(self.engine if session is None else session, hashes)
        assert set(grant.outcomes.tolist()) == {Outcome.HIT_DRAM}
        return grant, copies(grant.dram_slots, grant.dram_generations, grant.hbm_slots, grant.hbm_generations)

    def give_back(self, grant: Grant, session: int | None = None) -> None:
        self.step(self.engine if session is None else session, hbm=grant.hbm_slots, dram=grant.dram_slots)


@pytest.fixture
def rig() -> Comparing:
    return Comparing()


def test_a_write_of_a_block_with_a_checksum_is_not_looked_at(rig: Comparing) -> None:
    hashes = chain(2)
    rig.write_through(rig.engine, hashes, np.array([RIGHT, (0, 0)], dtype=np.uint64))
    writes = rig.moves(MoveKind.WRITE)
    by_hash = {move["hash"].tobytes(): move for move in writes}
    said, unsaid = (by_hash[each.tobytes()] for each in hashes)
    assert (said["unread"], tuple(said["checksum"])) == (1, RIGHT)
    assert unsaid["unread"] == 0, "whose checksum nobody has said"
    rig.answer(writes, WRONG)
    assert rig.counter("wrong_blocks") == 0
    rig.evict_hbm()
    grant, _ = rig.loaded(hashes)
    table = rig.store._state.checksums
    assert table.of(grant.dram_slots).tolist() == [list(RIGHT), list(WRONG)], "the mover has said the other"
    assert not table.unread(grant.dram_slots).any()


def test_a_slot_that_a_dying_daemon_had_noted_a_checksum_of_gets_another_block(rig: Comparing) -> None:
    """It is of the same generation: what was noted before the copy counted must not be the next block's."""
    hashes = chain(1)
    grant = rig.fill(rig.engine, hashes, keep=True)
    room = rig.room(rig.engine, 1)
    rig.store._state.checksums.note(room.dram_slots[:1], np.array([WRONG], dtype=np.uint64))
    stores = copies(grant.hbm_slots, grant.hbm_generations, room.dram_slots[:1], room.dram_generations[:1])
    rig.step(rig.engine, stores=stores, hbm=grant.hbm_slots, dram=room.dram_slots)
    (write,) = rig.moves(MoveKind.WRITE)
    assert write["unread"] == 0, "its checksum is not known"
    rig.check()


def test_reads_are_looked_at_while_any_session_does_not_compare(rig: Comparing) -> None:
    hashes = rig.stored()
    rig.evict_dram()
    other = rig.attach(device=None)
    rig.outcomes(rig.engine, hashes)
    (read,) = rig.moves(MoveKind.READ)
    assert read["unread"] == 0
    rig.answer(np.array([read]), RIGHT)
    rig.store.dead(other, rig.now_ms)
    rig.evict_dram()
    rig.outcomes(rig.engine, hashes)
    (read,) = rig.moves(MoveKind.READ)
    assert read["unread"] == 1


def test_reads_without_any_session_are_looked_at(rig: Comparing) -> None:
    rig.store.dead(rig.engine, rig.now_ms)
    assert not rig.store._state.sessions.all_verify()


def test_a_load_that_is_what_was_stored_is_published(rig: Comparing) -> None:
    hashes = rig.promoted()
    grant, loads = rig.loaded(hashes)
    state = rig.store._state
    assert state.checksums.unread(grant.dram_slots).all()
    assert state.checksums.of(grant.dram_slots).tolist() == [list(RIGHT)]
    rig.step(rig.engine, loads=loads, dram=grant.dram_slots)
    assert rig.tier(Tier.HBM).sealed_slots == 1
    rig.check()


def test_a_block_that_was_read_wrong_ends_where_it_came_from_and_nowhere_else(rig: Comparing) -> None:
    hashes = rig.promoted(2)
    grant, loads = rig.loaded(hashes)
    rig.step(rig.engine, loads=loads[1:], wrong_loads=loads[:1])
    rig.check()
    assert (rig.counter("checksum_failures"), rig.counter("wrong_blocks")) == (1, 0)
    assert rig.store.watching.take_wrong() == [], "the disk's fault: nothing was computed from it"
    assert rig.tier(Tier.NVME).sealed_slots == 1
    assert rig.tier(Tier.HBM).sealed_slots == 1
    rig.give_back(grant)
    rig.check()
    assert rig.tier(Tier.DRAM).sealed_slots == 1
    assert rig.tier(Tier.HBM).held_slots == 0
    assert rig.outcomes(rig.engine, hashes) == [Outcome.MISS, Outcome.MISS], "its prefix has gone"
    rig.check()


def test_who_waits_for_the_load_of_a_block_that_was_read_wrong_is_told(rig: Comparing) -> None:
    hashes = rig.promoted()
    waiting = rig.attach_comparing()
    grant, loads = rig.loaded(hashes)
    assert rig.acquire(waiting, hashes, lease=5).outcomes.tolist() == [Outcome.PENDING]
    rig.step(rig.engine, wrong_loads=loads)
    assert rig.store.take_changed() == [(waiting, [5])]
    rig.give_back(grant)
    rig.check()


def test_a_difference_in_what_was_stored_is_a_wrong_block(rig: Comparing) -> None:
    """No disk has had it: memory changed under a complete block, so what was computed from it goes, too."""
    hashes = rig.stored()
    grant, loads = rig.loaded(hashes)
    rig.step(rig.engine, wrong_loads=loads)
    assert (rig.counter("checksum_failures"), rig.counter("wrong_blocks")) == (0, 1)
    (wrong,) = rig.store.watching.take_wrong()
    assert wrong.hash == hashes[0].tobytes()
    rig.give_back(grant)
    rig.check()
    assert rig.tier(Tier.DRAM).sealed_slots == 0
    assert rig.tier(Tier.NVME).sealed_slots == 1, "the disk's copy is compared when it is loaded"


def test_a_difference_counts_only_from_who_compares_and_holds_both(rig: Comparing) -> None:
    hashes = rig.promoted()
    other = rig.attach_comparing()
    grant, loads = rig.loaded(hashes)
    rig.step(other, wrong_loads=loads)
    stale = loads.copy()
    stale["source_generation"] += 1
    rig.step(rig.engine, wrong_loads=stale)
    rig.store.sharing.verifies(rig.engine, False)
    rig.step(rig.engine, wrong_loads=loads)
    assert (rig.counter("checksum_failures"), rig.counter("wrong_blocks")) == (0, 0)
    rig.step(rig.engine, loads=loads, dram=grant.dram_slots)
    assert rig.tier(Tier.HBM).sealed_slots == 1
    rig.check()


def test_what_nobody_looked_at_is_no_hit_for_who_does_not_compare_until_it_was(rig: Comparing) -> None:
    hashes = rig.promoted()
    reader = rig.attach(device=None)
    assert rig.outcomes(reader, hashes) == [Outcome.MISS]
    assert rig.outcomes(rig.engine, hashes) == [Outcome.HIT_DRAM]
    checks = rig.moves(MoveKind.VERIFY)
    assert len(checks) == 1
    rig.answer(checks, RIGHT)
    assert rig.outcomes(reader, hashes) == [Outcome.HIT_DRAM]
    rig.check()


def test_a_check_that_finds_a_read_wrong_ends_it_as_a_load_does(rig: Comparing) -> None:
    hashes = rig.promoted()
    reader = rig.attach(device=None)
    assert rig.outcomes(reader, hashes) == [Outcome.MISS]
    rig.answer(rig.moves(MoveKind.VERIFY), WRONG)
    assert (rig.counter("checksum_failures"), rig.counter("wrong_blocks")) == (1, 0)
    assert rig.tier(Tier.DRAM).sealed_slots == rig.tier(Tier.NVME).sealed_slots == 0
    rig.check()


def test_a_restart_forgets_neither_checksums_nor_what_nobody_looked_at(rig: Comparing) -> None:
    hashes = rig.promoted()
    rig.recover()
    rig.resume(rig.engine)
    reader = rig.attach(device=None)
    assert rig.outcomes(reader, hashes) == [Outcome.MISS]
    rig.store.sharing.verifies(rig.engine, True)
    grant, _ = rig.loaded(hashes)
    assert rig.store._state.checksums.of(grant.dram_slots).tolist() == [list(RIGHT)]
    rig.check()


def test_who_was_given_a_block_before_another_found_it_wrong_has_its_checksum_still(rig: Comparing) -> None:
    """It was forgotten with the first word against the block, so that the second engine compared it with nothing."""
    hashes = rig.promoted()
    second = rig.attach_comparing(device=1)
    grant, loads = rig.loaded(hashes)
    later, other_loads = rig.loaded(hashes, second)
    rig.step(rig.engine, wrong_loads=loads)
    assert checksums_of(rig.store._state.columns, later.dram_slots).tolist() == [list(RIGHT)]
    rig.step(second, wrong_loads=other_loads)
    assert rig.counter("checksum_failures") == 1, "it is one block"
    assert [each.where for each in rig.store.watching.take_misread()] == ["path 0, extent 2, slot 0"]
    rig.give_back(grant)
    rig.give_back(later, second)
    rig.check()
    assert rig.tier(Tier.DRAM).sealed_slots == rig.tier(Tier.NVME).sealed_slots == 0
    assert rig.tier(Tier.HBM).held_slots == 0


@pytest.mark.parametrize("said", ["by another load", "by a report"])
def test_a_block_that_was_taken_back_while_it_is_written_does_not_end_twice(
    rig: Comparing, said: str
) -> None:
    """Its row was freed twice, and so would have been given to two blocks."""
    hashes = chain(2)
    rig.write_through(rig.engine, hashes, np.full((2, 2), RIGHT, dtype=np.uint64))
    writes = rig.moves(MoveKind.WRITE)
    rig.evict_hbm()
    second = rig.attach_comparing(device=1)
    grant, loads = rig.loaded(hashes)
    later, other_loads = rig.loaded(hashes, second)
    if said == "by a report":
        rig.store.watching.report(rig.namespaces[rig.engine], hashes[:1], "computed otherwise")
    else:
        rig.step(rig.engine, wrong_loads=loads)
    rig.step(second, wrong_loads=other_loads)
    rig.check()
    assert rig.counter("wrong_blocks") == (1 if said == "by a report" else 2)
    rig.give_back(grant)
    rig.give_back(later, second)
    rig.answer(writes, WRONG)
    rig.store.tick(rig.now_ms)
    rig.check()
    for tier in (Tier.HBM, Tier.DRAM, Tier.NVME):
        assert rig.tier(tier).sealed_slots == 0
