"""Policies that break their contract: the store stays sound, and goes on without them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eviction.base import MayGo, Rows, Stop, Use
from eviction.lru import LruPolicy
from kvstore.layout import NONE, Tier
from kvstore.moves import StoreLimits
from tests.kvstore.store_rig import PAGE, Rig
from tests.kvstore.store_rig import chain as prompt


class Faulty(LruPolicy):
    """LRU, from which each of these differs in one hook."""


class Twice(Faulty):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        return np.repeat(super().victims(count, now_s, may_go), 2)[:count]


class TooMany(Faulty):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        return super().victims(count + 1, now_s, may_go)


class Beyond(Faulty):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        return super().victims(count, now_s, may_go) + np.uint32(1 << 20)


class Negative(Faulty):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        return super().victims(count, now_s, may_go).astype(np.int64) - (1 << 20)  # type: ignore[return-value]


class Rude(Faulty):
    def victims(self, count: int, now_s: float, _may_go: MayGo | None = None) -> Rows:
        return super().victims(count, now_s, None)


class AsksAndForgets(Faulty):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        assert may_go is not None
        found = super().victims(count, now_s, None)
        may_go(found)
        return found


class Floats(Faulty):
    def victims(self, count: int, now_s: float, may_go: MayGo | None = None) -> Rows:
        return super().victims(count, now_s, may_go).astype(np.float64)  # type: ignore[return-value]


class Nothing(Faulty):
    def victims(self, _count: int, _now_s: float, _may_go: MayGo | None = None) -> Rows:
        return None  # type: ignore[return-value]


class AsksNonsense(Faulty):
    def victims(self, _count: int, _now_s: float, may_go: MayGo | None = None) -> Rows:
        assert may_go is not None
        rows = np.array([1 << 30], dtype=np.uint32)
        return rows[may_go(rows)]


class RaisesInVictims(Faulty):
    def victims(self, _count: int, _now_s: float, _may_go: MayGo | None = None) -> Rows:
        raise RuntimeError("boom")


class RaisesInUse(Faulty):
    def use(self, use: Use) -> None:
        if use.now_s > 0:
            raise RuntimeError("boom")


class RaisesInEnded(Faulty):
    def ended(self, _rows: Rows, _stop: Stop) -> None:
        raise RuntimeError("boom")


class RaisesInRemove(Faulty):
    def remove(self, _rows: Rows) -> None:
        raise RuntimeError("boom")


def raises_when_large(*, rows: int, capacity_blocks: int) -> LruPolicy:
    if capacity_blocks > 16:
        raise ValueError("no licence")
    return LruPolicy(rows=rows, capacity_blocks=capacity_blocks)


def load(rig: Rig, tier: Tier, factory: Callable[..., LruPolicy]) -> None:
    """Many prompts through a store that is small: blocks are held, cleared, awaited, and come back."""
    rig.store.hints.rankings.rank(tier, "faulty", factory, 24 * PAGE)
    session, rng = rig.attach(), np.random.default_rng(3)
    held = rig.acquire(session, prompt(3, seed=99), lease=1000)
    rig.write_through(session, prompt(3, seed=99))
    for lease in range(1, 60):
        hashes = prompt(int(rng.integers(1, 6)), seed=int(rng.integers(1, 30)))
        grant = rig.acquire(session, hashes, lease=lease)
        rig.step(session, hbm=np.concatenate((grant.hbm_slots, grant.reserve_slots)), dram=grant.dram_slots)
        if grant.complete:
            rig.write_through(session, hashes)
            rows = rig.store._state.table.locate(hashes, rig.namespaces[session])
            rig.store.hints.rankings.ended(rows, Stop.END_TURN)
        rig.write_down()
        rig.store.take_changed()
        if lease % 25 == 0:
            rig.store.clear(None)
        rig.store.tick(rig.now_ms)
        if lease % 5 == 0:
            rig.check()
    assert (rig.store._state.columns.hbm[0][rig.store._state.hbm.row[held.hbm_slots]] != NONE).all()


@pytest.mark.parametrize(
    "factory, said",
    [
        (Twice, "one twice"),
        (TooMany, "where"),
        (Beyond, "beyond the"),
        (Negative, "beyond the"),
        (Rude, "did not ask `may_go` about"),
        (AsksAndForgets, "may not go"),
        (Floats, "not 1-dimensional float64"),
        (Nothing, "not 0-dimensional object"),
        (AsksNonsense, "raised in `victims`: IndexError"),
        (RaisesInVictims, "raised in `victims`: RuntimeError: boom ("),
        (RaisesInUse, "raised in `use`: RuntimeError: boom ("),
        (RaisesInEnded, "raised in `ended`: RuntimeError: boom ("),
        (RaisesInRemove, "raised in `remove`: RuntimeError: boom ("),
        (raises_when_large, "raised in its constructor: ValueError: no licence ("),
    ],
)  # fmt: skip
def test_a_policy_that_breaks_its_contract_is_asked_no_more(
    factory: Callable[..., LruPolicy], said: str
) -> None:
    """A slot named twice was counted as free twice, and the next search for free slots never ended; what raised failed
    every turn of the background, and with it eviction, write-behind, prefetch and clear."""
    rig = Rig(hbm=12, dram=24, nvme=48, limits=StoreLimits(reserve_slots=2, reserve_fraction=0.1))
    load(rig, Tier.DRAM, factory)
    fault = rig.store.hints.rankings.faults[Tier.DRAM]
    assert said in fault.what
    assert "\n" not in fault.what
    assert (fault.tier, fault.policy) == (Tier.DRAM, "faulty")
    assert rig.store.hints.rankings.get(Tier.DRAM) is None
    assert rig.counter("evictions_dram") > 20


def test_a_fault_of_one_tier_leaves_the_other_its_policy() -> None:
    rig = Rig(hbm=12, dram=24, nvme=48, limits=StoreLimits(reserve_slots=2, reserve_fraction=0.1))
    rig.store.hints.rankings.rank(Tier.NVME, "lru", LruPolicy, 48 * PAGE)
    load(rig, Tier.DRAM, RaisesInUse)
    assert set(rig.store.hints.rankings.faults) == {Tier.DRAM}
    assert rig.store.hints.rankings.get(Tier.NVME) is not None
    rig.store.hints.rankings.check_integrity()


def test_a_policy_that_keeps_its_contract_stays() -> None:
    rig = Rig(hbm=12, dram=24, nvme=48, limits=StoreLimits(reserve_slots=2, reserve_fraction=0.1))
    load(rig, Tier.DRAM, Faulty)
    assert not rig.store.hints.rankings.faults
    assert rig.store.hints.rankings.get(Tier.DRAM) is not None
