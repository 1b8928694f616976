"""One contract, every policy that is registered."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eviction.base import Policy, PolicyFactory, Rows, Stop, Use
from eviction.factory import OURS, names, policy_factory
from kvstore.errors import InvalidArgument
from tests.eviction.chains import MOST_BLOCKS, Cache, prompts, use_of
from tests.eviction.references import REFERENCES, ArcReference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=sorted(OURS))
def make(request: pytest.FixtureRequest) -> PolicyFactory:
    """Each policy in turn."""
    return policy_factory(request.param)


def filled(make: PolicyFactory, rows: int, capacity: int | None = None) -> Policy:
    """A policy with `rows` blocks, used ten at a time, one after the other."""
    policy = make(rows=MOST_BLOCKS, capacity_blocks=capacity or rows)
    for begin in range(0, rows, 10):
        batch = np.arange(begin, min(begin + 10, rows), dtype=np.uint32)
        policy.use(use_of(batch, np.ones(len(batch), dtype=np.bool_), float(begin)))
    return policy


def test_ours_are_registered_as_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["kvstore.eviction"] == OURS
    assert set(OURS) <= set(names())
    with pytest.raises(InvalidArgument, match="auto"):
        policy_factory("nothing of the kind")


def test_an_empty_cache_has_no_victims(make: PolicyFactory) -> None:
    policy = make(rows=16, capacity_blocks=4)
    assert len(policy) == 0
    assert len(policy.victims(3, 0.0)) == 0
    policy.remove(np.array([1, 2], dtype=np.uint32))
    policy.check_integrity()


@pytest.mark.parametrize("count", [0, 1, 7, 95, 100, 1000])
def test_victims_are_distinct_cached_and_as_many_as_there_can_be(make: PolicyFactory, count: int) -> None:
    policy = filled(make, 100)
    victims = policy.victims(count, 200.0)
    assert victims.dtype == np.uint32
    assert len(victims) == min(count, 100) == len(set(victims.tolist()))
    assert (victims < 100).all()
    assert len(policy) == 100 - len(victims)
    policy.check_integrity()
    assert not set(policy.victims(1000, 201.0).tolist()) & set(victims.tolist())


def test_what_may_not_go_stays_and_all_else_can_be_had(make: PolicyFactory) -> None:
    policy = filled(make, 200)

    def odd(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return rows % 2 == 1

    first = policy.victims(30, 300.0, odd)
    assert len(first) == 30
    rest = policy.victims(1000, 301.0, odd)
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(1, 200, 2))
    policy.check_integrity()
    assert sorted(policy.victims(1000, 302.0).tolist()) == list(range(0, 200, 2))


def test_removed_blocks_are_no_victims_and_may_come_back(make: PolicyFactory) -> None:
    policy = filled(make, 50)
    gone = np.arange(10, 20, dtype=np.uint32)
    policy.remove(gone)
    policy.remove(gone)  # what is not cached is passed over
    assert len(policy) == 40
    policy.check_integrity()
    policy.use(use_of(gone, np.ones(10, dtype=np.bool_), 60.0))
    policy.check_integrity()
    assert sorted(policy.victims(100, 61.0).tolist()) == list(range(50))


def test_what_waits_goes_last_and_of_that_the_furthest_first(make: PolicyFactory) -> None:
    policy = filled(make, 60)
    soon, later = np.arange(0, 10, dtype=np.uint32), np.arange(5, 20, dtype=np.uint32)
    policy.expect([soon, later, np.array([MOST_BLOCKS - 1], dtype=np.uint32)])
    assert sorted(policy.victims(40, 61.0).tolist()) == list(range(20, 60))
    assert policy.victims(12, 62.0).tolist() == [
        *range(19, 9, -1),
        9,
        8,
    ]  # later's own, then the tail of soon's
    policy.check_integrity()
    policy.expect([])
    assert sorted(policy.victims(20, 63.0).tolist()) == list(range(8))


def test_equal_calls_have_equal_answers(make: PolicyFactory) -> None:
    one, other = (Cache.of(make(rows=MOST_BLOCKS, capacity_blocks=60), 60) for _ in range(2))
    for rows in prompts(3, 150):
        before = rows.copy()
        assert one.serve(rows).tolist() == other.serve(rows).tolist()
        assert (rows == before).all()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 120))
def test_any_history_keeps_the_parts_in_agreement(make_any: str, seed: int, capacity: int) -> None:
    cache = Cache.of(policy_factory(make_any)(rows=MOST_BLOCKS, capacity_blocks=capacity), capacity)
    rng = np.random.default_rng(seed)
    asked = list(prompts(seed, 60))
    for place, rows in enumerate(asked):
        stop = Stop(int(rng.integers(3)))
        waiting = asked[place + 1 : place + 4] if rng.random() < 0.5 else []
        cache.serve(rows, stop, waiting, step_s=float(rng.exponential(5.0)))
        if rng.random() < 0.1:
            gone = np.flatnonzero(cache.here)[:5].astype(np.uint32)
            cache.policy.remove(gone)
            cache.here[gone] = False
    cache.policy.check_integrity()
    assert len(cache.policy) == int(cache.here.sum())


@pytest.fixture(params=sorted(OURS), scope="module")
def make_any(request: pytest.FixtureRequest) -> str:
    """Each name in turn, for all examples of a property."""
    name: str = request.param
    return name


def test_blocks_that_come_back_in_other_rows_are_known_by_name(make: PolicyFactory) -> None:
    """In a store a block that comes back has another row; only a simulation gives it the same."""
    moved = Cache.of(make(rows=MOST_BLOCKS, capacity_blocks=40), 40)
    fixed = Cache.of(make(rows=MOST_BLOCKS, capacity_blocks=40), 40)
    row_of: dict[int, int] = {}
    free = list(range(MOST_BLOCKS))[::-1]
    for blocks in prompts(5, 120):
        for block in blocks.tolist():
            if block not in row_of:
                row_of[block] = free.pop()
        rows = np.array([row_of[block] for block in blocks.tolist()], dtype=np.uint32)
        block_of = {row: block for block, row in row_of.items()}
        moved.now_s += 1.0
        fresh = ~moved.here[rows]
        moved.policy.use(
            Use(
                rows=rows,
                fresh=fresh,
                names=blocks.astype(np.uint64),
                depths=np.arange(len(rows), dtype=np.uint32),
                now_s=moved.now_s,
                prompt_blocks=len(rows),
            )
        )
        moved.here[rows] = True
        gone = moved.policy.victims(max(len(moved.policy) - 40, 0), moved.now_s)
        moved.here[gone] = False
        expected = fixed.serve(blocks)
        assert [block_of[row] for row in gone.tolist()] == expected.tolist()
        for row in gone.tolist():
            free.insert(0, row)
            del row_of[block_of[row]]


@pytest.mark.parametrize("name", sorted(REFERENCES))
@pytest.mark.parametrize("seed, capacity", [(0, 7), (1, 30), (2, 64), (3, 150)])
def test_victims_are_those_of_the_reference(name: str, seed: int, capacity: int) -> None:
    policy = policy_factory(name)(rows=MOST_BLOCKS, capacity_blocks=capacity)
    reference, here = REFERENCES[name](capacity), np.zeros(MOST_BLOCKS, dtype=np.bool_)
    for now_s, rows in enumerate(prompts(seed, 250)):
        fresh = ~here[rows]
        policy.use(use_of(rows, fresh, float(now_s)))
        tail_first = rows[::-1].tolist()
        reference.use(tail_first, dict(zip(rows.tolist(), fresh.tolist(), strict=True)))
        here[rows] = True
        over = max(int(here.sum()) - capacity, 0)
        gone = policy.victims(over, float(now_s))
        expected = [reference.evict() for _ in range(over)]
        if isinstance(reference, ArcReference):
            reference.trim()
        assert sorted(gone.tolist()) == sorted(expected), f"request {now_s}"
        here[gone] = False


def test_lru_goes_tail_first_through_a_prompt_used_at_once() -> None:
    """Elsewhere the head of a prefix went before its tail and made the whole prefix unreachable."""
    policy = policy_factory("lru")(rows=8, capacity_blocks=8)
    policy.use(use_of(np.arange(4, 8, dtype=np.uint32), np.ones(4, dtype=np.bool_), 1.0))
    policy.use(use_of(np.arange(4, dtype=np.uint32), np.ones(4, dtype=np.bool_), 2.0))
    assert policy.victims(6, 3.0).tolist() == [7, 6, 5, 4, 3, 2]
