"""A closed-loop load of users who play recorded sessions back to back.

Each user begins at a random moment of the first ten minutes, plays a session at its recorded times, waits half a
minute, and takes the next that nobody has played. The order of the sessions and the moments are drawn from a seed.
"""

from __future__ import annotations

import heapq
import random

import numpy as np
from numpy.typing import NDArray

from bench.simulate.trace import Pacing, Trace
from kvstore.errors import InvalidArgument

__all__ = ["play"]

_START_S = 600.0
_BETWEEN_S = 30.0


def play(trace: Trace, users: int, *, seed: int = 0) -> Trace:
    """The load that so many users make of the sessions of `trace`. Raises: InvalidArgument."""
    if trace.pacing is not Pacing.SESSION:
        raise InvalidArgument(f"{trace.name}: has no sessions that users could play")
    if users < 1:
        raise InvalidArgument(f"{users} users make no load")
    first = np.flatnonzero(np.concatenate(([True], np.diff(trace.session) != 0)))
    last = np.concatenate((first[1:], [len(trace)]))
    ends_ms = trace.time_ms[last - 1]
    starts_ms: NDArray[np.int64] = np.zeros(len(first), dtype=np.int64)
    rng = random.Random(seed)
    order = list(range(len(first)))
    rng.shuffle(order)
    idle = [(int(rng.uniform(0, _START_S) * 1000), user) for user in range(users)]
    heapq.heapify(idle)
    for session in order:
        now_ms, user = heapq.heappop(idle)
        starts_ms[session] = now_ms
        heapq.heappush(idle, (now_ms + int(ends_ms[session]) + int(_BETWEEN_S * 1000), user))
    times = trace.time_ms + np.repeat(starts_ms, last - first)
    order_ms = np.argsort(times, kind="stable")
    return trace.taken(order_ms, times[order_ms]).paced(Pacing.TRACE)
