"""Making room where much of a large tier may not go: what is looked at is counted, and room is found all the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eviction.factory import policy_factory
from eviction.lru import Lru
from kvstore.layout import NONE, TableShape, Tier, table_bytes, touch_key
from kvstore.moves import StoreLimits
from kvstore.store import Store
from kvstore.tables.slots import ClassKey, SlotClass, SlotPool
from kvstore.victims import evicting
from kvstore.victims.evicting import Evictor
from tests.kvstore.store_rig import PAGE, Rig, chain

SLOTS = 40_960  # beyond what is searched as a whole
PROMPT_BLOCKS = 4096
KEY = ClassKey(device=0, slot_bytes=PAGE)
MOST_ASKED = 16_000


class Large(Rig):
    """DRAM that is full of prompts, none of which is on disk yet, under some policy or the store's own key."""

    def __init__(self, policy: str) -> None:
        shape = TableShape(max_rows=2 * SLOTS, hbm_slots=256, dram_slots=SLOTS, nvme_slots=256)
        self.limits = StoreLimits(reserve_slots=256)
        self.memory = memoryview(bytearray(table_bytes(shape)))
        self.store = Store.create(self.memory, shape, self.limits, Lru())
        self.now_ms, self.message, self.tokens, self.namespaces = 1_700_000_000_000, 0, 0, {}
        self.store.add_extent(tier=Tier.DRAM, device=0, nbytes=SLOTS * PAGE)
        self.store.add_extent(tier=Tier.NVME, device=0, nbytes=256 * PAGE)
        self.session = self.attach(device=None)
        self.evictor = self.store._evictor
        self.evictor.make_room(Tier.NVME, KEY, 1)
        if policy != "lru":
            self.store.hints.rankings.rank(Tier.DRAM, policy, policy_factory(policy), SLOTS * PAGE)
        self.owner: SlotClass = self.evictor.make_room(Tier.DRAM, KEY, 1)
        seed = 0
        while len(self.owner.free):
            self.bring(min(PROMPT_BLOCKS, len(self.owner.free)), seed)
            seed += 1

    def bring(self, count: int, seed: int) -> None:
        """A prompt comes into free slots."""
        state, depths = self.store._state, np.arange(count, dtype=np.uint32)
        self.now_ms += 100
        state.tell_time(self.now_ms)
        rows = state.table.reserve(
            hashes=chain(count, seed),
            namespaces=np.full(count, self.namespaces[self.session], dtype=np.uint32),
            depths=depths,
            parents=np.full(count, NONE, dtype=np.uint32),
            touches=touch_key(self.now_ms, depths),
        )
        slots = state.dram.allocate(self.owner, count, np.uint64(0))
        state.complete(Tier.DRAM, rows, slots, 0)
        state.table.publish(rows)
        self.store.hints.rankings.came(Tier.DRAM, slots)
        self.store.hints.rankings.tell(self.now_ms / 1000)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each look was about."""
    looks: list[int] = []
    evictable = Evictor.evictable

    def counted(self: Evictor, pool: SlotPool, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        looks.append(len(slots))
        return evictable(self, pool, slots)

    monkeypatch.setattr(Evictor, "evictable", counted)
    return looks


@pytest.mark.parametrize("policy", ["arc", "auto", "gdsf", "lru"])
def test_a_turn_of_the_background_does_not_look_at_all_that_has_no_copy_on_disk(
    policy: str, asked: list[int]
) -> None:
    """While a disk was behind, each turn went through the whole of DRAM for a block that was on it: 92 ms for a
    million blocks."""
    rig = Large(policy)
    rig.store.tick(rig.now_ms)
    for seed in range(100, 103):
        rig.bring(len(rig.owner.free) - 300, seed)
        asked.clear()
        rig.store.tick(rig.now_ms)
        assert sum(asked) <= MOST_ASKED
        assert len(rig.owner.free) > 300, "there is room again"
    rig.check()


@pytest.mark.parametrize("policy", ["arc", "auto", "lru"])
def test_who_needs_room_gets_the_few_blocks_that_may_go(policy: str, asked: list[int]) -> None:
    rig = Large(policy)
    rig.store.tick(rig.now_ms)
    pool = rig.store._state.dram
    few = np.array([9_001, 21_113, 21_114, 33_333], dtype=np.uint32)
    held = np.setdiff1d(np.flatnonzero(pool.row != NONE).astype(np.uint32), few)
    held = held[pool.sealed(held)]
    pool.hold(held, np.uint64(1))
    before = len(rig.owner.free)
    asked.clear()
    assert len(rig.evictor.make_room(Tier.DRAM, KEY, before + 3).free) >= before + 3
    assert sum(asked) <= MOST_ASKED
    assert len(rig.evictor.make_room(Tier.DRAM, KEY, before + 9).free) == before + 4
    pool.unhold(held, np.uint64(1))
    assert len(rig.evictor.make_room(Tier.DRAM, KEY, before + 9).free) >= before + 9
    rig.check()


def test_what_nobody_wants_is_counted_without_a_look_at_all_that_is_wanted(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where queued requests wanted a million blocks each count of the others took 14.5 ms."""
    monkeypatch.setattr(evicting, "_ROW_WINDOW", SLOTS // 8)
    monkeypatch.setattr(evicting, "_SLOTS_A_LOOK", SLOTS // 4)
    rig = Large("lru")
    state, few = rig.store._state, np.array([9_001, 21_113, 21_114, 33_333], dtype=np.uint32)
    state.queued.wanted[:] = 1
    state.queued.wanted[state.dram.row[few]] = 0
    asked.clear()
    counts = [rig.evictor.unwanted(Tier.DRAM, KEY, 100) for _ in range(4)]
    assert counts == [1, 0, 2, 1]  # a quarter of the slots a call
    assert sum(asked) == len(few)
    assert rig.evictor.unwanted(Tier.DRAM, KEY, 0) == 0
    state.queued.wanted[:] = 0
    assert rig.evictor.unwanted(Tier.DRAM, KEY, 100) == 100
