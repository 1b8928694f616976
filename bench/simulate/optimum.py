"""What no policy can exceed: Belady's MIN with bypass, by request, and a cache without a bound.

MIN keeps those blocks whose next request is nearest, and does not take in what is asked for again later than all that
is kept, or never. The hits are those of a leading run, as everywhere here; a block's prefix is needed whenever the
block is, so of blocks with the same next request the deepest go first.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bench.simulate.trace import Trace

__all__ = ["belady_hit_rate", "infinite_hit_rate", "next_requests"]

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


def infinite_hit_rate(trace: Trace) -> float:
    """Every block but its first request is a hit."""
    return 1 - trace.unique_blocks / len(trace.blocks) if len(trace.blocks) else 0.0


def next_requests(trace: Trace) -> I32:
    """[accesses] the next request that asks for the block again; the number of requests where none does. O(n log n)."""
    request = np.repeat(np.arange(len(trace), dtype=np.int32), np.diff(trace.offsets))
    order = np.argsort(trace.blocks, kind="stable")
    blocks, requests = trace.blocks[order], request[order]
    following = np.full(len(order), len(trace), dtype=np.int32)
    same = blocks[:-1] == blocks[1:]
    following[:-1][same] = requests[1:][same]
    result = np.empty_like(following)
    result[order] = following
    return result


def belady_hit_rate(trace: Trace, capacity_blocks: int, following: I32 | None = None) -> float:
    """Hits in all prompt blocks of the offline optimum. `following`: `next_requests`, where they are known. O(n)."""
    if following is None:
        following = next_requests(trace)
    cache, hits = _Nearest(len(trace), trace.unique_blocks, capacity_blocks), 0
    bounds = trace.offsets.tolist()
    for request in range(len(trace)):
        low, high = bounds[request], bounds[request + 1]
        hits += cache.serve(request, trace.blocks[low:high], following[low:high])
    return hits / max(len(trace.blocks), 1)


class _Nearest:
    """Blocks in buckets by their next request, and a heap of the farthest buckets.

    A chain's next requests ascend with depth, so a prompt falls into few runs; what a prompt asked for is taken out of
    its bucket all at once, since the bucket is this request's own. All in a bucket is of one chain, and what came
    later is nearer to its head: whoever used what is behind it used that as well.
    """

    def __init__(self, requests: int, unique_blocks: int, capacity: int) -> None:
        self._never = requests
        self._capacity = capacity
        self._cached = np.zeros(unique_blocks, dtype=np.bool_)
        self._buckets: dict[int, deque[I32]] = {}
        self._farthest: list[int] = []
        self._size = 0

    def serve(self, request: int, blocks: I32, following: I32) -> int:
        """Leading blocks that are cached; the prompt's blocks are taken in as far as that is worth it."""
        if not len(blocks):
            return 0
        there = self._cached[blocks]
        hits = len(blocks) if there.all() else int(there.argmin())
        self._size -= sum(map(len, self._buckets.pop(request, ())))
        self._cached[blocks] = False
        cuts = [0, *(np.flatnonzero(following[1:] != following[:-1]) + 1).tolist(), len(blocks)]
        for low, high in pairwise(cuts):
            wanted = int(following[low])
            if wanted == self._never:
                continue
            self._cached[blocks[low:high]] = True
            self._put(wanted, blocks[low:high])
        self._shrink()
        return hits

    def _put(self, wanted: int, blocks: I32) -> None:
        if wanted not in self._buckets:
            self._buckets[wanted] = deque()
            heapq.heappush(self._farthest, -wanted)
        self._buckets[wanted].append(blocks)
        self._size += len(blocks)

    def _shrink(self) -> None:
        while (over := self._size - self._capacity) > 0:
            bucket = self._buckets.get(-self._farthest[0])
            if not bucket:  # served already, or emptied
                self._buckets.pop(-heapq.heappop(self._farthest), None)
                continue
            run = bucket.popleft()
            kept = max(0, len(run) - over)
            self._cached[run[kept:]] = False
            self._size -= len(run) - kept
            if kept:
                bucket.appendleft(run[:kept])
