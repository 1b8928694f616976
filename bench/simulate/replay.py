"""Replays a trace on one policy alone: one cache of a fixed number of blocks, and nothing but hits and misses.

A prompt hits as far as its blocks are cached without a gap. After it is served all its blocks are touched or inserted,
then the policy brings the cache down to its capacity; it knows the next requests where a look-ahead is given.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bench.simulate.trace import Trace
from eviction.base import Policy, Stop, Use
from kvstore.errors import InvalidArgument

__all__ = ["replay"]

_PROGRESS_REQUESTS = 512


def replay(
    trace: Trace,
    policy: Policy,
    capacity_blocks: int,
    look_ahead: int = 0,
    progress: Callable[[float], None] = lambda _done: None,
) -> float:
    """Hits in all prompt blocks. `policy` is made for rows up to the trace's unique blocks. Raises: InvalidArgument."""
    if look_ahead < 0:
        raise InvalidArgument(f"a look-ahead of {look_ahead} requests")
    rows, bounds = trace.blocks.astype(np.uint32), trace.offsets.tolist()
    names = np.arange(trace.unique_blocks, dtype=np.uint64)
    depths = np.arange(int(np.diff(trace.offsets).max(initial=0)), dtype=np.uint32)
    seconds, stops = (trace.time_ms / 1000).tolist(), [Stop(stop) for stop in trace.stop.tolist()]
    cached: NDArray[np.bool_] = np.zeros(trace.unique_blocks, dtype=np.bool_)
    queue = [rows[low:high] for low, high in pairwise(bounds)]
    hits = size = 0
    for request, prompt in enumerate(queue):
        n = len(prompt)
        fresh = ~cached[prompt]
        misses = int(np.count_nonzero(fresh))
        hits += int(fresh.argmax()) if misses else n
        now_s = seconds[request]
        policy.use(
            Use(
                rows=prompt,
                fresh=fresh,
                names=names[prompt],
                depths=depths[:n],
                now_s=now_s,
                prompt_blocks=n,
                stop=stops[request],
            )
        )
        if look_ahead:
            policy.expect(queue[request + 1 : request + 1 + look_ahead])
        cached[prompt] = True
        size += misses
        if size > capacity_blocks:
            victims = policy.victims(size - capacity_blocks, now_s)
            cached[victims] = False
            size -= len(victims)
        if request % _PROGRESS_REQUESTS == 0:
            progress(request / len(queue))
    assert size <= capacity_blocks, "the policy left more than the capacity"
    return hits / max(len(rows), 1)
