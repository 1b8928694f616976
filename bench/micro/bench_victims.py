"""Choosing 1,000 victims of 2^20 blocks, for every policy: the bound is 5 ms on one core, for the slowest call too, and
whatever may not go."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from eviction.base import MayGo, Policy, Rows, Stop, Use
from eviction.factory import OURS, policy_factory

BLOCKS = 1 << 20
PROMPT_BLOCKS = 256
AGAIN = 6000  # prompts that are used a second time, to some depth
VICTIMS = 1000
STEP_S = 0.1


def use(policy: Policy, rows: Rows, fresh: bool, now_s: float) -> None:
    policy.use(
        Use(
            rows=rows,
            fresh=np.full(len(rows), fresh),
            names=rows.astype(np.uint64),
            depths=np.arange(len(rows), dtype=np.uint32),
            now_s=now_s,
            prompt_blocks=len(rows),
            stop=Stop(int(now_s * 7) % len(Stop)),
        )
    )


def filled(name: str) -> tuple[Policy, float]:
    """A full cache, part of which was used twice; and the time."""
    policy = policy_factory(name)(rows=BLOCKS + VICTIMS, capacity_blocks=BLOCKS)
    rng, now_s = np.random.default_rng(0), 0.0
    for begin in range(0, BLOCKS, PROMPT_BLOCKS):
        use(policy, np.arange(begin, begin + PROMPT_BLOCKS, dtype=np.uint32), True, now_s)
        now_s += STEP_S
    for begin in (rng.integers(0, BLOCKS // PROMPT_BLOCKS, AGAIN) * PROMPT_BLOCKS).tolist():
        rows = np.arange(begin, begin + int(rng.integers(1, PROMPT_BLOCKS)), dtype=np.uint32)
        use(policy, rows, False, now_s)
        now_s += STEP_S
    return policy, now_s


def half(rows: Rows) -> NDArray[np.bool_]:
    """What was inserted first is held."""
    return rows >= BLOCKS // 2


def hundredth(rows: Rows) -> NDArray[np.bool_]:
    """99 % are held."""
    mixed: NDArray[np.bool_] = (rows * np.uint32(2_654_435_761)) >> np.uint32(16) < 655
    return mixed


def nothing(rows: Rows) -> NDArray[np.bool_]:
    """All is held."""
    return np.zeros(len(rows), dtype=np.bool_)


def all_of(rows: Rows) -> NDArray[np.bool_]:
    """Nothing is held, but asked after."""
    return np.ones(len(rows), dtype=np.bool_)


@pytest.mark.parametrize("may_go", [all_of, half, hundredth, nothing])
@pytest.mark.parametrize("name", sorted(OURS))
def test_1000_victims_where_much_may_not_go(benchmark: BenchmarkFixture, name: str, may_go: MayGo) -> None:
    """As many may be named as are found in a bounded look; what was is inserted again."""
    policy, start_s = filled(name)
    clock = itertools.count(1)
    gone = np.arange(BLOCKS, BLOCKS + VICTIMS, dtype=np.uint32)

    def insert() -> tuple[tuple[int, float], dict[str, object]]:
        now_s = start_s + next(clock) * STEP_S
        if len(gone):
            use(policy, gone, True, now_s)
        return (VICTIMS, now_s), {}

    def victims(count: int, now_s: float) -> None:
        nonlocal gone
        gone = policy.victims(count, now_s, may_go)

    benchmark.pedantic(victims, setup=insert, rounds=200, warmup_rounds=2)  # type: ignore[no-untyped-call]
    assert may_go(gone).all()
    assert (len(gone) == VICTIMS) if may_go is all_of else (len(gone) <= VICTIMS)


@pytest.mark.parametrize("name", sorted(OURS))
def test_1000_victims_of_a_million(benchmark: BenchmarkFixture, name: str) -> None:
    """What was evicted in one round is inserted before the next, so the cache stays full; so often that logs fill."""
    policy, start_s = filled(name)
    clock = itertools.count(1)
    gone = np.arange(BLOCKS, BLOCKS + VICTIMS, dtype=np.uint32)

    def insert() -> tuple[tuple[int, float], dict[str, object]]:
        now_s = start_s + next(clock) * STEP_S
        use(policy, gone, True, now_s)
        return (VICTIMS, now_s), {}

    def victims(count: int, now_s: float) -> None:
        nonlocal gone
        gone = policy.victims(count, now_s)

    benchmark.pedantic(victims, setup=insert, rounds=400, warmup_rounds=2)  # type: ignore[no-untyped-call]
    assert len(gone) == VICTIMS
    assert len(policy) == BLOCKS
