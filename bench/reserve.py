"""`python -m bench.reserve`: what an acquire of new blocks costs with and without slots that are kept free ahead.

A full store of 500,000 blocks in this process, without a daemon: each call wants 256 new blocks, so as many have to
go; a tick of the background comes after every fourth call, as it would with 200 calls a second. Times are of the
processor, so a busy machine does not show in them. `turn` is what a tick takes: so long may a call have to wait for it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from bench.blocks import seals_of
from bench.tables import FilledStore
from bench.timing import percentile

__all__ = ["ReserveResult", "main", "measure"]

_BLOCKS = 256
_CALLS_A_TICK = 4
_WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveResult:
    """Milliseconds of processor time, and evictions."""

    clean_percent: int
    call_p50_ms: float
    call_p99_ms: float
    turn_p50_ms: float
    turn_p99_ms: float
    evicted: int
    evicted_inline: int
    """Of these, while a call waited for it."""


def measure(*, clean_percent: int, rows: int, calls: int) -> ReserveResult:
    """One store, from full to turned over."""
    filled = FilledStore(rows)
    limits = filled.store._state.limits
    fraction = clean_percent / 100
    filled.store._state.limits = replace(
        limits, reserve_fraction=fraction, reserve_slots=limits.reserve_slots if clean_percent else 0
    )
    rng = np.random.default_rng(1)
    took_ms: list[float] = []
    turns_ms: list[float] = []
    for call in range(_WARM_UP + calls):
        chain = rng.integers(0, 1 << 64, (_BLOCKS, 2), dtype=np.uint64)
        began_ns = time.thread_time_ns()
        grant = filled.acquire(chain)
        took_ms.append((time.thread_time_ns() - began_ns) / 1e6)
        filled.step(seals=seals_of(filled.namespace, chain, grant.hbm_slots, grant.hbm_generations))
        filled.step(released=grant.hbm_slots)
        if call % _CALLS_A_TICK == 0:
            began_ns = time.thread_time_ns()
            filled.store.tick(filled.now_ms)
            turns_ms.append((time.thread_time_ns() - began_ns) / 1e6)
    counters = filled.store.stats().counters
    took_ms, turns_ms = took_ms[_WARM_UP:], turns_ms[_WARM_UP // _CALLS_A_TICK :]
    return ReserveResult(
        clean_percent=clean_percent,
        call_p50_ms=percentile(took_ms, 50),
        call_p99_ms=percentile(took_ms, 99),
        turn_p50_ms=percentile(turns_ms, 50),
        turn_p99_ms=percentile(turns_ms, 99),
        evicted=counters["evictions_hbm"],
        evicted_inline=counters.get("evictions_hbm_inline", 0),
    )


def main() -> None:
    """Prints one line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m bench.reserve", description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--calls", type=int, default=1500)
    options = parser.parse_args()
    for clean_percent in (2, 0):
        result = measure(clean_percent=clean_percent, rows=options.rows, calls=options.calls)
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
