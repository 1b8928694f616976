"""The guard's two scenarios on a virtual clock: a DRAM tier too small to hit, a disk slower than prefill; and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from kvstore.planning.guard import GuardLimits, TierGuard, Use

COMPUTE_S, LOAD_S = 1.0, 0.05
"""Of a document: to compute it, and to load it from DRAM."""


@dataclass(slots=True)
class SmallDram:
    """Documents asked in turns, each of them one unit of an LRU tier; a copy into it slows the request by `store_s`."""

    capacity: int
    store_s: float
    guard: TierGuard = field(init=False)
    now_s: float = 0.0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    changes: list[tuple[float, Use]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard = TierGuard(GuardLimits(window=self.capacity, filling=self.capacity))

    def ask(self, document: int) -> float:
        """Seconds that the request took."""
        if document in self.held:
            self.held.move_to_end(document)
            took_s = LOAD_S
            self.guard.saved(COMPUTE_S - LOAD_S)
        else:
            took_s = COMPUTE_S
            if self.guard.use is not Use.OUT:
                took_s += self.store_s
                self.guard.spent(self.store_s, 1)
                self.held[document] = None
                if len(self.held) > self.capacity:
                    self.held.popitem(last=False)
        self.now_s += took_s
        if (verdict := self.guard.settle(self.now_s)) is not None:
            self.changes.append((self.now_s, verdict.use))
        return took_s

    def mean_s(self, documents: Iterator[int]) -> float:
        times = [self.ask(document) for document in documents]
        return sum(times) / len(times)


def in_turns(documents: int, requests: int) -> Iterator[int]:
    return (request % documents for request in range(requests))


@pytest.mark.parametrize("store_s", [0.04, 0.15, 0.4])
def test_dram_of_a_quarter_of_the_working_set_costs_no_more_than_3_percent(store_s: float) -> None:
    tier = SmallDram(capacity=25, store_s=store_s)
    tier.mean_s(in_turns(100, 100))
    assert tier.guard.use is Use.OUT
    assert tier.mean_s(in_turns(100, 20_000)) <= 1.03 * COMPUTE_S, tier.changes
    assert any(use is Use.TRIAL for _, use in tier.changes), "it has to be tried again"


def test_what_comes_to_fit_is_used_again() -> None:
    tier = SmallDram(capacity=25, store_s=0.1)
    tier.mean_s(in_turns(100, 300))
    assert tier.guard.use is Use.OUT
    tier.held.clear()
    tier.mean_s(in_turns(20, 4_000))
    assert tier.mean_s(in_turns(20, 100)) == pytest.approx(LOAD_S)


def test_dram_that_pays_is_never_taken_out() -> None:
    """Also not while it is filled for the first time, when it has saved nothing yet."""
    tier = SmallDram(capacity=50, store_s=0.4)
    tier.mean_s(in_turns(40, 2_000))
    assert tier.changes == []


def test_one_bad_window_among_good_ones_changes_nothing() -> None:
    guard = TierGuard(GuardLimits(window=10, filling=0))
    for window in range(20):
        guard.spent(1.0, 10)
        guard.saved(0.0 if window % 2 else 5.0)
        assert guard.settle(float(window)) is None


def test_a_disk_that_saves_nothing_is_asked_only_in_trials_that_become_rare() -> None:
    """Each request for which it was asked cost a hundredth; trials are bounded to 1/64 of the time and ever rarer."""
    guard = TierGuard(GuardLimits(window=16, filling=0, most_pause_s=600.0))
    now_s, asked, trials = 0.0, 0, []
    for _ in range(5_000):
        now_s += 1.0
        if guard.use is not Use.OUT:
            guard.spent(0.03, 1)
            asked += 1
        verdict = guard.settle(now_s)
        if verdict is not None and verdict.use is Use.TRIAL:
            trials.append(now_s)
    assert asked < 5_000 / 16
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert gaps == sorted(gaps)
    assert max(gaps) <= 600.0 + 2 * 16


def test_a_disk_that_becomes_fast_is_used_again_after_one_window() -> None:
    guard = TierGuard(GuardLimits(window=16, filling=0))
    now_s = 0.0
    while guard.use is not Use.OUT:
        now_s += 1.0
        guard.spent(0.03, 1)
        guard.settle(now_s)
    for _ in range(100):
        now_s += 1.0
        if guard.use is not Use.OUT:
            guard.spent(0.03, 1)
            guard.saved(0.5)
        guard.settle(now_s)
    assert guard.use is Use.IN_USE
