"""Tiers that become smaller while they are in use: what leaves, what stays, and what has to be waited for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import FailedPrecondition, NotFound
from kvstore.layout import ExtentState, Tier
from kvstore.moves import Outcome, StoreLimits
from tests.kvstore.store_rig import PAGE, Rig, chain

NVME_SLOT = 2 * PAGE  # with its trailer
EXTENT_BLOCKS = 8


def itself(nbytes: int) -> int:
    return nbytes


def rig_of(extents: int, tier: Tier = Tier.NVME) -> Rig:
    """A store whose tier has so many extents of eight slots."""
    sizes = {"dram": 64, "nvme": 64, tier.name.lower(): 0}
    rig = Rig(hbm=64, **sizes, limits=StoreLimits(reserve_slots=1, reserve_fraction=0.0))
    slot = NVME_SLOT if tier is Tier.NVME else PAGE
    for _ in range(extents):
        rig.store.add_extent(tier=tier, device=0, nbytes=EXTENT_BLOCKS * slot)
    return rig


def shrink(rig: Rig, tier: Tier, nbytes: int, turns: int = 8) -> str:
    """Gives `nbytes` back as far as that goes; what it waits for."""
    rig.store.leave(tier, 0, nbytes, itself)
    reason = ""
    for _ in range(turns):
        for extent in rig.store.leaving(tier, 0):
            reason = rig.store.empty_extent(extent)
            if not reason:
                rig.store.drop_extent(extent)
    return reason if rig.store.leaving(tier, 0) else ""


def test_unused_memory_leaves_first() -> None:
    rig = rig_of(4)
    one = rig.attach()
    rig.write_through(one, chain(6))
    rig.write_down()
    assert shrink(rig, Tier.NVME, 3 * EXTENT_BLOCKS * NVME_SLOT) == ""
    assert len(rig.store.extents(Tier.NVME)) == 1
    assert rig.tier(Tier.NVME).sealed_slots == 6
    assert rig.counter("evictions_nvme") == 0
    rig.check()


def test_what_was_used_longest_ago_leaves_next() -> None:
    rig = rig_of(4)
    one = rig.attach()
    for seed in range(4):
        rig.write_through(one, chain(8, seed=seed))
        rig.write_down()
    rig.outcomes(one, chain(8))  # the first one is used again
    rig.evict_hbm()
    rig.evict_dram()
    assert shrink(rig, Tier.NVME, 2 * EXTENT_BLOCKS * NVME_SLOT) == ""
    assert rig.outcomes(one, chain(8, seed=1)) == [Outcome.MISS] * 8
    assert rig.outcomes(one, chain(8, seed=2)) == [Outcome.MISS] * 8
    assert rig.outcomes(one, chain(8)) == [Outcome.PROMOTING] * 8
    assert rig.outcomes(one, chain(8, seed=3)) == [Outcome.PROMOTING] * 8
    rig.check()


def test_an_extent_that_leaves_gives_out_nothing() -> None:
    """While a slab drained, the class that was short was given it again, and the tier never became smaller."""
    rig = rig_of(2)
    one = rig.attach()
    rig.write_through(one, chain(8))
    moves = rig.store.take_moves(0, 100)
    assert len(moves) == 8
    rig.store.leave(Tier.NVME, 0, EXTENT_BLOCKS * NVME_SLOT, itself)
    (leaving,) = rig.store.leaving(Tier.NVME, 0)
    assert leaving != moves["nvme_extent"][0], "the unused one"
    rig.store.leave(Tier.NVME, 0, EXTENT_BLOCKS * NVME_SLOT, itself)
    assert len(rig.store.leaving(Tier.NVME, 0)) == 2
    rig.write_through(one, chain(8, seed=1))
    rig.store.tick(rig.now_ms)
    assert len(rig.write_down()) == 0, "no extent is left for it"
    busy = int(moves["nvme_extent"][0])
    assert rig.store.empty_extent(busy) == "8 blocks are being written"
    with pytest.raises(FailedPrecondition):
        rig.store.drop_extent(busy)
    rig.done(moves)
    assert rig.store.empty_extent(busy) == ""
    rig.store.drop_extent(busy)
    with pytest.raises(NotFound):
        rig.store.empty_extent(busy)
    rig.check()


def test_slots_in_use_are_waited_for() -> None:
    """Memory was taken away under an engine that was reading it."""
    rig = rig_of(2, Tier.DRAM)
    one = rig.attach()
    rig.write_through(one, chain(16))
    rig.write_down()
    rig.evict_hbm()
    grant = rig.acquire(one, chain(16))
    assert (grant.outcomes == Outcome.HIT_DRAM).all()
    assert "in use" in shrink(rig, Tier.DRAM, EXTENT_BLOCKS * PAGE)
    assert len(rig.store.extents(Tier.DRAM)) == 2
    rig.step(one, hbm=grant.hbm_slots, dram=grant.dram_slots)
    assert shrink(rig, Tier.DRAM, 0) == ""
    assert len(rig.store.extents(Tier.DRAM)) == 1
    assert len(rig.outcomes(one, chain(16))) == 16
    rig.check()


def test_slots_of_a_lost_session_are_waited_for() -> None:
    """A session without a stream may still copy: its slots are nobody's to take, also where the tier shrinks."""
    rig = rig_of(1, Tier.DRAM)
    one = rig.attach()
    room = rig.room(one, 4)
    rig.store.lost(one, rig.now_ms)
    assert shrink(rig, Tier.DRAM, EXTENT_BLOCKS * PAGE) == "4 blocks are in use, or given to engines to fill"
    rig.store.dead(one, rig.now_ms)
    assert shrink(rig, Tier.DRAM, 0) == ""
    assert len(room.dram_slots) == 4
    rig.check()


def test_pinned_blocks_that_are_there_alone_are_waited_for() -> None:
    rig = rig_of(1)
    one = rig.attach()
    rig.write_through(one, chain(4))
    rig.write_down()
    rig.store.pin(now_ms=rig.now_ms, namespace=rig.namespaces[one], hashes=chain(4), ttl_ms=1 << 30)
    rig.evict_hbm()
    rig.evict_dram()
    assert "4 pinned blocks" in shrink(rig, Tier.NVME, 1)
    rig.store.unpin(namespace=rig.namespaces[one], hashes=chain(4))
    assert shrink(rig, Tier.NVME, 0) == ""
    rig.check()


def test_pinned_blocks_that_are_elsewhere_too_hold_nothing_up() -> None:
    rig = rig_of(1)
    one = rig.attach()
    rig.write_through(one, chain(4))
    rig.write_down()
    rig.store.pin(now_ms=rig.now_ms, namespace=rig.namespaces[one], hashes=chain(4), ttl_ms=1 << 30)
    assert shrink(rig, Tier.NVME, 1) == ""
    rig.evict_hbm()
    assert rig.outcomes(one, chain(4)) == [Outcome.HIT_DRAM] * 4
    rig.check()


def test_after_a_restart_it_is_chosen_anew() -> None:
    rig = rig_of(3)
    one = rig.attach()
    for seed in range(3):
        rig.write_through(one, chain(8, seed=seed))
        rig.write_down()
    rig.store.leave(Tier.NVME, 0, 1, itself)
    assert len(rig.store.leaving(Tier.NVME, 0)) == 1
    rig.recover()
    rig.store.mover_dead(0, rig.now_ms)
    rig.store.tick(rig.now_ms)
    assert rig.store.leaving(Tier.NVME, 0) == []
    assert shrink(rig, Tier.NVME, 2 * EXTENT_BLOCKS * NVME_SLOT) == ""
    left = rig.store.extents(Tier.NVME)
    assert len(left) == 1
    assert rig.store._state.extents.state(left[0].extent) is ExtentState.READY
    rig.check()


def test_ids_that_are_left_are_counted_in_the_smallest_class() -> None:
    rig = rig_of(2)  # tables for 256 slots of NVMe
    assert rig.store.slots_for(Tier.NVME, 10 * NVME_SLOT, PAGE) == (256 - 16, 10)
    one = rig.attach()
    rig.write_through(one, chain(4))
    rig.write_down()
    assert rig.store.slots_for(Tier.NVME, 10 * NVME_SLOT, 4 * PAGE) == (256 - 16, 10)
    assert isinstance(rig.store.slots_for(Tier.DRAM, PAGE, PAGE)[0], int | np.integer)


ACTIONS = ("store", "store", "write", "write", "use", "smaller", "turn", "larger", "tick", "restart")


class Changing:
    """A store whose tier changes its size all the time."""

    def __init__(self) -> None:
        self.rig = rig_of(3)
        self.size = 3
        """Extents that the tier may have."""
        self._session = self.rig.attach()

    def store(self, seed: int) -> None:
        if self.rig.outcomes(self._session, chain(4, seed=seed)) == [Outcome.MISS] * 4:
            self.rig.write_through(self._session, chain(4, seed=seed))

    def write(self, _number: int) -> None:
        self.rig.write_down()

    def use(self, seed: int) -> None:
        self.rig.outcomes(self._session, chain(4, seed=seed))

    def smaller(self, size: int) -> None:
        self.size = max(1, min(self.size, size))
        self.turn(0)

    def turn(self, _number: int) -> None:
        _bring_to(self.rig, self.size * EXTENT_BLOCKS * NVME_SLOT)

    def larger(self, _number: int) -> None:
        store = self.rig.store
        if len(store.extents(Tier.NVME)) < 5 and not store.leaving(Tier.NVME, 0):
            self.size += 1
            store.add_extent(tier=Tier.NVME, device=0, nbytes=EXTENT_BLOCKS * NVME_SLOT)

    def tick(self, _number: int) -> None:
        self.rig.now_ms += 1000
        self.rig.store.tick(self.rig.now_ms)

    def restart(self, _number: int) -> None:
        self.rig.recover()
        self.rig.store.mover_dead(0, self.rig.now_ms)
        self.rig.resume(self._session)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=5, max_size=40))
def test_a_size_is_reached_whatever_happens_meanwhile(actions: list[tuple[str, int]]) -> None:
    """After any mixture of writes, restarts and changes of size the tier comes to its size, and the store is sound."""
    changing = Changing()
    for action, number in actions:
        getattr(changing, action)(number)
        changing.rig.check()
    for _ in range(8):
        changing.write(0)
        changing.turn(0)
    infos = changing.rig.store.extents(Tier.NVME)
    assert sum(info.nbytes for info in infos) <= changing.size * EXTENT_BLOCKS * NVME_SLOT
    assert changing.rig.store.leaving(Tier.NVME, 0) == []
    changing.rig.check()


def _bring_to(rig: Rig, nbytes: int) -> None:
    """A turn of the resizer."""
    store = rig.store
    leaving = store.leaving(Tier.NVME, 0)
    staying = sum(info.nbytes for info in store.extents(Tier.NVME) if info.extent not in leaving)
    if staying > nbytes:
        store.leave(Tier.NVME, 0, staying - nbytes, itself)
    for extent in store.leaving(Tier.NVME, 0):
        if not store.empty_extent(extent):
            store.drop_extent(extent)
