"""The account against LRU, beside an LRU policy that serves the same prompts."""

from __future__ import annotations

import numpy as np
import pytest

from eviction.auto import AutoPolicy
from eviction.factory import policy_factory
from eviction.floor import Floor
from eviction.lru import LruPolicy
from tests.eviction.chains import MOST_BLOCKS, Cache, prompts

CAPACITY = 80


@pytest.mark.parametrize("policy", ["fifo", "s3fifo", "lru"])
def test_it_knows_to_the_block_what_is_lost_against_lru(policy: str) -> None:
    floor = Floor(places=MOST_BLOCKS, capacity_blocks=CAPACITY)
    known = np.zeros(MOST_BLOCKS, dtype=np.bool_)
    cache = Cache.of(policy_factory(policy)(rows=MOST_BLOCKS, capacity_blocks=CAPACITY), CAPACITY)
    lru = Cache.of(LruPolicy(rows=MOST_BLOCKS, capacity_blocks=CAPACITY), CAPACITY)
    gain = 0
    for rows in prompts(5, 300):
        gain += floor.use(rows.astype(np.int64), known[rows], cache.here[rows])
        known[rows] = True
        cache.serve(rows)
        lru.serve(rows)
        floor.trim(int(cache.here.sum()))
        floor.check_integrity()
    assert gain == cache.hits - lru.hits
    assert floor.owed == pytest.approx(-gain, rel=0.02)
    assert (policy == "lru") == (gain == 0)


@pytest.mark.parametrize("asked_blocks, stake", [(20_000, 60), (400_000, 762)])
def test_a_policy_that_is_worse_costs_no_more_than_its_stake(asked_blocks: int, stake: int) -> None:
    """A share of what was asked for, and of much no more than a quarter of the cache and 512."""
    floor = Floor(places=1000, capacity_blocks=1000)
    prompt, hit = np.arange(1000), np.ones(1000, dtype=np.bool_)
    floor.use(prompt, ~hit, ~hit)
    for _ in range(asked_blocks // 1000):
        assert floor.use(prompt, hit, hit) == 0
    lost = 0
    while not floor.broken:
        lost += 1
        assert floor.use(prompt[:1], hit[:1], ~hit[:1]) == -1
    assert 0.95 * stake < lost <= 1.1 * stake
    assert floor.price > 1.9 * stake  # who takes over next has to make up for it
    floor.settle()
    assert not floor.broken


def test_what_was_cleared_is_no_hit_of_lru_either() -> None:
    auto = AutoPolicy(rows=MOST_BLOCKS, capacity_blocks=CAPACITY)
    cache, rows = Cache.of(auto, CAPACITY), np.arange(20, dtype=np.uint32)
    cache.serve(rows)
    auto.remove(rows)
    cache.here[rows] = False
    cache.serve(rows)
    assert auto.floor.owed == 0.0


def test_blocks_of_one_name_in_one_prompt_are_counted_once() -> None:
    """A client may give its blocks hashes that begin alike: the account had more blocks than the cache then."""
    floor = Floor(places=8, capacity_blocks=4)
    for _ in range(3):
        floor.use(np.array([3, 3, 5, 3]), np.ones(4, dtype=np.bool_), np.ones(4, dtype=np.bool_))
        floor.check_integrity()
    floor.remove(np.array([3, 3]))
    floor.check_integrity()
