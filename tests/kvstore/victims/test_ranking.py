"""Policies of tiers: what they are told of, whose victims are taken, and what they never heard of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eviction.base import MayGo, Rows, Stop, Use
from eviction.factory import policy_factory
from kvstore.layout import NONE, Tier
from kvstore.moves import StoreLimits
from tests.kvstore.store_rig import PAGE, Rig
from tests.kvstore.store_rig import chain as prompt


class Told:
    """A policy that remembers what it was told, and names what it is to name; the first first."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.ends: list[tuple[list[int], Stop]] = []
        self.removed: list[int] = []
        self.names: list[int] = []
        self.rows: set[int] = set()

    def __call__(self, *, rows: int, capacity_blocks: int) -> Told:
        self.capacity_blocks = capacity_blocks
        return self

    def use(self, use: Use) -> None:
        assert use.fresh.tolist() == [row not in self.rows for row in use.rows.tolist()]
        self.uses.append(use)
        self.rows |= set(use.rows.tolist())

    def ended(self, rows: Rows, stop: Stop) -> None:
        self.ends.append((rows.tolist(), stop))

    def expect(self, waiting: Sequence[Rows]) -> None:
        raise NotImplementedError

    def victims(self, count: int, _now_s: float, may_go: MayGo | None = None) -> Rows:
        assert may_go is not None
        rows = np.array([row for row in self.names if row in self.rows], dtype=np.uint32)
        found = rows[may_go(rows)][:count]
        self.rows -= set(found.tolist())
        return found

    def remove(self, rows: Rows) -> None:
        assert set(rows.tolist()) <= self.rows
        self.removed += rows.tolist()
        self.rows -= set(rows.tolist())

    def __len__(self) -> int:
        return len(self.rows)

    def check_integrity(self) -> None:
        """It has no parts."""


def ranked(rig: Rig, tier: Tier) -> Told:
    told = Told()
    rig.store.hints.rankings.rank(tier, "told", told, 8 * PAGE)
    return told


def rows_of(rig: Rig, session: int, hashes: np.ndarray) -> list[int]:
    return rig.store._state.table.locate(hashes, rig.namespaces[session]).tolist()


def serve(rig: Rig, session: int, hashes: np.ndarray, lease: int) -> None:
    """A request from beginning to end: what is missing is computed and written through."""
    grant = rig.acquire(session, hashes, lease=lease)
    assert grant.complete
    missing = np.flatnonzero(grant.dram_slots == NONE)
    rig.step(session, hbm=grant.hbm_slots, dram=grant.dram_slots)
    if len(missing):
        rig.write_through(session, hashes)
    rig.store.hints.rankings.tell(rig.now_ms / 1000)


def test_a_prompt_is_told_of_as_a_whole_once_and_again_when_it_is_used_again() -> None:
    """Told block by block as they came, the head of a prompt was older than its tail, and went before it."""
    rig = Rig(hbm=16, dram=8, nvme=0)
    session, hashes = rig.attach(), prompt(4)
    told = ranked(rig, Tier.DRAM)
    rig.write_through(session, hashes[:1])  # the policy begins with the first block that comes
    rig.store.hints.rankings.tell(1.0)
    assert told.capacity_blocks == 8
    grant = rig.acquire(session, hashes, lease=5)
    for at in (3, 1, 2):  # they come in any order
        rig.step(
            session,
            seals=rig.seals(
                session,
                hashes,
                grant.hbm_slots[at : at + 1],
                grant.hbm_generations[at : at + 1],
                first=at,
            ),
        )
    rig.acquire(session, hashes, lease=5)  # asks again, for whatever reason
    rig.store.hints.rankings.tell(2.0)
    (first, second) = told.uses
    assert second.rows.tolist() == rows_of(rig, session, hashes)
    assert second.fresh.tolist() == [False, True, True, True]
    assert second.depths.tolist() == [0, 1, 2, 3]
    assert (first.now_s, second.now_s, second.prompt_blocks) == (1.0, 2.0, 4)
    rig.acquire(session, hashes, lease=6)
    rig.store.hints.rankings.tell(3.0)
    assert told.uses[2].rows.tolist() == second.rows.tolist()
    assert not told.uses[2].fresh.any()


def test_of_what_a_policy_names_only_what_may_go_does() -> None:
    rig = Rig(hbm=16, dram=4, nvme=0)
    session = rig.attach()
    told = ranked(rig, Tier.DRAM)
    old, new = prompt(2, seed=1), prompt(2, seed=2)
    serve(rig, session, old, 1)
    serve(rig, session, new, 2)
    rig.evict_hbm()
    held = rig.acquire(session, new[:1], lease=3)
    rows = rows_of(rig, session, np.concatenate((new, old)))
    told.names = [200, *rows]  # new before old; nothing is in row 200
    serve(rig, session, prompt(2, seed=3), 4)
    columns = rig.store._state.columns
    assert [bool(columns.dram[row] != NONE) for row in rows] == [True, False, False, True]  # new[0] is held
    rig.step(session, hbm=held.hbm_slots, dram=held.dram_slots)
    rig.store.hints.rankings.check_integrity()
    rig.check()


def test_strangers_go_first_and_by_the_stores_own_order() -> None:
    """What an earlier daemon left is older than all that was used since; no start has to tell a policy of it."""
    rig = Rig(hbm=16, dram=6, nvme=0)
    session = rig.attach()
    left = [prompt(2, seed=seed) for seed in (1, 2)]
    for hashes in left:
        rig.write_through(session, hashes)
    rig.evict_hbm()
    told = ranked(rig, Tier.DRAM)
    mine = prompt(2, seed=3)
    serve(rig, session, mine, 1)
    rig.evict_hbm()
    told.names = rows_of(rig, session, mine)
    serve(rig, session, prompt(2, seed=4), 2)
    serve(rig, session, prompt(1, seed=5), 3)
    assert [rows_of(rig, session, hashes)[0] == NONE for hashes in (*left, mine)] == [True, False, False]
    assert rows_of(rig, session, left[1])[1] == NONE, "the tail first"
    rig.evict_hbm()
    serve(rig, session, prompt(2, seed=6), 4)
    assert rows_of(rig, session, left[1])[0] == NONE
    assert rows_of(rig, session, mine) != told.names, "then what the policy names"
    rig.check()


def test_what_only_dram_has_waits_for_its_copy_below() -> None:
    rig = Rig(hbm=16, dram=4, nvme=8)
    session = rig.attach()
    told = ranked(rig, Tier.DRAM)
    below, alone = prompt(2, seed=1), prompt(2, seed=2)
    serve(rig, session, below, 1)
    rig.write_down()
    serve(rig, session, alone, 2)
    told.names = rows_of(rig, session, np.concatenate((alone, below)))
    columns = rig.store._state.columns
    serve(rig, session, prompt(2, seed=3), 3)
    assert (columns.dram[rows_of(rig, session, alone)] != NONE).all()
    assert (columns.dram[rows_of(rig, session, below)] == NONE).all()
    rig.check()


def test_what_a_queued_request_wants_no_policy_names() -> None:
    rig = Rig(hbm=16, dram=4, nvme=0)
    session = rig.attach()
    told = ranked(rig, Tier.DRAM)
    wanted, other = prompt(2, seed=1), prompt(2, seed=2)
    serve(rig, session, wanted, 1)
    serve(rig, session, other, 2)
    rig.evict_hbm()
    told.names = rows_of(rig, session, np.concatenate((wanted, other)))
    rig.store.prefetch(
        now_ms=rig.now_ms,
        session=session,
        namespace=rig.namespaces[session],
        lease=9,
        hashes=wanted,
        deadline_ms=0,
    )
    serve(rig, session, prompt(2, seed=3), 3)
    assert rows_of(rig, session, other)[0] == NONE
    assert NONE not in rows_of(rig, session, wanted)
    rig.evict_hbm()
    serve(rig, session, prompt(4, seed=4), 4)  # nothing is pinned: where there is nothing else they go
    assert NONE in rows_of(rig, session, wanted)
    rig.check()


def test_a_block_in_a_row_that_was_anothers_is_new() -> None:
    rig = Rig(hbm=16, dram=4, nvme=0, rows=8)
    session = rig.attach()
    told = ranked(rig, Tier.DRAM)
    first = prompt(2, seed=1)
    serve(rig, session, first, 1)
    rig.store.clear(None)
    rig.store.tick(rig.now_ms)
    for seed in range(2, 6):
        serve(rig, session, prompt(2, seed=seed), seed)
        rig.store.clear(None)
        rig.store.tick(rig.now_ms)
    assert len(told.removed) > 2, "the rows of blocks that were cleared have others"
    rig.store.hints.rankings.check_integrity()


def test_why_an_answer_ended_is_told_of_blocks_that_are_known() -> None:
    rig = Rig(hbm=16, dram=8, nvme=0)
    session, hashes = rig.attach(), prompt(3)
    told = ranked(rig, Tier.DRAM)
    serve(rig, session, hashes, 1)
    rows = np.array(rows_of(rig, session, hashes), dtype=np.uint32)
    rig.store.hints.rankings.ended(rows, Stop.TOOL_USE)
    rig.store.hints.rankings.tell(rig.now_ms / 1000)
    assert told.ends == [(rows.tolist(), Stop.TOOL_USE)]


def test_every_policy_keeps_a_store_sound() -> None:
    for name in ("arc", "auto", "fifo", "gdsf", "hazard", "lru", "s3fifo", "sieve", "wtinylfu"):
        rig = Rig(hbm=12, dram=24, nvme=48, limits=StoreLimits(reserve_slots=2, reserve_fraction=0.1))
        session, rng = rig.attach(), np.random.default_rng(7)
        for tier, blocks in ((Tier.DRAM, 24), (Tier.NVME, 48)):
            rig.store.hints.rankings.rank(tier, name, policy_factory(name), blocks * PAGE)
        for lease in range(1, 160):
            hashes = prompt(int(rng.integers(1, 6)), seed=int(20 * rng.random() ** 2))
            grant = rig.acquire(session, hashes, lease=lease)
            rig.step(
                session, hbm=np.concatenate((grant.hbm_slots, grant.reserve_slots)), dram=grant.dram_slots
            )
            if grant.complete:
                rig.write_through(session, hashes)
                rig.step(session, dram=np.arange(24, dtype=np.uint32))  # what it found there
            rig.write_down()
            rig.store.take_changed()
            rig.store.tick(rig.now_ms)
            if lease % 20 == 0:
                rig.store.hints.rankings.check_integrity()
                rig.check()
        assert rig.counter("evictions_nvme") > 0
        assert not rig.store.hints.rankings.faults
