"""Hit rates of tail-first LRU at all sizes in one pass, by stack distances; of long traces by a sample (SHARDS).

The distance of an access is the number of blocks used as recently as this one, itself among them: a cache of so many
blocks has it. A prompt's head is used after its tail, so distances ascend along a chain, and a hit is a hit of the
leading run.

Sampling is that of SHARDS (Waldspurger and others, FAST '15): distances among a part of the blocks, scaled by the rate;
what the sample has too many or too few of is corrected where the distance is smallest. Two things differ, since the
whole trace is at hand. Every so many-th block in order of first appearance is taken instead of hashing them, so each
chain has its share; and the blocks that are used most are all taken, with weight one: whether the one block that all
prompts begin with is in the sample would else decide the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bench.simulate.trace import Trace

__all__ = ["HitCurve", "lru_curve", "request_hits", "sampled_lru_curve"]

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F64 = NDArray[np.float64]

_CHUNK = 512
_HOT_PART = 4
"""Of the blocks that a sample takes by their number a fourth as many again are those that are used most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """Hits by capacity: `hits[k]` accesses are hits of a cache of `capacities[k]` blocks; both ascend."""

    capacities: I64
    hits: F64
    accesses: float
    sampled: float  # share of the blocks that were looked at

    def hit_rate(self, capacity_blocks: float) -> float:
        """Hits in all accesses at a capacity."""
        place = int(np.searchsorted(self.capacities, capacity_blocks, side="right")) - 1
        return float(self.hits[place]) / max(self.accesses, 1.0) if place >= 0 else 0.0


def lru_curve(trace: Trace) -> HitCurve:
    """Exact. O(accesses + requests × √requests)."""
    weights = np.ones(trace.unique_blocks)
    return _curve(_distances(trace.offsets, trace.blocks, weights), weights[trace.blocks], 1.0)


def sampled_lru_curve(trace: Trace, rate: float) -> HitCurve:
    """From about `rate` of the blocks."""
    stride = max(1, round(1 / rate))
    weights = np.zeros(trace.unique_blocks)
    weights[stride // 2 :: stride] = stride
    uses = np.bincount(trace.blocks, minlength=trace.unique_blocks)
    most_used = np.argsort(-uses, kind="stable")[: trace.unique_blocks // (_HOT_PART * stride)]
    weights[most_used] = 1.0
    kept = weights[trace.blocks] > 0
    before = np.concatenate(([0], np.cumsum(kept)))
    blocks = trace.blocks[kept]
    curve = _curve(_distances(before[trace.offsets], blocks, weights), weights[blocks], 1 / stride)
    missed = len(trace.blocks) - curve.accesses
    return replace(curve, hits=np.maximum(curve.hits + missed, 0.0), accesses=float(len(trace.blocks)))


def _curve(distances: F64, weights: F64, sampled: float) -> HitCurve:
    """Distance 0 stands for a first use."""
    used = distances > 0
    capacities, place = np.unique(np.ceil(distances[used]).astype(np.int64), return_inverse=True)
    hits: F64 = np.cumsum(
        np.bincount(place, weights=weights[used], minlength=len(capacities)), dtype=np.float64
    )
    return HitCurve(capacities=capacities, hits=hits, accesses=float(weights.sum()), sampled=sampled)


def _distances(offsets: I64, blocks: I32, weights: F64) -> F64:
    """[accesses] stack distance of each access; 0: the first use. `weights` [unique] is how many a block stands for.

    `left` has, for each request, its blocks that nobody has used since. A block's distance is what is left of all
    requests later than its last one, and of that one what stands before the block, which this prompt asks for as well.
    """
    requests = len(offsets) - 1
    chunks = -(-max(requests, 1) // _CHUNK)
    left, of_chunk = np.zeros(chunks * _CHUNK), np.zeros(chunks)
    last = np.full(len(weights), -1, dtype=np.int32)
    result = np.zeros(len(blocks))
    bounds = offsets.tolist()
    for request in range(requests):
        low, high = bounds[request], bounds[request + 1]
        prompt = blocks[low:high]
        mine = weights[prompt]
        used = last[prompt]
        known = np.flatnonzero(used >= 0)
        if len(known):
            result[low + known] = _ranks(used[known], mine[known], left, of_chunk)
        last[prompt] = request
        left[request] = whole = mine.sum()
        of_chunk[request // _CHUNK] += whole
    return result


def _ranks(used: I32, weights: F64, left: F64, of_chunk: F64) -> F64:
    """[n] distances of blocks of one prompt, last used by the requests `used` [n]; takes them out of `left`.

    A head is used whenever its tail is, so `used` descends: equal requests are runs.
    """
    cuts = [0, *(np.flatnonzero(used[1:] != used[:-1]) + 1).tolist(), len(used)]
    later_chunks = of_chunk.sum() - of_chunk.cumsum()
    ranks = np.empty(len(used))
    runs = [(low, high, int(used[low])) for low, high in pairwise(cuts)]
    for low, high, request in runs:
        chunk = request // _CHUNK
        later = later_chunks[chunk] + left[request + 1 : (chunk + 1) * _CHUNK].sum()
        np.cumsum(weights[low:high], out=ranks[low:high])
        ranks[low:high] += later
    for low, high, request in runs:
        gone = weights[low:high].sum()
        left[request] -= gone
        of_chunk[request // _CHUNK] -= gone
    return ranks


def request_hits(trace: Trace, capacities: Sequence[int]) -> list[I64]:
    """For each capacity [requests] blocks that each request hits under tail-first LRU. Exact."""
    distances = _distances(trace.offsets, trace.blocks, np.ones(trace.unique_blocks))
    request = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    return [
        np.bincount(request[(distances > 0) & (distances <= capacity)], minlength=len(trace))
        for capacity in capacities
    ]
