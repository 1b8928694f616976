"""A wrong block that somebody computes with: nothing made of it is found, whenever it was sealed, whatever dies."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.layout import NONE, Tier
from kvstore.moves import Grant, MissCause, MoveKind, Outcome, SealOutcome
from tests.kvstore.store_rig import Rig, chain, copies
from tests.kvstore.trust.test_watching import RIGHT, WRONG, Watched

PUBLISHED, DUPLICATE = SealOutcome.PUBLISHED, SealOutcome.DUPLICATE
DISTRUSTED = 4


@pytest.fixture
def rig() -> Watched:
    return Watched()


def loads(grant: Grant) -> NDArray[np.void]:
    """What a copier says of the DRAM hits of a grant."""
    at = grant.dram_slots != NONE
    return copies(
        grant.dram_slots[at], grant.dram_generations[at], grant.hbm_slots[at], grant.hbm_generations[at]
    )


def seals(rig: Rig, session: int, hashes: NDArray[np.uint64], grant: Grant, first: int) -> NDArray[np.void]:
    """Of the blocks from `first` on."""
    return rig.seals(session, hashes, grant.hbm_slots[first:], grant.hbm_generations[first:], first=first)


def begun(rig: Watched, blocks: int = 3) -> tuple[int, NDArray[np.uint64], Grant]:
    """An engine that was given a block from DRAM, and slots for those behind it."""
    hashes = chain(blocks)
    rig.write_through(rig.session, hashes[:1])
    rig.answer(rig.moves(MoveKind.WRITE), RIGHT)
    rig.evict_hbm()
    engine = rig.attach()
    grant = rig.acquire(engine, hashes)
    assert grant.outcomes.tolist() == [Outcome.HIT_DRAM, *[Outcome.MISS] * (blocks - 1)]
    return engine, hashes, grant


def found_wrong(rig: Watched) -> None:
    rig.answer(rig.moves(MoveKind.VERIFY), WRONG)
    rig.check()


def test_nothing_is_published_that_was_computed_from_a_block_found_wrong_after_its_load(rig: Watched) -> None:
    """It was: the load was not believed, and the engine computed on with what it had loaded."""
    engine, hashes, grant = begun(rig)
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
    found_wrong(rig)
    assert rig.step(engine, seals=seals(rig, engine, hashes, grant, 1)) == [DUPLICATE] * 2
    rig.check()
    assert rig.outcomes(rig.reader, hashes)[0] is Outcome.PROMOTING, "the disk's copy is right"
    assert rig.outcomes(rig.attach(), hashes[1:])[0] is Outcome.MISS


@pytest.mark.parametrize("when", ["before", "after"])
def test_nor_from_one_found_wrong_during_its_load(rig: Watched, when: str) -> None:
    """The source was let go of with the load: nothing said any more what the HBM slot has."""
    engine, hashes, grant = begun(rig)
    if when == "before":  # a session that waits would have the copy; this one has its own
        private = rig.acquire(engine, hashes[:1], lease=7, private=True)
        assert private.outcomes.tolist() == [Outcome.HIT_DRAM]
        grant = private
    found_wrong(rig)
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.check()
    computed = rig.acquire(engine, hashes[1:2], lease=8, private=True)
    records = rig.seals(engine, hashes, computed.hbm_slots, computed.hbm_generations, first=1)
    assert rig.step(engine, seals=records) == [DUPLICATE]


def test_a_private_copy_of_a_wrong_block_is_known(rig: Watched) -> None:
    """No row names a copy that was loaded while another slot had the block."""
    engine, hashes, grant = begun(rig)
    second = rig.attach()
    private = rig.acquire(second, hashes, private=True)
    assert private.outcomes.tolist()[0] == Outcome.HIT_DRAM
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(second, loads=loads(private), dram=private.dram_slots)
    rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
    found_wrong(rig)
    assert rig.step(second, seals=seals(rig, second, hashes, private, 1)) == [DUPLICATE] * 2


def test_what_was_published_before_is_taken_back_in_every_tier(rig: Watched) -> None:
    """Its checksum on disk is right: of bytes that were computed from a wrong block."""
    engine, hashes, grant = begun(rig, 5)
    other = np.concatenate((hashes[:1], chain(3, seed=9)[1:]))
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    assert rig.step(engine, seals=seals(rig, engine, hashes, grant, 1)) == [PUBLISHED] * 4
    rig.write_through(rig.session, chain(2, seed=3))  # nobody's child
    room = rig.room(engine, 2)
    pairs = copies(grant.hbm_slots[1:3], grant.hbm_generations[1:3], room.dram_slots, room.dram_generations)
    rig.step(engine, stores=pairs, dram=room.dram_slots)
    rig.answer(rig.store.take_moves(0, 100), RIGHT)
    beside = rig.attach()
    rig.fill(beside, other)
    assert rig.tier(Tier.NVME).sealed_slots == 5
    rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
    found_wrong(rig)
    assert rig.tier(Tier.NVME).sealed_slots == 3, "the block itself, and two that are not below it"
    for child in (hashes[1:], other[1:]):
        assert rig.outcomes(rig.attach(device=None), child)[0] is Outcome.MISS
    rig.check()
    rig.step(engine, hbm=grant.hbm_slots)
    rig.check()
    assert rig.outcomes(rig.attach(device=None), chain(2, seed=3)) == [Outcome.HIT_DRAM] * 2


def test_below_a_hole_nobody_knows_and_all_goes() -> None:
    """A block of the chain was evicted and its row given to another: what is below it was computed through it."""
    rig = Watched(rows=8)
    session = rig.session
    hashes = chain(4)
    rig.write_through(session, hashes)
    state = rig.store._state
    middle = state.table.find(hashes[1:2], rig.namespaces[session])
    rig.evict_hbm()
    state.drop_copies(Tier.DRAM, state.columns.dram[middle], MissCause.EVICTED)
    rig.fill(session, chain(3, seed=3))
    rig.fill(session, chain(2, seed=4))  # in its row, and as deep
    assert state.table.find(chain(2, seed=4)[1:], rig.namespaces[session]) == middle
    assert rig.store.watching.report(rig.namespaces[session], hashes[:1], "x") == 1
    assert rig.outcomes(rig.reader, hashes[2:])[0] is Outcome.MISS
    assert rig.outcomes(rig.attach(), chain(2, seed=4)) == [Outcome.HIT_HBM] * 2
    rig.check()


def test_who_let_go_of_it_publishes_again(rig: Watched) -> None:
    engine, hashes, grant = begun(rig)
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
    found_wrong(rig)
    other = rig.acquire(engine, chain(1, seed=2), lease=4)
    records = rig.seals(engine, chain(1, seed=2), other.hbm_slots, other.hbm_generations)
    assert rig.step(engine, seals=records) == [DUPLICATE], "whoever computes it, nobody can tell"
    rig.step(engine, hbm=np.concatenate((grant.hbm_slots, other.hbm_slots)))
    rig.check()
    hbm = rig.tier(Tier.HBM)
    assert hbm.free_slots == hbm.slots
    rig.fill(engine, chain(1, seed=2))
    assert rig.outcomes(rig.attach(), chain(1, seed=2)) == [Outcome.HIT_HBM]


def test_a_restart_forgets_none_of_it(rig: Watched) -> None:
    engine, hashes, grant = begun(rig)
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
    found_wrong(rig)
    rig.recover()
    rig.check()
    rig.resume(engine, hbm=grant)
    assert rig.step(engine, seals=seals(rig, engine, hashes, grant, 1)) == [DUPLICATE] * 2
    rig.step(engine, hbm=grant.hbm_slots)
    rig.check()
    hbm = rig.tier(Tier.HBM)
    assert hbm.free_slots == hbm.slots


def test_after_a_restart_any_slot_to_fill_may_be_a_copy(rig: Watched) -> None:
    """Which private slots are copies, and of what, the daemon that died knew alone."""
    engine, hashes, grant = begun(rig)
    second = rig.attach()
    private = rig.acquire(second, hashes, private=True)
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(second, loads=loads(private), dram=private.dram_slots)
    rig.recover()
    rig.resume(second, hbm=private)
    rig.reader = rig.attach(device=None)
    for checksum in (RIGHT, WRONG):
        rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
        rig.answer(rig.moves(MoveKind.VERIFY), checksum)
    rig.check()
    assert rig.step(second, seals=seals(rig, second, hashes, private, 1)) == [DUPLICATE] * 2


def test_a_wrong_block_that_a_mover_writes_is_served_to_nobody(rig: Watched) -> None:
    """It was, until the mover had ended."""
    hashes = chain(1)
    rig.write_through(rig.session, hashes)
    rig.evict_hbm()
    writes = rig.moves(MoveKind.WRITE)
    for checksum in (RIGHT, WRONG):
        rig.step(rig.reader, dram=rig.serve(hashes).dram_slots)
        rig.answer(rig.moves(MoveKind.VERIFY), checksum)
    rig.check()
    assert rig.outcomes(rig.reader, hashes) == [Outcome.MISS]
    rig.recover()
    rig.check()
    assert rig.outcomes(rig.attach(device=None), hashes) == [Outcome.MISS], "nor by who takes over"
    rig.store.mover_dead(0, rig.now_ms)
    rig.done(writes)
    rig.check()


def test_clients_see_by_a_counter_that_slots_were_marked(rig: Watched) -> None:
    engine, hashes, grant = begun(rig)
    columns = rig.store._state.columns
    assert int(columns.distrusts[0]) == 0
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(rig.reader, dram=rig.serve(hashes[:1]).dram_slots)
    found_wrong(rig)
    assert int(columns.distrusts[0]) == 1
    assert int(columns.pool(Tier.HBM).state[grant.hbm_slots[0]]) & 0xFF == DISTRUSTED


def test_an_extent_that_is_gone_takes_marked_slots_with_it(rig: Watched) -> None:
    engine, _, grant = begun(rig)
    rig.step(engine, loads=loads(grant), dram=grant.dram_slots)
    rig.step(rig.reader, dram=rig.serve(chain(1)).dram_slots)
    found_wrong(rig)
    rig.store.lost(engine, rig.now_ms)
    for session in (rig.session, engine):
        rig.store.lost(session, rig.now_ms)
    (extent,) = rig.store.extents(Tier.HBM)
    rig.store.drop_extent(extent.extent)
    rig.check()
    assert rig.store._state.spoiled == 0


@pytest.mark.parametrize("first", ["session", "mover"])
def test_a_restart_while_a_mover_is_at_work_on_a_wrong_block_takes_nothing_from_who_holds_it(
    rig: Watched, first: str
) -> None:
    """The mover's end freed the slot under the session that held it too; and who held it published again."""
    hashes = chain(1)
    rig.write_through(rig.session, hashes)
    rig.evict_hbm()
    rig.moves(MoveKind.WRITE)
    for checksum in (RIGHT, WRONG):
        grant = rig.serve(hashes)
        rig.answer(rig.moves(MoveKind.VERIFY), checksum)
    rig.recover()
    rig.check()
    assert rig.tier(Tier.DRAM).held_slots == 1
    assert int(rig.store._state.spoiled) == 1 << rig.reader
    dram = (grant.dram_slots, grant.dram_generations)
    rig.store.resume(
        now_ms=rig.now_ms, session=rig.reader, hbm_slots=dram[0][:0], hbm_gens=dram[1][:0], dram_slots=dram[0],
        dram_gens=dram[1],
    )  # fmt: skip
    if first == "mover":
        rig.store.mover_dead(0, rig.now_ms)
        rig.check()
        assert rig.tier(Tier.DRAM).held_slots == 1
    rig.step(rig.reader, dram=grant.dram_slots)
    if first == "session":
        rig.check()
        rig.store.mover_dead(0, rig.now_ms)
    rig.check()
    dram_tier = rig.tier(Tier.DRAM)
    assert dram_tier.free_slots == dram_tier.slots


def test_an_engine_that_copied_a_wrong_block_away_publishes_nothing_behind_it(rig: Watched) -> None:
    """One with memory of its own lets go of a block once it has it: its slots did not say what it computes with."""
    hashes = chain(4)
    rig.write_through(rig.session, hashes[:1])
    rig.answer(rig.moves(MoveKind.WRITE), RIGHT)
    rig.evict_hbm()
    engine = rig.attach(device=None)
    rig.step(engine, dram=rig.acquire(engine, hashes[:1]).dram_slots)
    found_wrong(rig)

    def sealed(session: int, blocks: NDArray[np.uint64], first: int) -> list[int]:
        room = rig.room(session, len(blocks) - first)
        records = rig.seals(session, blocks, room.dram_slots, room.dram_generations, first=first)
        records["parent"][0] = blocks[first - 1] if first else 0
        outcomes = rig.step(session, seals=records)
        rig.step(session, dram=room.dram_slots)
        rig.check()
        return outcomes

    assert sealed(engine, hashes[:3], 1) == [DUPLICATE] * 2
    assert sealed(engine, hashes, 3) == [DUPLICATE], "its parent was not published"
    assert sealed(engine, chain(2, seed=8), 0) == [PUBLISHED] * 2
    assert sealed(engine, hashes[:1], 0) in ([PUBLISHED], [DUPLICATE])
    rig.store.dead(engine, rig.now_ms)
    assert sealed(rig.attach(device=None), hashes, 1) == [PUBLISHED] * 3
