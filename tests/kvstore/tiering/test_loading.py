"""Blocks found on disk: what is built outside, and its way into a store that serves meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.layout import NONE, State, Tier, states
from kvstore.moves import MoveKind, NvmeChanges, Outcome
from kvstore.tables.prebuilt import Blocks, LoadPlan, Prebuilder, SlabSlots, open_prebuilt, prebuilt_bytes
from kvstore.tiering.loading import FIRST_COLUMNS, LAST_COLUMNS, Loading, LoadSlab
from tests.kvstore.store_rig import PAGE, Rig, build, chain

SLOTS = 32
SLAB = LoadSlab(slab=9, nbytes=SLOTS * 2 * PAGE, slot_bytes=PAGE)
MISS, PENDING, PROMOTING = Outcome.MISS, Outcome.PENDING, Outcome.PROMOTING


def found(count: int, *, seed: int = 0, namespace: int = 0, first_slot: int = 0) -> Blocks:
    """A chain in neighbouring slots."""
    hashes = chain(count, seed=seed)
    parents = np.zeros_like(hashes)
    parents[1:] = hashes[:-1]
    return Blocks(
        hashes=hashes,
        parents=parents,
        namespaces=np.full(count, namespace, dtype=np.uint32),
        depths=np.arange(count, dtype=np.uint32),
        touches=np.full(count, 5 << 20, dtype=np.uint64),
        slots=np.arange(first_slot, first_slot + count, dtype=np.uint32),
        generations=np.arange(7, 7 + count, dtype=np.uint32),
    )


def joined(*parts: Blocks) -> Blocks:
    names = ("hashes", "parents", "namespaces", "depths", "touches", "slots", "generations")
    return Blocks(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def of_changes(changes: NvmeChanges, namespace: int) -> Blocks:
    """What the durable index was told."""
    entries = changes.published
    return Blocks(
        hashes=entries["hash"],
        parents=entries["parent"],
        namespaces=np.full(len(entries), namespace, dtype=np.uint32),
        depths=entries["depth"],
        touches=entries["touch"],
        slots=entries["slot"],
        generations=entries["generation"],
    )


def fresh() -> tuple[Rig, int, int]:
    """A store whose NVMe tier nobody knows yet, with a session and its namespace."""
    rig = Rig(nvme=0)
    session = rig.attach()
    return rig, session, rig.namespaces[session]


def begun(rig: Rig, blocks: Blocks) -> tuple[Loading, object]:
    """A load of one slab, copied and ready for its turns."""
    load = rig.store.begin_load(0, [SLAB], len(blocks.slots))
    built = build(load, {9: blocks})
    for copy in load.copies(built, FIRST_COLUMNS + LAST_COLUMNS):
        copy.target[:] = copy.source
    rig.check()
    return load, built


def test_blocks_found_on_disk_are_hits() -> None:
    rig = Rig()
    one = rig.attach()
    rig.write_through(one, chain(6))
    rig.write_down()
    told = rig.store.index_changes.take(0, 1000)
    other, two, namespace = fresh()
    blocks = of_changes(told, namespace)
    load = other.load(0, [SLAB], {9: blocks})
    assert load.loaded == 6
    assert other.acquire(two, chain(6), lease=1).outcomes.tolist() == [PROMOTING] * 6
    moves = other.store.take_moves(0, 10)
    assert sorted(moves["generation"].tolist()) == sorted(blocks.generations.tolist())
    state = other.store._state
    rows = state.table.locate(chain(6), namespace)
    assert state.columns.parent[rows].tolist() == [NONE, *rows[:-1].tolist()]
    assert state.nvme.class_of(next(iter(state.nvme.classes))).slots == SLOTS
    assert len(other.store.index_changes.take(0, 1000).published) == 0, "the index knows them already"
    other.check()


def test_nothing_is_a_hit_before_its_turn_and_rows_left_over_come_back() -> None:
    rig, session, namespace = fresh()
    rows = len(rig.store._state.table.runs)
    load, built = begun(rig, found(8, namespace=namespace))
    assert rig.outcomes(session, chain(8)) == [MISS] * 8
    turns = load.turns(built)  # type: ignore[arg-type]
    next(turns)
    assert rig.outcomes(session, chain(8)) == [MISS] * 8
    for _ in turns:
        rig.check()
    assert rig.outcomes(session, chain(8)) == [PROMOTING] * 8
    assert len(rig.store._state.table.runs) == rows - 8


def test_what_a_session_stored_meanwhile_stays_its_own_and_keeps_its_copy_on_disk() -> None:
    """The same block would be there twice, and which of the two is found would be chance. Then the disk was made to
    forget its copy: what a flush had acknowledged was in memory alone until it was written again.
    """
    rig, session, namespace = fresh()
    load, built = begun(rig, found(20, namespace=namespace))
    rig.write_through(session, chain(12))
    turns = load.turns(built)  # type: ignore[arg-type]
    next(turns)
    rig.fill(session, chain(16))  # after its bucket was taken over, and before the doubles are looked for
    for _ in turns:
        rig.check()
    assert load.loaded == 20
    state = rig.store._state
    at = state.table.locate(chain(20), namespace)
    assert (states(state.columns.state[at]) == State.SEALED).all()
    assert len(np.unique(at)) == 20
    assert state.columns.nvme[at].tolist() == list(range(20))
    assert state.nvme.generations(state.columns.nvme[at]).tolist() == list(range(7, 27))
    assert Outcome.MISS not in rig.outcomes(session, chain(20))
    assert len(rig.store.index_changes.take(0, 1000).freed) == 0, "the index forgets nothing"
    assert (rig.store.take_moves(0, 100)["kind"] == MoveKind.READ).all(), "and nothing is written again"
    rig.check()


def test_what_is_being_filled_meanwhile_is_found_where_its_worker_dies() -> None:
    """The disk was made to forget a block that a worker had begun to compute; it died, and the block was nowhere."""
    rig, session, namespace = fresh()
    load, built = begun(rig, found(8, namespace=namespace))
    filling = rig.acquire(session, chain(3))
    assert filling.outcomes.tolist() == [MISS] * 3
    other = rig.attach()
    assert rig.acquire(other, chain(3), lease=5).outcomes.tolist() == [PENDING] * 3
    for _ in load.turns(built):  # type: ignore[arg-type]
        rig.check()
    assert load.loaded == 8
    assert [leases for _, leases in rig.store.take_changed()] == [[5]], "who waited asks again"
    rig.step(session, seals=rig.seals(session, chain(1), filling.hbm_slots[:1], filling.hbm_generations[:1]))
    rig.check()
    rig.store.dead(session, rig.now_ms)
    rig.check()
    assert len(rig.store.index_changes.take(0, 1000).freed) == 0
    assert MISS not in rig.outcomes(other, chain(8))


@pytest.mark.parametrize("every", [False, True])
def test_a_clear_holds_for_what_is_still_being_found(every: bool) -> None:
    """Blocks of a namespace came back that was cleared while they were being read from disk."""
    rig, session, namespace = fresh()
    other = rig.store.intern_namespace(b"o" * 16)
    load, built = begun(
        rig,
        joined(found(8, namespace=namespace), found(8, seed=3, namespace=other, first_slot=8)),
    )
    turns = load.turns(built)  # type: ignore[arg-type]
    next(turns)
    rig.store.clear(None if every else namespace)
    for _ in turns:
        rig.check()
    assert load.loaded == (0 if every else 8)
    assert rig.outcomes(session, chain(8)) == [MISS] * 8


def test_what_was_stored_after_a_clear_does_not_bring_the_cleared_copy_back() -> None:
    rig, session, namespace = fresh()
    load, built = begun(rig, found(8, namespace=namespace))
    rig.store.clear(namespace)
    rig.write_through(session, chain(8))
    for _ in load.turns(built):  # type: ignore[arg-type]
        rig.check()
    assert load.loaded == 0
    at = rig.store._state.table.locate(chain(8), namespace)
    assert (rig.store._state.columns.nvme[at] == NONE).all()
    assert len(rig.store.index_changes.take(0, 1000).freed) == 8


def test_more_blocks_than_rows_leave_rows_for_sessions() -> None:
    rig, _, _ = fresh()
    most = rig.store._state.columns.shape.max_rows
    load = rig.store.begin_load(0, [replace(SLAB, nbytes=2 * PAGE * 64)], 10 * most)
    assert 0 < load.plan.rows < most
    load.cancel()
    assert len(rig.store._state.table.runs) == most
    assert rig.store.extents(Tier.NVME) == []
    rig.check()


def test_a_slab_that_does_not_fit_the_tables_is_left_out() -> None:
    rig, _, _ = fresh()
    too_many = LoadSlab(slab=3, nbytes=2 * PAGE * 64, slot_bytes=100)
    load = rig.store.begin_load(0, [too_many, SLAB], 0)
    assert [slab.slab for slab in load.plan.slabs] == [9]
    load.cancel()
    rig.check()


def plan(rows: int, slots: int, buckets: int, runs: tuple[tuple[int, int], ...] = ()) -> LoadPlan:
    return LoadPlan(
        runs=runs or ((0, rows),),
        slabs=(SlabSlots(slab=1, first=0, base=1000, slots=slots),),
        buckets=buckets,
        latest_touch=1 << 63,
    )


def random_blocks(count: int, seed: int = 1) -> Blocks:
    rng = np.random.default_rng(seed)
    hashes = rng.integers(1, 1 << 64, size=(count, 2), dtype=np.uint64)
    parents = np.zeros_like(hashes)
    parents[1:] = hashes[:-1]
    return replace(found(count), hashes=hashes, parents=parents)


@pytest.mark.parametrize("count", [1, 7, 5000, 300_000])
def test_the_index_that_is_built_finds_every_block(count: int) -> None:
    """Half full is the most that a store's index gets: every block has a place."""
    from kvstore.tables.index import look_up

    buckets = 1 << max(1, (-(-count // 4) - 1).bit_length())
    split = max(1, count // 3)
    runs = ((10, split), (500_000, count - split)) if count > 1 else ((10, 1),)
    wanted = plan(count, count, buckets, runs)
    memory = memoryview(bytearray(prebuilt_bytes(wanted)))
    builder = Prebuilder(memory, wanted)
    blocks = random_blocks(count)
    order = np.random.default_rng(2).permutation(count)
    builder.fill(order, blocks, wanted.slabs[0])
    assert builder.finish() == count
    built = open_prebuilt(memory, wanted)
    by_row = np.zeros((900_000, 2), dtype=np.uint64)
    rows = wanted.rows_of(order)
    by_row[rows] = blocks.hashes
    assert np.array_equal(look_up(built.tags, built.entries, by_row, blocks.hashes), rows)
    assert built.parent[order].tolist() == [NONE, *rows[:-1].tolist()]
    assert np.array_equal(built.slot_row, rows)
    assert np.array_equal(built.nvme[order], 1000 + np.arange(count))


def test_of_a_block_that_stands_twice_one_is_left_and_the_others_slot_is_free() -> None:
    blocks = joined(random_blocks(50), replace(random_blocks(50), slots=np.arange(50, 100, dtype=np.uint32)))
    wanted = plan(100, 100, 64)
    memory = memoryview(bytearray(prebuilt_bytes(wanted)))
    builder = Prebuilder(memory, wanted)
    builder.fill(np.arange(100), blocks, wanted.slabs[0])
    assert builder.finish() == 50
    built = open_prebuilt(memory, wanted)
    assert (built.slot_row[:50] == NONE).all()
    assert (built.slot_state[:50] == 0).all()
    assert built.slot_row[50:].tolist() == list(range(50, 100))
    assert np.count_nonzero(built.entries != NONE) == 50
