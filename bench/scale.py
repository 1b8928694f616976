"""How much longer an acquire takes when the tables are a thousand times as large."""

from __future__ import annotations

import gc
import time

import numpy as np

from bench.tables import FilledStore
from bench.timing import median
from kvstore.moves import Outcome

__all__ = ["scale_ratio"]

_TURN = 10


def scale_ratio(small_rows: int, large_rows: int, *, samples: int) -> float:
    """Median time of an acquire of 4,096 chained blocks at `large_rows`, over that at `small_rows`.

    Both stores are filled first and then take turns of ten calls, each another chain, so that the small one is as warm
    in the processor's caches as it would be alone; the release is not timed.
    """
    stores = [FilledStore(rows) for rows in (small_rows, large_rows)]
    rng = np.random.default_rng(0)
    times: list[list[float]] = [[], []]
    gc.collect()
    gc.disable()
    try:
        for _ in range(-(-samples // _TURN)):
            for filled, taken in zip(stores, times, strict=True):
                taken += [_acquire_s(filled, rng) for _ in range(_TURN + 1)][1:]
    finally:
        gc.enable()
    return median(times[1]) / median(times[0])


def _acquire_s(filled: FilledStore, rng: np.random.Generator) -> float:
    full = len(filled.chains) - (len(filled.chains[-1]) < len(filled.chains[0]))
    chain = filled.chains[int(rng.integers(full))]
    start = time.perf_counter()
    grant = filled.acquire(chain)
    taken = time.perf_counter() - start
    assert (grant.outcomes == Outcome.HIT_HBM).all(), "every block is cached"
    filled.step(released=grant.hbm_slots)
    return taken
