"""Policies side by side on one trace, at several capacities, with tail-first LRU and the optimum as their bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.simulate.optimum import belady_hit_rate, infinite_hit_rate, next_requests
from bench.simulate.progress import Progress
from bench.simulate.replay import replay
from bench.simulate.stack import HitCurve, lru_curve, sampled_lru_curve
from bench.simulate.trace import Trace
from eviction.factory import policy_factory

__all__ = ["Comparison", "Row", "compare"]

_EXACT_ACCESSES = 100_000_000
"""Of longer traces a sample gives the curve of LRU: so many accesses take about a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy at one capacity."""

    policy: str
    capacity_pct: float
    capacity_blocks: int
    hit_rate: float
    gap_closed: float | None
    """Of the gap from tail-first LRU to the optimum, what the policy closes; None where there is no gap."""
    seconds: float
    """Of processor time, all of the replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Policies and their bounds. `lru` and `belady` have one hit rate a capacity, as `capacities_pct` has them."""

    trace: Trace
    capacities_pct: Sequence[float]
    rows: Sequence[Row]
    curve: HitCurve
    """Of tail-first LRU, all sizes."""
    lru: Sequence[float]
    belady: Sequence[float]
    infinite: float

    def to_json(self) -> dict[str, object]:
        """What `--json` prints. Hit rates by capacity are keyed by the capacity in percent, as in `{"0.5": …}`."""
        keys = [f"{pct:g}" for pct in self.capacities_pct]
        columns = ("policy", "capacity_pct", "capacity_blocks", "hit_rate", "gap_closed")
        trace = self.trace
        return {
            "rows": [{name: getattr(row, name) for name in columns} for row in self.rows],
            "lru": dict(zip(keys, self.lru, strict=True)),
            "belady": dict(zip(keys, self.belady, strict=True)),
            "infinite": self.infinite,
            "lru_sampled": self.curve.sampled,
            "trace": {
                "name": trace.name,
                "requests": len(trace),
                "block_tokens": trace.block_tokens,
                "accesses": len(trace.blocks),
                "unique_blocks": trace.unique_blocks,
                "ids_known": trace.ids_known,
            },
            "speed": [
                {
                    "policy": row.policy,
                    "capacity_pct": row.capacity_pct,
                    "requests_per_s": len(trace) / row.seconds,
                    "accesses_per_s": len(trace.blocks) / row.seconds,
                }
                for row in self.rows
            ],
        }


def compare(
    trace: Trace,
    policies: Sequence[str],
    capacities_pct: Sequence[float],
    look_ahead: int,
    say: Callable[[str], None],
) -> Comparison:
    """Every policy at every capacity, in percent of the trace's unique blocks. Raises: InvalidArgument."""
    factories = {name: policy_factory(name) for name in policies}  # a wrong name is found at once
    capacities = [max(1, int(trace.unique_blocks * pct / 100)) for pct in capacities_pct]
    say(f"{trace.name}: LRU at all sizes")
    exact = len(trace.blocks) <= _EXACT_ACCESSES
    curve = lru_curve(trace) if exact else sampled_lru_curve(trace, _EXACT_ACCESSES / len(trace.blocks))
    lru = [curve.hit_rate(blocks) for blocks in capacities]
    following = next_requests(trace)
    belady = []
    for pct, blocks in zip(capacities_pct, capacities, strict=True):
        say(f"{trace.name}: the optimum at {pct:g} %")
        belady.append(belady_hit_rate(trace, blocks, following))
    rows = []
    for name, factory in factories.items():
        for pct, blocks, least, most in zip(capacities_pct, capacities, lru, belady, strict=True):
            progress = Progress(f"{trace.name}: {name} at {pct:g} %", say)
            policy = factory(rows=trace.unique_blocks, capacity_blocks=blocks)
            hit_rate = replay(trace, policy, blocks, look_ahead, progress.done)
            rows.append(
                Row(
                    policy=name,
                    capacity_pct=pct,
                    capacity_blocks=blocks,
                    hit_rate=hit_rate,
                    gap_closed=(hit_rate - least) / (most - least) if most > least else None,
                    seconds=progress.seconds(),
                )
            )
    return Comparison(
        trace=trace,
        capacities_pct=capacities_pct,
        rows=rows,
        curve=curve,
        lru=lru,
        belady=belady,
        infinite=infinite_hit_rate(trace),
    )
