"""What is learned of reuse ages, beside what the lives were drawn from, and the worth beside its definition."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eviction.reuse_ages import BUCKETS, ReuseAges, age_buckets

LIVES = 400


def learned(rates_per_s: list[float], seconds: int = 3000) -> ReuseAges:
    """Two classes of blocks, each used again after exponentially distributed times of its rate; a rate of 0: never."""
    ages = ReuseAges((len(rates_per_s), 1), 1 << 16)
    rng, now_s = np.random.default_rng(0), 0.0
    ends: list[tuple[float, int]] = []
    while now_s < seconds:
        for number, rate in enumerate(rates_per_s):
            first = ages.begin(np.full(4, number), now_s)
            if rate:
                ends += [(now_s + rng.exponential(1 / rate), first + life) for life in range(4)]
        due = [life for at, life in ends if at <= now_s]
        ends = [(at, life) for at, life in ends if at > now_s]
        ages.end(np.array(due, dtype=np.int64), now_s)
        now_s += 1.0
    ages.refresh(now_s)
    return ages


def test_a_class_is_worth_its_rate_of_reuse() -> None:
    """Exponential ages have one hazard at all ages: a hit every 1 / rate seconds, whatever the horizon."""
    worth = learned([0.1, 0.02, 0.0]).worth
    at = int(age_buckets(np.array([5.0]))[0])
    assert worth[0, at] == pytest.approx(0.1, rel=0.35)
    assert worth[0, at] > 2 * worth[1, at] > 4 * worth[2, at]


def test_lives_that_go_on_are_no_ends() -> None:
    """Counting the ends of lives that began lately, but not yet those that outlive them, made long ages look sure."""
    worth = learned([0.001], seconds=400).worth  # most lives still go on
    at = int(age_buckets(np.array([100.0]))[0])
    assert worth[0, at] < 0.004


def test_a_life_that_was_forgotten_has_no_age() -> None:
    ages = ReuseAges((1, 1), 100)
    first = ages.begin(np.zeros(100, dtype=np.int64), 0.0)
    for now_s in range(1, 200):
        ages.begin(np.zeros(100, dtype=np.int64), float(now_s))
    assert np.isinf(ages.end(np.array([first]), 200.0)).all()


def test_the_worth_is_the_best_rate_over_all_horizons() -> None:
    hazards = np.random.default_rng(1).random((5, BUCKETS)) * 0.4
    hazards[:, -1] = 0.0
    from eviction import reuse_ages

    found = reuse_ages._worth(hazards)
    for number, of_class in enumerate(hazards):
        for bucket in range(BUCKETS - 1):
            expected = best_rate(of_class, bucket, reuse_ages._WIDTHS_S)
            assert found[number, bucket] == pytest.approx(expected, rel=1e-9)


def best_rate(hazards: NDArray[np.float64], bucket: int, widths_s: NDArray[np.float64]) -> float:
    """By its definition: from the middle of the bucket on, bucket by bucket."""
    ends = 1.0 - (1.0 - hazards[bucket]) ** 0.5
    hits, seconds, alive = ends, widths_s[bucket] / 2 * (1.0 - ends / 2), 1.0 - ends
    best = hits / seconds
    for later in range(bucket + 1, BUCKETS - 1):
        hits += alive * hazards[later]
        seconds += alive * widths_s[later] * (1.0 - hazards[later] / 2)
        alive *= 1.0 - hazards[later]
        best = max(best, hits / seconds)
    return float(best)
