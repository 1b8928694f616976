"""A request that tries how fast a disk is: when, and what that says of the disk."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier
from engine_adapter.loading.choice import LoadChoice, Tried
from engine_adapter.loading.plans import LoadPlans
from engine_adapter.loading.trials import Trial, Trials
from kvstore.client import Namespace, Session
from kvstore.layout import Tier
from kvstore.planning.planner import Plan, Way

BLOCKS, SLOT_BYTES, TRIAL_S = 64, 1000, 0.02


class Choice:
    """Computes everything, but for a trial of the disk."""

    def __init__(self) -> None:
        self.measured: list[tuple[Tier, int, float]] = []

    def plan(self, tiers: object, num_tokens: int, block_tokens: int) -> Plan:
        return Plan(
            way=Way.COMPUTE,
            cached_blocks=BLOCKS,
            load_end=0,
            meet=BLOCKS,
            expected_s=0.5,
            load_all_s=2.0,
            compute_all_s=0.5,
        )

    def tried(self, plan: Plan, tiers: NDArray[np.uint8]) -> Tried:
        return Tried(replace(plan, way=Way.LOAD, load_end=BLOCKS), TRIAL_S)

    def queued_bytes(self) -> int:
        return 0

    def queue_cancelled(self) -> None:
        pass

    def loaded(self, tier: Tier, nbytes: int, seconds: float) -> None:
        self.measured.append((tier, nbytes, seconds))


def plans_over(choice: Choice, tiers: NDArray[np.uint8], now: list[float]) -> LoadPlans:
    """Of one engine whose blocks are in these tiers, at a moment."""
    session = SimpleNamespace(
        hbm=SimpleNamespace(slot_bytes=SLOT_BYTES),
        match=lambda namespace, prompt: SimpleNamespace(tiers=tiers.copy()),
        cancel=lambda lease: None,
    )
    return LoadPlans(
        cast(Session, session),
        cast(Namespace, SimpleNamespace(block_tokens=16)),
        cast(Copier, None),
        cast(LoadChoice, choice),
        count(100),
        lambda: now[0],
    )


@pytest.mark.parametrize("came", [0, BLOCKS // 4, BLOCKS])
def test_a_trial_that_brings_nothing_says_nothing(came: int) -> None:
    """A disk whose first call took longer than the trial counted as a hundred times slower than it was."""
    tiers, now = np.full(BLOCKS, Tier.NVME, dtype=np.uint8), [100.0]
    choice = Choice()
    plans = plans_over(choice, tiers, now)
    prompt = np.zeros((BLOCKS, 2), dtype=np.uint64)
    ask = plans.ask(1, prompt, 16 * BLOCKS + 1, lambda block: False)
    assert ask is not None
    assert (ask.private, ask.wait_s) == (False, TRIAL_S)
    now[0] += TRIAL_S
    tiers[:came] = Tier.DRAM
    plans.ask(1, prompt, 16 * BLOCKS + 1, lambda block: False)
    found = [(Tier.NVME, came * SLOT_BYTES, pytest.approx(TRIAL_S))] if came else []
    assert choice.measured == found


def test_what_comes_before_the_wait_is_over_counts() -> None:
    tiers, now, choice = np.full(BLOCKS, Tier.NVME, dtype=np.uint8), [100.0], Choice()
    plans, prompt = plans_over(choice, tiers, now), np.zeros((BLOCKS, 2), dtype=np.uint64)
    plans.ask(1, prompt, 16 * BLOCKS + 1, lambda block: False)
    now[0] += TRIAL_S / 10
    tiers[:] = Tier.DRAM
    plans.ask(1, prompt, 16 * BLOCKS + 1, lambda block: False)
    assert choice.measured == [(Tier.NVME, BLOCKS * SLOT_BYTES, pytest.approx(TRIAL_S / 10))]


def planned(*, load_s: float = 2.0, compute_s: float = 0.1, way: Way = Way.COMPUTE) -> Plan:
    return Plan(
        way=way,
        cached_blocks=BLOCKS,
        load_end=0,
        meet=BLOCKS,
        expected_s=compute_s,
        load_all_s=load_s,
        compute_all_s=compute_s,
    )


class Asked:
    """Requests one behind the other, ten a second, on a clock."""

    def __init__(self, *, beside: bool = True) -> None:
        self.trials = Trials()
        self.now = 0.0
        self._beside = beside

    def during(self, seconds: float, plan: Plan) -> list[tuple[float, Trial]]:
        """The trials of so many seconds, with their moments."""
        found, end = [], self.now + seconds
        while self.now < end:
            how = self.trials.begin(plan, beside=self._beside, now_s=self.now)
            if how is not None:
                found.append((round(self.now, 1), how))
            self.now += 0.1
        return found


def pauses(found: list[tuple[float, Trial]]) -> list[float]:
    return [round(later - earlier) for (earlier, _), (later, _) in pairwise(found)]


def test_a_slow_disk_is_tried_ever_more_seldom_in_both_ways() -> None:
    """It was tried every 3 s, each way, and while the guard had it on trial by every request: 6 % of an H200's TTFT."""
    found = Asked().during(400.0, planned())
    assert pauses(found)[:8] == [6, 12, 24, 48, 60, 60, 60, 60]
    assert {how for _, how in found[::2]} == {Trial.ALONE}
    assert {how for _, how in found[1::2]} == {Trial.BESIDE}


def test_an_engine_that_cannot_do_both_tries_the_disk_alone() -> None:
    assert {how for _, how in Asked(beside=False).during(100.0, planned())} == {Trial.ALONE}


def test_long_requests_try_more_seldom() -> None:
    found = Asked().during(1000.0, planned(compute_s=10.0, load_s=100.0))
    assert min(pauses(found)) >= 160


@pytest.mark.parametrize("how", Trial)
def test_what_is_much_faster_than_believed_is_tried_again_until_it_is_believed(how: Trial) -> None:
    """A change is believed with the third measurement: a disk that had recovered was out of use for hours."""
    asked = Asked()
    asked.during(200.0, planned())
    for _ in range(2):
        asked.trials.measured(how, asked.now, surprising=True)
        assert asked.during(0.05, planned()) == [(round(asked.now - 0.1, 1), how)]
    asked.trials.measured(how, asked.now, surprising=False)
    assert asked.during(1.0, planned()) == []


def test_a_disk_that_gets_another_chance_is_tried_at_once_in_both_ways() -> None:
    asked = Asked()
    asked.during(200.0, planned())
    asked.trials.soon()
    found = asked.during(1.0, planned())
    assert sorted(how for _, how in found) == [Trial.ALONE] * 3 + [Trial.BESIDE] * 3


@pytest.mark.parametrize("way", [Way.LOAD, Way.BOTH_ENDS])
def test_a_disk_that_was_in_use_is_tried_soon(way: Way) -> None:
    asked = Asked()
    asked.during(200.0, planned())
    for how in Trial:
        asked.trials.measured(how, asked.now, surprising=False)
    assert asked.during(2.0, planned(load_s=0.01, way=way)) == []
    begin = asked.now
    assert asked.during(10.0, planned())[0][0] - begin <= 3.0 + 0.1


def test_what_was_measured_anyway_is_not_tried() -> None:
    asked = Asked()
    for _ in range(100):
        asked.trials.measured(Trial.ALONE, asked.now, surprising=False)
        asked.trials.measured(Trial.BESIDE, asked.now, surprising=False)
        assert asked.during(1.0, planned()) == []


def test_nothing_is_tried_before_anything_was_measured() -> None:
    assert Asked().during(10.0, planned(compute_s=0.0)) == []
