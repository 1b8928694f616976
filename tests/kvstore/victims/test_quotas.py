"""Who gives when somebody needs room: whoever is over quota first, and never what is reserved for another."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.tables import FilledStore
from eviction.auto import AutoPolicy
from eviction.base import PolicyFactory
from eviction.s3fifo import S3FifoPolicy
from kvstore.layout import NONE, Tier
from kvstore.moves import Outcome, StoreLimits
from kvstore.tables.prebuilt import Blocks
from kvstore.tables.slots import ClassKey
from kvstore.tenant import OTHERS, Tenant
from kvstore.tiering.loading import LoadSlab
from kvstore.victims.quotas import ANYBODY, in_turn
from kvstore.victims.turns import Turns
from tests.kvstore.store_rig import NO_SLOTS, PAGE, Rig, chain, copies

SLOT = 10
NO_QUOTA = 1 << 62


def turns(
    used: list[int], quota: list[int], reserve: list[int], asks: int = ANYBODY, asked: int = 0, slots: int = 4
) -> list[tuple[list[int], int]]:
    found = in_turn(
        used=np.array(used),
        quota=np.array(quota),
        reserve=np.array(reserve),
        asks=asks,
        asked_bytes=asked * SLOT,
        slot_bytes=SLOT,
        slots=slots,
    )
    return [(np.flatnonzero(givers.who).tolist(), givers.slots) for givers in found]


def test_whoever_is_over_quota_gives_first_then_who_has_more_than_is_reserved_then_the_asker() -> None:
    assert turns([100, 100, 100], [70, NO_QUOTA, NO_QUOTA], [0, 60, 100], asks=2, asked=4) == [
        ([0], 3),
        ([0, 1], 4),
        ([2], 4),
    ]


def test_no_turn_takes_more_than_what_its_smallest_giver_may_lose() -> None:
    assert turns([100, 100], [80, 95], [0, 0], slots=9) == [([0, 1], 1), ([0, 1], 9)]
    assert turns([100, 100], [NO_QUOTA] * 2, [85, 0], slots=9) == [([0, 1], 1)], "15 bytes spare are one slot"


def test_who_asks_for_more_than_its_quota_counts_as_over_it() -> None:
    """At its quota exactly, a tenant that goes on storing pushed out the others, and never its own blocks."""
    assert turns([50, 50], [50, NO_QUOTA], [0, 0], asks=0, asked=2, slots=2)[0] == ([0], 2)
    assert turns([50, 50], [50, NO_QUOTA], [0, 0], asks=1, asked=2, slots=2)[0] == ([0, 1], 2)


def test_a_quota_never_takes_what_is_reserved() -> None:
    assert turns([50, 50], [50, NO_QUOTA], [50, 0], asks=0, asked=2, slots=2)[0] == ([1], 2)


def test_the_background_takes_from_no_reserve() -> None:
    assert turns([50, 50], [NO_QUOTA] * 2, [50, 60]) == []


ALICE, BOB, EVE = "alice", "bob", "eve"


class Shared:
    """A store of few blocks that tenants share; each has a session and a namespace of its own."""

    def __init__(self, *tenants: Tenant, hbm: int = 32, dram: int = 32, nvme: int = 32) -> None:
        limits = StoreLimits(reserve_slots=0, reserve_fraction=0.0)
        self.rig = Rig(hbm=hbm, dram=dram, nvme=nvme, rows=512, limits=limits)
        self.sharing = self.rig.store.sharing
        self.sharing.configure(tenants)
        self.sessions: dict[str, int] = {}
        for name in (ALICE, BOB, EVE):
            session = self.rig.attach(digest=name.encode().ljust(32, b"."))
            self.sharing.assign(self.rig.namespaces[session], name)
            self.sessions[name] = session

    def fill(self, name: str, blocks: int, seed: int) -> None:
        """A prompt is computed and stored in HBM."""
        self.rig.fill(self.sessions[name], chain(blocks, seed=seed))

    def store(self, name: str, blocks: int, seed: int) -> None:
        """And in DRAM, as far as there is room."""
        rig, session = self.rig, self.sessions[name]
        grant = rig.fill(session, chain(blocks, seed=seed), keep=True)
        rig.step(session, want_room=blocks)
        rig.message += 1
        room = rig.store.top_up(session, rig.message)
        here = grant.hbm_slots != NONE
        slots, generations = grant.hbm_slots[here], grant.hbm_generations[here]
        given = 0 if room is None else min(len(room.dram_slots), len(slots))
        if room is not None:
            moved = copies(
                slots[:given], generations[:given], room.dram_slots[:given], room.dram_generations[:given]
            )
            rig.step(session, stores=moved, hbm=slots, dram=room.dram_slots)
        rig.step(session, hbm=np.concatenate((slots, grant.reserve_slots)), dram=grant.dram_slots)

    def used(self, tier: Tier) -> dict[str, int]:
        """Blocks of each tenant."""
        shares = self.sharing.shares()
        return {share.tenant: share.used_bytes // PAGE for share in shares if share.tier is tier}

    def all_used(self) -> dict[tuple[str, Tier], int]:
        return {(name, tier): used for tier in Tier for name, used in self.used(tier).items()}


def test_whoever_is_over_quota_gives_although_others_were_used_longer_ago() -> None:
    """By age alone a tenant that stores much pushes out all that the others have."""
    shared = Shared(Tenant(name=ALICE, hbm_quota_bytes=8 * PAGE))
    shared.fill(BOB, 12, seed=1)
    shared.fill(ALICE, 16, seed=2)
    assert shared.used(Tier.HBM) == {OTHERS: 12, ALICE: 16}, "free room is anybody's, also beyond the quota"
    shared.fill(EVE, 8, seed=3)
    assert shared.used(Tier.HBM) == {OTHERS: 20, ALICE: 12}
    shared.fill(EVE, 8, seed=4)
    assert shared.used(Tier.HBM) == {OTHERS: 24, ALICE: 8}, "below the quota age counts again: Bob's went"
    shared.rig.check()


def test_who_goes_on_storing_at_its_quota_pushes_out_its_own_blocks() -> None:
    shared = Shared(Tenant(name=ALICE, hbm_quota_bytes=8 * PAGE), Tenant(name=BOB))
    shared.fill(BOB, 24, seed=1)
    for seed in range(2, 6):
        shared.fill(ALICE, 8, seed=seed)
        assert shared.used(Tier.HBM) == {OTHERS: 0, ALICE: 8, BOB: 24}
    shared.rig.check()


def test_a_tenant_gets_its_reserve_from_those_that_have_more_than_theirs() -> None:
    shared = Shared(
        Tenant(name=ALICE, hbm_reserve_bytes=16 * PAGE), Tenant(name=BOB, hbm_reserve_bytes=8 * PAGE)
    )
    shared.fill(BOB, 32, seed=1)
    shared.fill(ALICE, 16, seed=2)
    assert shared.used(Tier.HBM) == {OTHERS: 0, ALICE: 16, BOB: 16}
    shared.fill(EVE, 32, seed=3)
    assert shared.used(Tier.HBM) == {OTHERS: 8, ALICE: 16, BOB: 8}, "not all that she asked for"
    shared.fill(ALICE, 16, seed=4)
    assert shared.used(Tier.HBM) == {OTHERS: 0, ALICE: 24, BOB: 8}, (
        "who has no reserve gives before her own goes"
    )
    shared.rig.check()


def test_at_its_reserve_a_tenant_still_replaces_its_own_blocks() -> None:
    shared = Shared(*(Tenant(name=name, hbm_reserve_bytes=16 * PAGE) for name in (ALICE, BOB)))
    shared.fill(BOB, 16, seed=1)
    shared.fill(ALICE, 16, seed=2)
    shared.fill(ALICE, 10, seed=3)
    assert shared.used(Tier.HBM) == {OTHERS: 0, ALICE: 16, BOB: 16}
    assert shared.rig.store.stats().counters["evictions_hbm"] == 10
    shared.fill(EVE, 4, seed=4)
    assert shared.used(Tier.HBM)[OTHERS] == 0, "all is reserved: she runs without a cache"
    shared.rig.check()


@pytest.mark.parametrize("seed, policy", [(0, None), (1, None), (2, S3FifoPolicy), (3, AutoPolicy)])
def test_no_tenant_loses_what_is_reserved_for_it_to_another(seed: int, policy: PolicyFactory | None) -> None:
    """Whatever the tenants do, in all tiers and under policies that name victims: a turn of one never leaves another
    below the smaller of what it had and what is reserved for it."""
    rng = np.random.default_rng(seed)
    shared = Shared(
        Tenant(name=ALICE, hbm_reserve_bytes=10 * PAGE, dram_reserve_bytes=12 * PAGE, nvme_reserve_bytes=9 * PAGE),
        Tenant(
            name=BOB, hbm_quota_bytes=12 * PAGE, dram_quota_bytes=8 * PAGE, nvme_quota_bytes=16 * PAGE,
            hbm_reserve_bytes=4 * PAGE, dram_reserve_bytes=8 * PAGE, nvme_reserve_bytes=5 * PAGE,
        ),
    )  # fmt: skip
    if policy is not None:
        for tier in (Tier.DRAM, Tier.NVME):
            shared.rig.store._state.rankings.rank(tier, "policy", policy, 32 * PAGE)
    names = (OTHERS, ALICE, BOB)
    reserved = {(share.tenant, share.tier): share.reserve_bytes // PAGE for share in shared.sharing.shares()}
    evicted = 0
    for _ in range(150):
        before = shared.all_used()
        who = (ALICE, BOB, EVE)[rng.integers(3)]
        what = rng.integers(4)
        if what == 0:
            shared.fill(who, int(rng.integers(1, 14)), seed=int(rng.integers(12)))
        elif what == 1:
            shared.store(who, int(rng.integers(1, 14)), seed=int(rng.integers(12)))
        elif what == 2:
            shared.rig.write_down()
            who = None
        else:
            shared.rig.outcomes(shared.sessions[who], chain(12, seed=int(rng.integers(12))))
        after = shared.all_used()
        own = OTHERS if who == EVE else who
        for name in names:
            for tier in Tier:
                if name != own and not (who is None and tier is Tier.NVME):
                    kept = min(before[name, tier], reserved[name, tier])
                    assert after[name, tier] >= kept, (name, tier, what, who)
        shared.rig.check()
        evicted = shared.rig.counter("evictions_hbm") + shared.rig.counter("evictions_nvme")
    assert evicted > 100
    assert min(shared.all_used()[name, tier] for name in (ALICE, BOB) for tier in Tier) > 0


def test_what_is_written_down_takes_from_its_own_tenant_first() -> None:
    """One mover takes the blocks of several tenants at a time: each finds room as if it were alone."""
    shared = Shared(
        Tenant(name=ALICE, nvme_reserve_bytes=20 * PAGE),
        Tenant(name=BOB, nvme_quota_bytes=12 * PAGE),
        hbm=64,
        dram=64,
    )
    for seed in range(2):
        shared.store(ALICE, 10, seed=seed)
        shared.store(BOB, 6, seed=10 + seed)
    shared.rig.write_down()
    assert shared.used(Tier.NVME) == {OTHERS: 0, ALICE: 20, BOB: 12}
    for seed in range(2, 4):
        shared.store(BOB, 6, seed=10 + seed)
        shared.rig.write_down()
        assert shared.used(Tier.NVME) == {OTHERS: 0, ALICE: 20, BOB: 12}
    shared.store(EVE, 6, seed=30)
    shared.rig.write_down()
    assert shared.used(Tier.NVME) == {OTHERS: 6, ALICE: 20, BOB: 6}
    shared.rig.check()


def test_at_its_reserve_a_tenant_still_gets_its_blocks_from_disk() -> None:
    """They come in the place of its own: what is reserved for it is its own to give."""
    shared = Shared(*(Tenant(name=name, dram_reserve_bytes=16 * PAGE) for name in (ALICE, BOB)), hbm=64)
    rig, bob = shared.rig, shared.sessions[BOB]
    shared.store(BOB, 8, seed=1)
    rig.write_down()
    rig.evict_dram()
    rig.evict_hbm()
    for seed in range(16):  # one by one: sessions share the room that is free
        shared.store(BOB, 1, seed=100 + seed)
        shared.store(ALICE, 1, seed=200 + seed)
    assert shared.used(Tier.DRAM) == {OTHERS: 0, ALICE: 16, BOB: 16}
    assert rig.acquire(bob, chain(8, seed=1)).outcomes.tolist() == [Outcome.PROMOTING] * 8
    rig.write_down()
    assert shared.used(Tier.DRAM) == {OTHERS: 0, ALICE: 16, BOB: 16}
    rig.check()


def test_a_long_prompt_comes_from_disk_at_once_though_several_have_to_give_a_little() -> None:
    """Who is over its quota by one block gives one in its turn: with one look a block came for each request."""
    shared = Shared(
        Tenant(name=ALICE), Tenant(name=BOB, dram_quota_bytes=9 * PAGE), Tenant(name=OTHERS, dram_quota_bytes=9 * PAGE),
        hbm=64, dram=20, nvme=64,
    )  # fmt: skip
    rig = shared.rig
    shared.store(ALICE, 6, seed=1)
    rig.write_down()
    rig.evict_dram()
    rig.evict_hbm()
    for seed in range(10):
        shared.store(BOB, 1, seed=100 + seed)
        shared.store(EVE, 1, seed=200 + seed)
    rig.write_down()
    assert shared.used(Tier.DRAM) == {OTHERS: 10, ALICE: 0, BOB: 10}
    assert rig.acquire(shared.sessions[ALICE], chain(6, seed=1)).outcomes.tolist() == [Outcome.PROMOTING] * 6


def test_blocks_that_are_found_on_disk_count() -> None:
    shared = Shared(Tenant(name=ALICE), nvme=0)
    alice, hashes = shared.rig.namespaces[shared.sessions[ALICE]], chain(6)
    found = Blocks(
        hashes=hashes,
        parents=np.concatenate((np.zeros((1, 2), dtype=np.uint64), hashes[:-1])),
        namespaces=np.full(6, alice, dtype=np.uint32),
        depths=np.arange(6, dtype=np.uint32),
        touches=np.full(6, 5 << 20, dtype=np.uint64),
        slots=np.arange(6, dtype=np.uint32),
        generations=np.arange(1, 7, dtype=np.uint32),
    )
    shared.rig.load(0, [LoadSlab(slab=1, nbytes=16 * PAGE, slot_bytes=PAGE)], {1: found})
    assert shared.used(Tier.NVME) == {OTHERS: 0, ALICE: 6}
    shared.rig.check()


@pytest.mark.parametrize("reserved, kept", [(0, 0), (16, 16), (8, 8)])
def test_an_extent_changes_class_only_where_no_reserve_lies_in_it(reserved: int, kept: int) -> None:
    """A tenant with larger blocks came short and was given the extent that held what was reserved for another."""
    shared = Shared(Tenant(name=ALICE, dram_reserve_bytes=reserved * PAGE), dram=0, hbm=64)
    rig = shared.rig
    for _ in range(2):
        rig.store.add_extent(tier=Tier.DRAM, device=0, nbytes=8 * PAGE)
    for seed in range(16):
        shared.store(ALICE, 1, seed=seed)
    assert shared.used(Tier.DRAM)[ALICE] == 16
    rig.store.detach(shared.sessions[ALICE], rig.now_ms)
    rig.store.detach(shared.sessions[BOB], rig.now_ms)
    rig.store.detach(shared.sessions[EVE], rig.now_ms)
    large = rig.attach(device=None, slot_bytes=2 * PAGE, digest=b"large".ljust(32, b"."))
    for _ in range(4):
        rig.step(large, want_room=8)
        rig.message += 1
        rig.store.top_up(large, rig.message)
        rig.store.tick(rig.now_ms)
    assert shared.used(Tier.DRAM)[ALICE] == kept
    rig.check()


def test_where_rows_run_out_reserves_hold_too() -> None:
    shared = Shared(Tenant(name=ALICE, hbm_reserve_bytes=6 * PAGE), hbm=64)
    state = shared.rig.store._state
    shared.fill(ALICE, 10, seed=1)
    shared.fill(EVE, 10, seed=2)
    rows = np.flatnonzero(state.columns.hbm[0] != NONE).astype(np.uint32)
    assert len(rows) == 20
    spared = state.quotas.spared(rows)
    alice = state.columns.namespace[rows] == shared.rig.namespaces[shared.sessions[ALICE]]
    assert spared.sum() == 6
    assert spared[alice].tolist() == [False] * 4 + [True] * 6


def test_what_is_counted_survives_a_restart_and_a_change_of_hands() -> None:
    shared = Shared(Tenant(name=ALICE), Tenant(name=BOB))
    shared.store(ALICE, 5, seed=1)
    shared.store(BOB, 3, seed=2)
    shared.rig.write_down()
    before = shared.all_used()
    shared.rig.recover()
    sharing = shared.rig.store.sharing
    assert sharing.shares() == [], "a new store has to be told of its tenants"
    sharing.configure((Tenant(name=ALICE), Tenant(name=BOB)))
    of = {shared.rig.namespaces[shared.sessions[name]]: name for name in (ALICE, BOB)}
    sharing.on_namespace(lambda handle, _digest: sharing.assign(handle, of.get(handle, OTHERS)))
    shared.sharing = sharing
    assert shared.all_used() == before
    sharing.reassign(shared.rig.namespaces[shared.sessions[ALICE]], BOB)
    assert shared.used(Tier.DRAM) == {OTHERS: 0, ALICE: 0, BOB: 8}
    shared.rig.check()


def test_hits_and_evictions_are_counted_by_tenant() -> None:
    shared = Shared(Tenant(name=ALICE, hbm_quota_bytes=4 * PAGE))
    shared.fill(ALICE, 8, seed=1)
    shared.fill(ALICE, 8, seed=1)
    shared.fill(EVE, 28, seed=2)
    assert shared.sharing.lookups() == {OTHERS: (28, 0), ALICE: (16, 8)}
    evicted = {
        share.tenant: share.evicted_blocks for share in shared.sharing.shares() if share.tier is Tier.HBM
    }
    assert evicted == {OTHERS: 0, ALICE: 4}


def test_without_tenants_nothing_is_counted() -> None:
    shared = Shared()
    shared.fill(ALICE, 8, seed=1)
    assert shared.sharing.shares() == []
    assert shared.rig.store._state.hbm.meter is None


def test_a_search_that_found_nothing_is_not_made_again_for_the_same_tenant() -> None:
    """With all blocks in use, every request that waits for a slot searched the whole class each time it asked."""
    shared = Shared(Tenant(name=ALICE), Tenant(name=BOB), hbm=16)
    shared.rig.fill(shared.sessions[ALICE], chain(16, seed=1), keep=True)
    state = shared.rig.store._state
    turns, owner = Turns(state.quotas), state.hbm.class_of(ClassKey(device=0, slot_bytes=PAGE))
    looked: list[int] = []

    def look(count: int) -> NDArray[np.uint32]:
        looked.append(count)
        return NO_SLOTS

    for asks in (1, 1, 2, 2, 1):
        assert not len(turns.take(Tier.HBM, owner, asks, 2, 2, look))
    assert looked == [2, 2] * 2, "those that have some to spare, then its own, once for each tenant"
    owner.exhausted = False  # as when somebody lets a slot go
    assert not len(turns.take(Tier.HBM, owner, 1, 2, 2, look))
    assert len(looked) == 6


def test_a_small_tenants_blocks_are_found_in_a_large_tier() -> None:
    """A sample of a million blocks hardly hits a hundred, and to look at all of them takes 20 ms each time."""
    filled = FilledStore(40_000)
    sharing = filled.store.sharing
    sharing.configure((Tenant(name=ALICE, hbm_quota_bytes=100 * PAGE),))
    rng = np.random.default_rng(1)
    for _ in range(9):  # nothing is free any more
        filled.put(rng.integers(0, 1 << 64, (4096, 2), dtype=np.uint64))
    filled.namespace = filled.store.open_namespace(filled.session, b"alice".ljust(32, b"."))
    sharing.assign(filled.namespace, ALICE)
    for _ in range(30):
        filled.put(rng.integers(0, 1 << 64, (20, 2), dtype=np.uint64))
        filled.store.tick(filled.now_ms)
    alice = next(share for share in sharing.shares() if (share.tenant, share.tier) == (ALICE, Tier.HBM))
    assert alice.used_bytes <= 120 * PAGE
    assert alice.evicted_blocks >= 480
    assert filled.store.check_integrity() == []
