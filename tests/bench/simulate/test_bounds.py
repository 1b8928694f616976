"""LRU at all sizes, the optimum and the users' load, beside simple implementations and the reference figures."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from bench.simulate.optimum import belady_hit_rate, infinite_hit_rate, next_requests
from bench.simulate.readers.open import open_trace
from bench.simulate.replay import replay
from bench.simulate.stack import lru_curve, sampled_lru_curve
from bench.simulate.users import play
from eviction.factory import policy_factory
from kvstore.errors import InvalidArgument
from tests.bench.simulate.traces import DATA, random_chains, trace_of, whole


def run_of(cached: set[int] | OrderedDict[int, None], chain: list[int]) -> int:
    return next((at for at, block in enumerate(chain) if block not in cached), len(chain))


def naive_lru(chains: list[list[int]], capacity: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        hits += run_of(cache, chain)
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / sum(map(len, chains))


def naive_belady(chains: list[list[int]], capacity: int) -> float:
    cache: set[int] = set()
    hits = 0
    for number, chain in enumerate(chains):
        hits += run_of(cache, chain)

        def wanted(block: int, after: int = number) -> int:
            return next((at for at in range(after + 1, len(chains)) if block in chains[at]), len(chains))

        depth = {block: at for known in chains for at, block in enumerate(known)}
        kept = sorted(cache | set(chain), key=lambda block: (wanted(block), depth[block]))
        cache = {block for block in kept[:capacity] if wanted(block) < len(chains)}
    return hits / sum(map(len, chains))


@pytest.mark.parametrize("seed", range(4))
def test_stack_distances_are_lru_of_each_size(seed: int) -> None:
    chains = random_chains(300, seed)
    curve = lru_curve(trace_of(chains))
    for capacity in (1, 2, 5, 11, 40, 200, 5000):
        assert curve.hit_rate(capacity) == pytest.approx(naive_lru(chains, capacity))
    assert curve.hit_rate(0) == 0.0


def test_stack_distances_over_many_chunks_of_requests() -> None:
    chains = random_chains(3000, 9, most=3, width=9)
    curve = lru_curve(trace_of(chains))
    for capacity in (30, 300):
        assert curve.hit_rate(capacity) == pytest.approx(naive_lru(chains, capacity))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 3, 10, 60])
def test_the_optimum(seed: int, capacity: int) -> None:
    chains = random_chains(120, seed)
    assert belady_hit_rate(trace_of(chains), capacity) == pytest.approx(naive_belady(chains, capacity))


def test_the_optimum_is_between_lru_and_infinite() -> None:
    trace = trace_of(random_chains(400, 5))
    curve = lru_curve(trace)
    for capacity in (2, 9, 50, trace.unique_blocks):
        assert curve.hit_rate(capacity) <= belady_hit_rate(trace, capacity) + 1e-12
    assert belady_hit_rate(trace, trace.unique_blocks) == pytest.approx(infinite_hit_rate(trace))
    assert curve.hit_rate(trace.unique_blocks) == pytest.approx(infinite_hit_rate(trace))


def test_prompts_shorter_than_a_block_hit_nothing() -> None:
    """Of nothing that was asked for an infinite cache hit all."""
    trace = trace_of([[], []])
    assert infinite_hit_rate(trace) == 0.0
    assert belady_hit_rate(trace, 1) == 0.0
    assert lru_curve(trace).hit_rate(1) == 0.0


def test_next_requests() -> None:
    assert next_requests(trace_of([[1, 2], [1, 3], [1, 2]])).tolist() == [1, 2, 2, 3, 3, 3]


def test_a_sample_is_near() -> None:
    trace = trace_of(random_chains(4000, 2, most=12, width=4))
    exact, sampled = lru_curve(trace), sampled_lru_curve(trace, 0.25)
    assert sampled.sampled == 0.25
    for share in (0.02, 0.1, 0.3, 0.9):
        capacity = share * trace.unique_blocks
        assert sampled.hit_rate(capacity) == pytest.approx(exact.hit_rate(capacity), abs=0.02)


def test_users_play_sessions_back_to_back() -> None:
    sessions = open_trace(DATA / "claude_code.jsonl")
    load = play(sessions, 2)
    assert (np.diff(load.time_ms) >= 0).all()
    spans = []
    for session in range(4):
        mine = load.time_ms[load.session == session]
        recorded = sessions.time_ms[sessions.session == session]
        assert np.array_equal(mine - mine[0], recorded - recorded[0])
        spans.append((int(mine[0]), int(mine[-1])))
    spans.sort()
    assert max(start for start, _ in spans[:2]) <= 600_000
    for start, _ in spans[2:]:  # half a minute after some other one's end
        assert start - 30_000 in {end for _, end in spans}
    again = play(sessions, 2)
    assert np.array_equal(load.blocks, again.blocks)
    assert not np.array_equal(load.time_ms, play(sessions, 2, seed=1).time_ms)


def test_only_sessions_can_be_played() -> None:
    with pytest.raises(InvalidArgument, match="has no sessions"):
        play(open_trace(DATA / "mooncake.jsonl"), 4)


# By capacity in %: tail-first LRU, Belady, FIFO.
Figures = tuple[float, float, float | None, float | None]
"""Of LRU-r, Belady, FIFO and ARC-r."""
CONVERSATION: dict[float, Figures] = {
    1: (0.0447, 0.2013, 0.0434, 0.0539),
    2: (0.0566, 0.2661, 0.0545, 0.0737),
    5: (0.1349, 0.3413, 0.1237, 0.1431),
    10: (0.2243, 0.3485, 0.2010, 0.2333),
    25: (0.3163, 0.3485, 0.2867, 0.3029),
}
SYNTHETIC: dict[float, Figures] = {
    1: (0.0091, 0.0956, 0.0088, 0.0108),
    5: (0.0357, 0.2235, 0.0352, 0.0414),
    25: (0.1786, 0.3816, 0.1673, 0.1921),
}
CLAUDE_CODE: dict[float, Figures] = {
    0.5: (0.2600, 0.5592, 0.2237, None),
    1: (0.5204, 0.7488, None, None),
    2: (0.8016, 0.8915, None, None),
    5: (0.9362, 0.9548, None, None),
}


@pytest.mark.parametrize(
    "name, figures",
    [
        ("mooncake_conversation", CONVERSATION),
        ("mooncake_synthetic", SYNTHETIC),
        ("claude_code_weka", CLAUDE_CODE),
    ],
)
def test_reference_figures(name: str, figures: dict[float, Figures]) -> None:
    """LRU-r, FIFO, ARC-r and Belady of the traces' README, within half a point; the optimum to the last digit given."""
    trace = open_trace(whole(name))
    if name.startswith("claude"):
        trace = play(trace, 64)
    curve, following = lru_curve(trace), next_requests(trace)
    for percent, (lru, belady, *others) in figures.items():
        capacity = int(trace.unique_blocks * percent / 100)
        assert curve.hit_rate(capacity) == pytest.approx(lru, abs=0.005)
        assert belady_hit_rate(trace, capacity, following) == pytest.approx(belady, abs=0.0001)
        for policy, figure in zip(("fifo", "arc"), others, strict=True):
            if figure is not None:
                made = policy_factory(policy)(rows=trace.unique_blocks, capacity_blocks=capacity)
                assert replay(trace, made, capacity) == pytest.approx(figure, abs=0.005)
