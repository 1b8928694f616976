"""The planner's promise over disks, prompts and engines; what it does before it knows anything; its arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.layout import Tier
from kvstore.planning.planner import Ends, Question, Segment, Way, plan_request, segments_of
from kvstore.planning.speeds import PrefillSpeed, Speeds, TierSpeed
from tests.kvstore.serving_clock import BLOCK_TOKENS, VirtualServer, Workload

H200_8B = Workload(  # fits 0.22 s for 8,192 tokens and 13.5 s for 131,072 (bench/results/h200)
    name="8B on an H200",
    prefill=PrefillSpeed(step_s=0.004, token_s=2.05e-5, context_s=1.26e-9),
    slot_bytes=4 << 20,
    chunk_tokens=8192,
)
WORKLOADS = (
    H200_8B,
    Workload(
        name="8B on an H200, small steps",
        prefill=H200_8B.prefill,
        slot_bytes=4 << 20,
        chunk_tokens=512,
    ),
    Workload(
        name="8B on a GPU a tenth as fast",
        prefill=PrefillSpeed(step_s=0.015, token_s=2.5e-4, context_s=1.5e-8),
        slot_bytes=4 << 20,
        chunk_tokens=2048,
    ),
    Workload(
        name="1B on an H200",
        prefill=PrefillSpeed(step_s=0.002, token_s=4e-6, context_s=3e-10),
        slot_bytes=1 << 20,
        chunk_tokens=8192,
    ),
    Workload(
        name="SmolLM2 on two cores",
        prefill=PrefillSpeed(step_s=0.02, token_s=2e-3, context_s=4e-7),
        slot_bytes=45 << 15,
        chunk_tokens=512,
    ),
)
COLD_REQUESTS = 6
DISKS_GB_PER_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)


def disk(gb_per_s: float) -> TierSpeed:
    return TierSpeed(start_s=0.001, byte_s=1e-9 / gb_per_s)


def lengths(count: int, seed: int) -> list[int]:
    """From 512 to 131,072 tokens, evenly by their logarithm, the two ends among them, in any order."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.uniform(np.log(512), np.log(131_072), count - 2)).astype(int).tolist()
    return [int(n) for n in rng.permutation([512, 131_072, *drawn])]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
@pytest.mark.parametrize("gb_per_s", DISKS_GB_PER_S)
def test_never_more_than_5_percent_and_2_ms_above_the_better_single_way(
    workload: Workload, gb_per_s: float
) -> None:
    """Whatever was measured before, with 10 % noise on every measurement; the first six may find little measured."""
    server = VirtualServer(workload, disk(gb_per_s), ends=Ends.BOTH, noise=0.1)
    for position, tokens in enumerate(lengths(24, seed=1)):
        served = server.serve(tokens)
        if position >= COLD_REQUESTS:
            assert served.excess_s <= 0, f"request {position}, {tokens} tokens: {served}"
        few_steps_s = 3 * workload.prefill.seconds(0, 64, 64)
        assert served.ttft_s <= 3.5 * min(served.load_all_s, served.compute_all_s) + few_steps_s


def test_both_ends_are_about_twice_as_fast_where_disk_and_prefill_are_alike() -> None:
    server = VirtualServer(H200_8B, disk(5.0), ends=Ends.BOTH, noise=0.1)
    for tokens in lengths(20, seed=2):
        server.serve(tokens)
    served = server.serve(32_768)
    assert served.plan.way is Way.BOTH_ENDS
    assert served.ttft_s < 0.62 * min(served.load_all_s, served.compute_all_s)


@pytest.mark.parametrize("gb_per_s", DISKS_GB_PER_S)
def test_an_engine_that_cannot_compute_in_front_of_a_load_keeps_the_promise_once_it_has_measured(
    gb_per_s: float,
) -> None:
    """It has one way or the other, so it is as good as its measurements: here with 5 % noise, after some of them."""
    server = VirtualServer(H200_8B, disk(gb_per_s), ends=Ends.FRONT, noise=0.05)
    server.compute(0, 32_768)  # a prompt that nothing was cached of
    prompts = lengths(60, seed=3)
    for tokens in prompts[:20]:
        server.serve(tokens)
    for tokens in prompts[20:]:
        served = server.serve(tokens)
        assert served.plan.way is not Way.BOTH_ENDS
        assert served.excess_s <= 0, f"{tokens} tokens: {served}"


def test_both_ends_are_left_where_they_take_longer_than_their_parts_say() -> None:
    """On two cores they were chosen for a sixth less time, and took half as long again."""
    segments = (Segment(tier=Tier.NVME, begin=0, end=1024),)
    speeds = Speeds(prefill=H200_8B.prefill, tiers={Tier.NVME: disk(5.0)})
    both = plan_request(question(segments), speeds)
    slowed = plan_request(question(segments), replace(speeds, both_factor=2.5))
    assert both.way is Way.BOTH_ENDS
    assert slowed.way is not Way.BOTH_ENDS
    assert slowed.expected_s == min(both.load_all_s, both.compute_all_s)
    assert 0 < both.meet_s < both.expected_s


def test_a_disk_that_becomes_slow_is_noticed_within_a_few_requests() -> None:
    server = VirtualServer(H200_8B, disk(10.0), ends=Ends.BOTH, noise=0.1)
    for tokens in lengths(30, seed=4):
        server.serve(tokens)
    server.disk = disk(0.1)
    later = [server.serve(16_384) for _ in range(12)]
    assert all(served.excess_s <= 0 for served in later[4:]), [served.excess_share for served in later]


def test_a_prompt_of_which_hbm_has_all_is_loaded_whatever_is_known() -> None:
    plan = plan_request(question((Segment(tier=Tier.HBM, begin=0, end=8),)), Speeds(prefill=None, tiers={}))
    assert (plan.way, plan.load_end, plan.loaded_blocks) == (Way.LOAD, 8, 8)


def test_what_dram_has_is_loaded_and_what_a_slow_disk_has_is_computed() -> None:
    segments = (
        Segment(tier=Tier.HBM, begin=0, end=10),
        Segment(tier=Tier.DRAM, begin=10, end=40),
        Segment(tier=Tier.NVME, begin=40, end=100),
    )
    plan = plan_request(question(segments, ends=Ends.FRONT), known(disk_gb_per_s=0.01))
    assert (plan.way, plan.load_end, plan.loaded_blocks, plan.cached_blocks) == (Way.COMPUTE, 40, 40, 100)
    assert plan.expected_s < min(plan.load_all_s, plan.compute_all_s)


def test_dram_that_is_slower_than_prefill_is_not_asked() -> None:
    plan = plan_request(question((Segment(tier=Tier.DRAM, begin=0, end=64),)), known(dram_gb_per_s=0.01))
    assert (plan.way, plan.loaded_blocks) == (Way.COMPUTE, 0)
    assert plan.expected_s == plan.compute_all_s < plan.load_all_s


def test_what_is_queued_ahead_counts() -> None:
    segments = (Segment(tier=Tier.NVME, begin=0, end=256),)
    idle = plan_request(question(segments, ends=Ends.FRONT), known(disk_gb_per_s=8.0))
    busy = plan_request(
        question(segments, ends=Ends.FRONT, queued_bytes={Tier.NVME: 20 << 30}), known(disk_gb_per_s=8.0)
    )
    assert (idle.way, busy.way) == (Way.LOAD, Way.COMPUTE)


def test_runs_of_one_tier_are_told_apart_and_their_number_is_bounded() -> None:
    tiers = np.array([0, 0, 1, 2, 2, 2], dtype=np.uint8)
    assert segments_of(tiers) == (
        Segment(tier=Tier.HBM, begin=0, end=2),
        Segment(tier=Tier.DRAM, begin=2, end=3),
        Segment(tier=Tier.NVME, begin=3, end=6),
    )
    many = segments_of(np.tile(np.array([0, 2], dtype=np.uint8), 50))
    assert len(many) <= 8
    assert [segment.begin for segment in many[1:]] == [segment.end for segment in many[:-1]]
    assert (many[0].begin, many[-1].end, many[-1].tier) == (0, 100, Tier.NVME)
    assert segments_of(np.empty(0, dtype=np.uint8)) == ()


def question(
    segments: tuple[Segment, ...], *, ends: Ends = Ends.BOTH, queued_bytes: dict[Tier, int] | None = None
) -> Question:
    return Question(
        num_tokens=segments[-1].end * BLOCK_TOKENS + 1,
        block_tokens=BLOCK_TOKENS,
        slot_bytes=4 << 20,
        segments=segments,
        chunk_tokens=8192,
        ends=ends,
        queued_bytes=queued_bytes or {},
    )


def known(*, disk_gb_per_s: float = 1.0, dram_gb_per_s: float = 50.0) -> Speeds:
    return Speeds(
        prefill=H200_8B.prefill,
        tiers={
            Tier.NVME: disk(disk_gb_per_s),
            Tier.DRAM: TierSpeed(start_s=0.0003, byte_s=1e-9 / dram_gb_per_s),
        },
    )
