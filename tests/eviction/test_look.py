"""What a call for victims looks at where much may not go: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from eviction.base import Policy, Rows, Use
from eviction.factory import OURS, policy_factory

BLOCKS = 1 << 15
PROMPT_BLOCKS = 512
VICTIMS = 100
MOST_ASKED = 12_000
"""Rows a call: a third of this cache, and a hundredth of a large one."""


class Owner:
    """Lets some of its blocks go, and counts what it is asked after."""

    def __init__(self, held: NDArray[np.bool_]) -> None:
        self.held = held
        self.asked = 0

    def may_go(self, rows: Rows) -> NDArray[np.bool_]:
        self.asked += len(rows)
        free: NDArray[np.bool_] = ~self.held[rows]
        return free

    def victims(self, policy: Policy, call: int) -> Rows:
        """Of one call, which is bounded."""
        self.asked = 0
        found = policy.victims(VICTIMS, 1e3 + call, self.may_go)
        assert self.asked <= MOST_ASKED < BLOCKS / 2, "a call looked at too much"
        assert not self.held[found].any(), "what may not go is never a victim"
        assert len(found) == len(np.unique(found)) <= VICTIMS
        return found


@pytest.fixture(params=sorted(OURS))
def policy(request: pytest.FixtureRequest) -> Policy:
    """Full of prompts, every fifth of which was used again."""
    policy = policy_factory(request.param)(rows=BLOCKS, capacity_blocks=BLOCKS)
    rows = np.arange(BLOCKS, dtype=np.uint32).reshape(-1, PROMPT_BLOCKS)
    for now, prompt in enumerate((*rows, *rows[::5])):
        fresh = np.full(PROMPT_BLOCKS, now < len(rows))
        names, depths = prompt + np.uint64(1), np.arange(PROMPT_BLOCKS, dtype=np.uint32)
        use = Use(
            rows=prompt,
            fresh=fresh,
            names=names,
            depths=depths,
            now_s=float(now),
            prompt_blocks=PROMPT_BLOCKS,
        )
        policy.use(use)
    return policy


def older_half() -> NDArray[np.bool_]:
    return np.arange(BLOCKS) < BLOCKS // 2


def nearly_all() -> NDArray[np.bool_]:
    held: NDArray[np.bool_] = np.random.default_rng(1).random(BLOCKS) < 0.99
    return held


@pytest.mark.parametrize("shape", [older_half, nearly_all])
def test_what_may_go_goes_in_the_end_and_no_call_looks_at_all(
    policy: Policy, shape: Callable[[], NDArray[np.bool_]]
) -> None:
    """A policy went through all its blocks, up to 127 ms for a million, where those that came first were held."""
    owner = Owner(shape())
    free = BLOCKS - int(owner.held.sum())
    found = sum(len(owner.victims(policy, call)) for call in range(200))
    assert found == free
    policy.check_integrity()


def test_of_an_older_half_that_is_held_no_call_needs_more_than_one(policy: Policy) -> None:
    owner = Owner(older_half())
    assert len(owner.victims(policy, 0)) > 0


def test_the_only_one_that_may_go_is_found_in_some_calls(policy: Policy) -> None:
    owner = Owner(np.ones(BLOCKS, dtype=np.bool_))
    assert len(owner.victims(policy, 0)) == 0
    owner.held[23_456] = False
    assert any(owner.victims(policy, call).tolist() == [23_456] for call in range(1, 60))
    owner.held[:] = False
    assert len(owner.victims(policy, 99)) == VICTIMS, "what is let go again is near at hand"
    policy.check_integrity()


def test_what_waits_does_not_go_before_what_a_call_did_not_look_at(policy: Policy) -> None:
    owner = Owner(older_half())
    policy.expect([np.arange(BLOCKS // 2, BLOCKS, dtype=np.uint32)])
    owner.held[3] = False
    gone = np.concatenate([owner.victims(policy, call) for call in range(60)])
    assert 3 in gone.tolist(), "nobody waits for it"


def test_s3_fifo_counts_what_it_met() -> None:
    """Blocks that were used again were lost to it, for good, where one call took many from a main queue that it left
    small: they stayed in the cache for ever."""
    policy = policy_factory("s3fifo")(rows=4000, capacity_blocks=2000)
    rng = np.random.default_rng(0)
    cached = np.zeros(4000, dtype=np.bool_)
    for now in range(60):
        first, count = int(rng.integers(3000)), int(rng.integers(1, 1000))
        rows = np.arange(first, first + count, dtype=np.uint32)
        depths = np.arange(count, dtype=np.uint32)
        policy.use(
            Use(
                rows=rows,
                fresh=~cached[rows],
                names=rows + np.uint64(1),
                depths=depths,
                now_s=float(now),
                prompt_blocks=count,
            )
        )
        cached[rows] = True
        cached[policy.victims(int(rng.integers(1, 2000)), float(now))] = False
        policy.check_integrity()
