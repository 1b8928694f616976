"""The whole store on a trace: hits per tier, first-token times beside those without it, bytes moved, flash writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from bench.simulate.clock import Channel
from bench.simulate.hardware import Model
from bench.simulate.serving import Served, Serving
from bench.simulate.tiered import Sizes
from bench.simulate.trace import Trace
from eviction.base import PolicyFactory
from eviction.factory import policy_factory
from kvstore.errors import InvalidArgument

__all__ = ["Latency", "StoreOutcome", "TierBytes", "serve", "without_store"]

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """What each tier may hold."""

    hbm: int
    dram: int
    nvme: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds to the first token, from a request's arrival."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOutcome:
    """One policy with tiers of some sizes. Shares are of all prompt blocks, `busy` of the time."""

    policy: str
    tiers: TierBytes
    requests: int
    too_long: int
    """Prompts that HBM cannot hold, and that were not served."""
    hit_rate: float
    hit_rate_by_tier: Mapping[str, float]
    """By where a block was when its request came."""
    ttft: Latency
    ttft_without_store: Latency
    moved_bytes: Mapping[str, int]
    flash_written_bytes_a_day: float
    busy: Mapping[str, float]
    hours: float
    """Of the simulated time."""
    counters: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return asdict(self)


def serve(
    trace: Trace, model: Model, tiers: TierBytes, policy: str, speed: float, progress: Callable[[float], None]
) -> StoreOutcome:
    """Serves a trace. Raises: InvalidArgument where a tier is smaller than a block, or the policy is not there or
    breaks its contract."""
    slot_bytes = model.token_bytes * trace.block_tokens
    sizes = Sizes(slot_bytes=slot_bytes, hbm_bytes=tiers.hbm, dram_bytes=tiers.dram, nvme_bytes=tiers.nvme)
    if sizes.hbm < 2 or (tiers.nvme and not sizes.dram):
        raise InvalidArgument(
            f"a block of {trace.block_tokens} tokens of {model.name} takes {slot_bytes:,} bytes: --hbm must hold some, "
            "and a disk needs DRAM before it"
        )
    serving = Serving(trace, model, sizes, _factory(policy), speed)
    served = serving.run(progress)
    for fault in serving.store.hints.rankings.faults.values():
        raise InvalidArgument(f"the policy {policy} {fault.what}")
    return _outcome(tiers, policy, served, without_store(trace, model, speed))


def _factory(policy: str) -> PolicyFactory | None:
    """LRU as the store itself has it: by the keys of its rows, in all tiers."""
    return None if policy == "lru" else policy_factory(policy)


def without_store(trace: Trace, model: Model, speed: float) -> Latency:
    """First-token times when every prompt is computed."""
    gpu = Channel()
    arrivals = ((trace.time_ms - trace.time_ms[0]) / 1000 / speed).tolist()
    ends = [
        gpu.take(arrival, model.prefill_s(0, tokens))
        for arrival, tokens in zip(arrivals, trace.prompt_tokens.tolist(), strict=True)
    ]
    return _latency(np.asarray(ends) - np.asarray(arrivals))


def _outcome(tiers: TierBytes, policy: str, served: Served, without: Latency) -> StoreOutcome:
    blocks = max(served.prompt_blocks, 1)
    by_tier = {tier: hits / blocks for tier, hits in served.hit_blocks.items()}
    return StoreOutcome(
        policy=policy,
        tiers=tiers,
        requests=len(served.ttft_s),
        too_long=served.too_long,
        hit_rate=sum(by_tier.values()),
        hit_rate_by_tier=by_tier,
        ttft=_latency(served.ttft_s),
        ttft_without_store=without,
        moved_bytes=served.moved_bytes,
        flash_written_bytes_a_day=served.moved_bytes["dram_to_nvme"] * _DAY_S / served.span_s,
        busy={name: float(seconds / served.span_s) for name, seconds in served.busy_s.items()},
        hours=served.span_s / 3600,
        counters=served.counters,
    )


def _latency(seconds: NDArray[np.float64]) -> Latency:
    if not len(seconds):
        return Latency(mean_s=0.0, p50_s=0.0, p90_s=0.0, p99_s=0.0)
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, (50, 90, 99)))
    return Latency(mean_s=float(seconds.mean()), p50_s=p50, p90_s=p90, p99_s=p99)
