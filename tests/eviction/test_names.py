"""The table of names: what is put is found, a full bucket forgets its oldest, and hardly a name is lost to another."""

from __future__ import annotations

import numpy as np
import pytest

from eviction.base import Use
from eviction.hazard import HazardPolicy
from eviction.names import NOWHERE, Names


def test_against_a_table_of_python() -> None:
    names, rng = Names(64), np.random.default_rng(0)
    ages = np.zeros(len(names), dtype=np.int64)
    held: dict[int, int] = {}  # name → place
    for turn in range(1, 300):
        asked = rng.choice(400, 12, replace=False).astype(np.uint64)
        places = names.find(asked)
        assert places.tolist() == [held.get(int(name), NOWHERE) for name in asked]
        new = asked[places == NOWHERE]
        put = names.put(new, ages)
        for name, place in zip(new.tolist(), put.tolist(), strict=True):
            if place == NOWHERE:
                assert sum(other % 8 == name % 8 for other in new.tolist()) > 8
                continue
            bucket = slice(place // 8 * 8, place // 8 * 8 + 8)
            assert np.count_nonzero(ages[bucket] < ages[place]) < len(new)  # among the oldest of its bucket
            held = {other: there for other, there in held.items() if there != place} | {name: place}
        ages[places[places != NOWHERE]] = turn
        ages[put[put != NOWHERE]] = turn


def test_with_twice_the_places_nearly_every_hashed_name_is_kept() -> None:
    """One place a name lost a third of them: a policy that knew its blocks by hashes was worse than LRU."""
    rng = np.random.default_rng(1)
    hashed = rng.integers(0, 1 << 63, 8192, dtype=np.uint64)
    names, ages = Names(2 * len(hashed)), np.zeros(2 * len(hashed), dtype=np.int64)
    for turn, start in enumerate(range(0, len(hashed), 64), start=1):
        ages[names.put(hashed[start : start + 64], ages)] = turn
    assert np.count_nonzero(names.find(hashed) == NOWHERE) < 0.03 * len(hashed)


@pytest.mark.parametrize("hashed", [False, True])
def test_blocks_that_come_back_are_known_by_hashes_as_by_numbers(hashed: bool) -> None:
    rows = np.arange(1 << 12, dtype=np.uint32)
    names = (
        np.random.default_rng(2).integers(0, 1 << 63, len(rows), dtype=np.uint64)
        if hashed
        else rows.astype(np.uint64)
    )
    policy = HazardPolicy(rows=len(rows), capacity_blocks=64)
    for round_number in range(2):
        for start in range(0, len(rows), 64):
            at = slice(start, start + 64)
            now_s = 64.0 * round_number + start / 64
            policy.use(
                Use(
                    rows=rows[at],
                    fresh=np.ones(64, dtype=np.bool_),
                    names=names[at],
                    depths=np.arange(64, dtype=np.uint32),
                    now_s=now_s,
                    prompt_blocks=64,
                )
            )
            policy.victims(max(len(policy) - 64, 0), now_s)
    learned = policy._ages._ended > policy._ages._began
    again = np.isfinite(policy._ages._ended) & learned
    assert np.count_nonzero(again[: policy._ages.lives]) == len(rows)
