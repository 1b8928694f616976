"""Taking times: samples of one call, and what is reported of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["median", "percentile", "sample_ms"]


def sample_ms(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls."""
    samples = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    return samples


def median(samples: Sequence[float]) -> float:
    """The middle sample."""
    return percentile(samples, 50)


def percentile(samples: Sequence[float], rank: float) -> float:
    """The sample below which `rank` percent lie, interpolated."""
    return float(np.percentile(np.asarray(samples), rank))
