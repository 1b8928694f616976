"""LRU over keys: what the store asks where it keeps the order itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eviction.base import EvictionPolicy
from eviction.lru import Lru
from kvstore.layout import touch_key

POLICIES: list[type[EvictionPolicy]] = [Lru]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    """Each policy in turn."""
    made: EvictionPolicy = request.param()
    return made


def test_nothing_eligible_gives_nothing(policy: EvictionPolicy) -> None:
    assert len(policy.victims(np.arange(5, dtype=np.uint64), np.zeros(5, dtype=np.bool_), 3)) == 0
    assert len(policy.victims(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.bool_), 3)) == 0
    assert len(policy.victims(np.arange(5, dtype=np.uint64), np.ones(5, dtype=np.bool_), 0)) == 0


@pytest.mark.parametrize("count", [1, 7, 50, 1000])
def test_victims_are_distinct_eligible_and_as_many_as_there_can_be(
    policy: EvictionPolicy, count: int
) -> None:
    rng = np.random.default_rng(count)
    keys = rng.integers(0, 40, 300, dtype=np.uint64)  # many equal
    eligible = rng.random(300) < 0.5
    victims = policy.victims(keys, eligible, count)
    assert victims.dtype == np.uint32
    assert len(victims) == min(count, int(eligible.sum()))
    assert len(set(victims.tolist())) == len(victims)
    assert eligible[victims].all()


def test_arguments_are_left_alone_and_answers_repeat(policy: EvictionPolicy) -> None:
    rng = np.random.default_rng(1)
    keys, eligible = rng.integers(0, 1 << 60, 100, dtype=np.uint64), rng.random(100) < 0.7
    before = keys.copy(), eligible.copy()
    first = policy.victims(keys, eligible, 10)
    assert (policy.victims(keys, eligible, 10) == first).all()
    assert (keys == before[0]).all()
    assert (eligible == before[1]).all()


@given(
    keys=hnp.arrays(np.uint64, st.integers(0, 200), elements=st.integers(0, 50)),
    seed=st.integers(0, 1000),
    count=st.integers(0, 210),
)
def test_lru_takes_the_smallest_keys_in_order(keys: np.ndarray, seed: int, count: int) -> None:
    eligible = np.random.default_rng(seed).random(len(keys)) < 0.6
    victims = Lru().victims(keys, eligible, count)
    expected = sorted(int(key) for key, good in zip(keys, eligible, strict=True) if good)[:count]
    assert [int(keys[victim]) for victim in victims] == expected


def test_lru_goes_tail_first_through_a_prompt_used_at_once() -> None:
    """Elsewhere the head of a prefix went before its tail and made the whole prefix unreachable."""
    keys = np.concatenate(
        (touch_key(2000, np.arange(4, dtype=np.uint32)), touch_key(1000, np.arange(4, dtype=np.uint32)))
    )
    assert Lru().victims(keys, np.ones(8, dtype=np.bool_), 6).tolist() == [7, 6, 5, 4, 3, 2]
