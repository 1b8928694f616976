"""Traces served over the real store on the virtual clock: hits per tier, times, bytes, and nothing left behind."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from bench.simulate.clock import Channel, Clock
from bench.simulate.command import simulate
from bench.simulate.hardware import Hardware, Model, model_of
from bench.simulate.outcome import StoreOutcome, TierBytes, serve, without_store
from bench.simulate.readers.open import open_trace
from bench.simulate.serving import Serving
from bench.simulate.stack import lru_curve
from bench.simulate.tiered import Sizes
from bench.simulate.trace import Trace
from eviction.base import MayGo, PolicyFactory, Rows
from eviction.factory import policy_factory
from eviction.lru import LruPolicy
from kvstore.errors import InvalidArgument
from tests.bench.simulate.traces import DATA, random_chains, trace_of

BLOCK_TOKENS = 16


def quiet(_done: float) -> None:
    pass


def model() -> Model:
    return model_of("llama-3.1-8b", Hardware())


def block_bytes() -> int:
    return model().token_bytes * BLOCK_TOKENS


def tiers(hbm: int, dram: int, nvme: int) -> TierBytes:
    """So many blocks in each."""
    return TierBytes(hbm=hbm * block_bytes(), dram=dram * block_bytes(), nvme=nvme * (block_bytes() + 4096))


def spaced(requests: int, seed: int) -> Trace:
    """Requests a minute apart, so that nothing of one is under way when the next comes; each block of it is full."""
    chains = random_chains(requests, seed, most=8, width=3)
    trace = trace_of(chains, [60_000 * number for number in range(requests)])
    longer = (trace.prompt_tokens + 1).astype(
        np.int32
    )  # a token beyond the last block, so that all may be hits
    return Trace(**{name: getattr(trace, name) for name in trace.__slots__} | {"prompt_tokens": longer})


def run(trace: Trace, sizes: TierBytes, speed: float = 1.0) -> StoreOutcome:
    return serve(trace, model(), sizes, "lru", speed, quiet)


def test_with_room_for_all_every_block_is_computed_once() -> None:
    trace = spaced(80, 1)
    found = run(trace, tiers(trace.unique_blocks * 2, trace.unique_blocks * 2, 0))
    assert found.requests == 80
    assert found.hit_rate == pytest.approx(1 - trace.unique_blocks / len(trace.blocks))
    assert found.hit_rate_by_tier["hbm"] == found.hit_rate
    assert found.moved_bytes["hbm_to_dram"] == trace.unique_blocks * block_bytes()
    assert found.moved_bytes["dram_to_hbm"] == 0


def test_what_hbm_lost_is_found_in_dram_and_what_dram_lost_on_disk() -> None:
    trace = spaced(120, 2)
    all_blocks = 2 * trace.unique_blocks
    infinite = 1 - trace.unique_blocks / len(trace.blocks)
    dram = run(trace, tiers(24, all_blocks, 0))
    assert dram.hit_rate == pytest.approx(infinite)
    assert dram.hit_rate_by_tier["dram"] > 0
    assert (
        dram.moved_bytes["dram_to_hbm"]
        == round(dram.hit_rate_by_tier["dram"] * len(trace.blocks)) * block_bytes()
    )
    disk = run(trace, tiers(24, 40, all_blocks))
    assert disk.hit_rate == pytest.approx(infinite)
    assert disk.hit_rate_by_tier["nvme"] > 0
    assert disk.moved_bytes["dram_to_nvme"] == trace.unique_blocks * block_bytes()
    assert disk.flash_written_bytes_a_day == pytest.approx(disk.moved_bytes["dram_to_nvme"] * 24 / disk.hours)
    nothing = run(trace, tiers(24, 0, 0))
    assert nothing.hit_rate < dram.hit_rate


def test_a_small_tier_hits_about_what_lru_of_its_size_does() -> None:
    """Write-through: DRAM has what HBM has, and the background keeps a few slots free."""
    trace = spaced(400, 3)
    found = run(trace, tiers(20, 100, 0))
    assert lru_curve(trace).hit_rate(80) - 0.03 < found.hit_rate < lru_curve(trace).hit_rate(100) + 0.01


def test_the_time_to_the_first_token_is_what_computing_and_copying_take() -> None:
    chain = list(range(40))
    trace = trace_of([chain, chain], [0, 600_000])
    found = run(trace, tiers(200, 200, 0))
    tokens = int(trace.prompt_tokens[0])
    cold, warm = model().prefill_s(0, tokens), model().prefill_s(39 * BLOCK_TOKENS, tokens)
    assert found.ttft.mean_s == pytest.approx((cold + warm) / 2, rel=0.01)
    assert without_store(trace, model(), 1.0).mean_s == pytest.approx(cold)


def test_the_last_block_of_a_full_prompt_is_computed_again() -> None:
    trace = trace_of([[0, 1], [0, 1]], [0, 60_000])
    assert run(trace, tiers(10, 10, 0)).hit_rate == pytest.approx(1 / 4)


def test_the_gpu_serves_one_prompt_after_the_other() -> None:
    trace = trace_of([[0], [1], [2]], [0, 0, 0])
    one = model().prefill_s(0, BLOCK_TOKENS)
    assert without_store(trace, model(), 1.0).mean_s == pytest.approx(2 * one)
    assert run(trace, tiers(10, 0, 0)).ttft.mean_s == pytest.approx(2 * one)


@pytest.mark.parametrize(
    "sizes, name",
    [
        ((12, 0, 0), None),
        ((16, 16, 0), "auto"),
        ((16, 24, 60), None),
        ((16, 24, 60), "arc"),
        ((64, 16, 16), "fifo"),
    ],
)
def test_crowded_tiers_serve_everything_and_leave_nothing_held(
    sizes: tuple[int, int, int], name: str | None
) -> None:
    policy: PolicyFactory | None = None if name is None else policy_factory(name)
    trace = trace_of(random_chains(150, 5, most=9, width=4), [20 * number for number in range(150)])
    serving = Serving(trace, model(), slots_of(tiers(*sizes)), policy, 1.0)
    served = serving.run()
    assert len(served.ttft_s) == 150
    assert serving.store.check_integrity() == []
    serving.check_rankings()
    assert all(tier.held_slots == 0 for tier in serving.store.stats().tiers)


def test_policies_order_dram_and_disk() -> None:
    """LRU as a policy of its own hits what the store's own LRU does, and FIFO, which forgets what is used, less."""
    trace = spaced(400, 3)
    sizes = tiers(20, 100, 0)
    own, lru, fifo = (
        Serving(trace, model(), slots_of(sizes), made, 1.0).run()
        for made in (None, policy_factory("lru"), policy_factory("fifo"))
    )
    hits = [sum(served.hit_blocks.values()) / served.prompt_blocks for served in (own, lru, fifo)]
    assert hits[1] == pytest.approx(hits[0], abs=0.01)
    assert hits[2] < hits[1] - 0.01


class Rude(LruPolicy):
    """Names what may not go."""

    def victims(self, count: int, now_s: float, _may_go: MayGo | None = None) -> Rows:
        return super().victims(count, now_s, None)


def test_a_policy_that_breaks_its_contract_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store goes on by its own key then, whose figures are not the policy's."""
    monkeypatch.setattr("bench.simulate.outcome.policy_factory", lambda _name: Rude)
    with pytest.raises(InvalidArgument, match="the policy rude named victims that are none"):
        serve(spaced(60, 3), model(), tiers(20, 30, 0), "rude", 1.0, quiet)


def slots_of(found: TierBytes) -> Sizes:
    return Sizes(slot_bytes=block_bytes(), hbm_bytes=found.hbm, dram_bytes=found.dram, nvme_bytes=found.nvme)


def test_equal_runs_are_equal() -> None:
    trace = trace_of(random_chains(100, 6), [50 * number for number in range(100)])
    assert run(trace, tiers(16, 24, 60)) == run(trace, tiers(16, 24, 60))


def test_prompts_that_hbm_cannot_hold_are_counted() -> None:
    trace = trace_of([list(range(20)), [50]])
    found = run(trace, tiers(8, 8, 0))
    assert (found.requests, found.too_long) == (1, 1)


def test_tiers_that_cannot_be() -> None:
    trace = trace_of([[0]])
    with pytest.raises(InvalidArgument, match="--hbm must hold some"):
        run(trace, tiers(0, 8, 0))
    with pytest.raises(InvalidArgument, match="needs DRAM"):
        run(trace, tiers(8, 0, 8))
    with pytest.raises(InvalidArgument, match="no shape is named"):
        model_of("none-such", Hardware())


def test_the_command_serves_a_trace() -> None:
    app = Typer()
    app.command()(simulate)
    arguments = [
        str(DATA / "mooncake.jsonl"),
        "--policy",
        "lru",
        "--dram",
        "8GiB",
        "--nvme",
        "64GiB",
        "--hbm",
        "8GiB",
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert "rows" not in found
    (store,) = found["store"]
    assert store["requests"] == len(open_trace(DATA / "mooncake.jsonl"))
    assert store["hit_rate"] == pytest.approx(sum(store["hit_rate_by_tier"].values()))
    shown = CliRunner().invoke(app, [*arguments, "--capacity", "5%"], catch_exceptions=False).stdout
    assert "flash writes a day" in shown
    assert "optimum" in shown


def test_the_clock_runs_in_order() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: clock.at(0.5, lambda: seen.append("now")))  # what is past happens now
    clock.at(1.0, lambda: seen.append("then"))
    while clock.step():
        pass
    assert (seen, clock.now_s) == (["then", "now", "late"], 2.0)


def test_a_channel_queues() -> None:
    link = Channel()
    assert [link.take(0.0, 2.0), link.take(1.0, 2.0), link.take(9.0, 1.0)] == [2.0, 4.0, 10.0]
    assert link.busy_s == 5.0
