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
from kvstore.victims.policy_border import raised_in

__all__ = ["replay"]

_PROGRESS_REQUESTS = 512


def replay(
    trace: Trace,
    policy: Policy,
    capacity_blocks: int,
    look_ahead: int = 0,
    progress: Callable[[float], None] = lambda _done: None,
) -> float:
    """Hits in all prompt blocks. `policy` is made for rows up to the trace's unique blocks.

    Raises: InvalidArgument, also where the policy does what its contract forbids, or raises.
    """
    if look_ahead < 0:
        raise InvalidArgument(f"a look-ahead of {look_ahead} requests")
    try:
        return _replay(trace, policy, capacity_blocks, look_ahead, progress)
    except _PolicyError as error:
        raise InvalidArgument(f"the policy {_name(policy)} {error}") from None
    except Exception as error:  # code of others, which may raise anything
        raise InvalidArgument(f"the policy {_name(policy)} {raised_in('a replay', error)}") from error


class _PolicyError(Exception):
    """What a policy did that its contract forbids, as the end of a sentence that begins with its name."""


def _name(policy: Policy) -> str:
    return f"{type(policy).__module__}.{type(policy).__qualname__}"


def _replay(
    trace: Trace, policy: Policy, capacity_blocks: int, look_ahead: int, progress: Callable[[float], None]
) -> float:
    rows, bounds = trace.blocks.astype(np.uint32), trace.offsets.tolist()
    names = trace.blocks.astype(np.uint64)
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
                names=names[bounds[request] : bounds[request + 1]],
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
            if size != capacity_blocks:
                raise _PolicyError(
                    f"named {len(victims)} victims where {size + len(victims) - capacity_blocks} were asked for"
                )
        if request % _PROGRESS_REQUESTS == 0:
            _check(cached, size)
            progress(request / len(queue))
    _check(cached, size)
    return hits / max(len(rows), 1)


def _check(cached: NDArray[np.bool_], size: int) -> None:
    """Each wrong victim leaves a block more in `cached` than were counted. O(unique blocks), so now and then."""
    if np.count_nonzero(cached) != size:
        raise _PolicyError("named victims that are none: a block twice, or one that is not cached")
