"""Two small caches beside the real one, which see a fixed sample of its blocks: would the hazard policy hit more?

A block is in the sample by its name alone, and each small cache holds the sampled share of the capacity, so its hit
rate estimates that of a whole cache (Waldspurger, Saemundsson, Ahmad, Park, "Cache modeling and optimization using
miniature simulations", ATC 2017). It holds no block, only what its policy knows of it. The other cache goes by LRU:
what the whole cache hit more than LRU is known without a sample (`floor.py`), so the two leads can be compared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eviction.base import Policy, Stop, Use
from eviction.hazard import HazardPolicy
from eviction.lru import LruPolicy

__all__ = ["Understudy"]

U32 = NDArray[np.uint32]

(
    _ADDED,
    _FIRST_FACTOR,
    _SECOND_FACTOR,
) = (  # of splitmix64: names that are counted up are spread like any others
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_FIRST_SHIFT, _SECOND_SHIFT = np.uint64(30), np.uint64(27)
_BLOCKS = 2048
"""Of a small cache, and up to twice as many: a cache no larger than that is followed as a whole."""
_MOST_HALVINGS = 8
_ROWS_A_BLOCK = 64  # blocks that share a row are taken for one: so that is rare, and alike in both caches
_FEWEST_ROWS = 1 << 16
_BATCH_SHARE = 4  # of a cache's blocks are used together: a batch is one use, which costs some order
_SAMPLED_AT_ONCE = 1 << 12  # blocks: a quarter of a large cache would make one use late
_HALF_LIFE_BLOCKS = 8192.0
_DEVIATIONS = 2.0
"""Of the sum of the leads. That may be by chance, but what a wrong return costs is bounded (`floor.py`), and with three
half of a trace was over before a right one."""


class Understudy:
    """A small cache that goes by what a hazard policy has learned, and one that goes by LRU."""

    def __init__(self, teacher: HazardPolicy, capacity_blocks: int) -> None:
        """`teacher` goes on learning."""
        halvings = max(capacity_blocks // _BLOCKS, 1).bit_length() - 1
        halvings = min(halvings, _MOST_HALVINGS)
        self._unsampled = np.uint64((1 << halvings) - 1)
        self._shift = np.uint64(halvings)
        self._scale = float(1 << halvings)
        blocks = max(capacity_blocks >> halvings, 1)
        size = 1 << max(_ROWS_A_BLOCK * blocks, _FEWEST_ROWS).bit_length()
        self._row_mask = np.uint64(size - 1)
        self._hazard = _SmallCache(
            HazardPolicy(rows=size, capacity_blocks=blocks, teacher=teacher), size, blocks
        )
        self._lru = _SmallCache(LruPolicy(rows=size, capacity_blocks=blocks), size, blocks)
        self._names: list[NDArray[np.uint64]] = []
        self._depths: list[U32] = []
        self._ends: list[tuple[U32, Stop]] = []
        self._sampled: list[tuple[U32, U32]] = []  # rows and depths, the last use first
        self._batch = self._batch_gain = self._unsampled_blocks = 0
        self._batch_blocks = max((blocks << halvings) // _BATCH_SHARE, 1)
        self._seen = self._hits = (
            0.0  # sampled blocks and what the hazard policy hit of them, the older the less
        )
        self._won = self._squares = 0.0  # of the leads of all batches since the hazard policy stood worst

    def use(self, use: Use, gain: int) -> bool:
        """Whether there is something new to be said. `gain`: blocks that the cache hit more than LRU would have."""
        self._names.append(use.names)
        self._depths.append(use.depths)
        self._batch += len(use.names)
        self._batch_gain += gain
        self._unsampled_blocks += len(use.names)
        if self._batch < self._batch_blocks:
            if self._unsampled_blocks >= _SAMPLED_AT_ONCE:
                self._sample()
            return False
        self._flush(use)
        return True

    def ended(self, names: NDArray[np.uint64], stop: Stop) -> None:
        """The answer to a prompt of these blocks ended, for that reason."""
        mixed = _mixed(names)
        chosen = mixed[(mixed & self._unsampled) == 0]
        if len(chosen):
            self._ends.append((self._row_of(chosen), stop))

    def leads_by(self, blocks: float) -> bool:
        """Whether it hit so many more blocks of the whole cache than that did, and more than by chance."""
        return self._won * self._scale > blocks and self._won > _DEVIATIONS * self._squares**0.5

    @property
    def hit_rate(self) -> float | None:
        """Of the hazard policy, lately, of the sample; None before any."""
        return self._hits / self._seen if self._seen else None

    def _row_of(self, mixed: NDArray[np.uint64]) -> U32:
        return ((mixed >> self._shift) & self._row_mask).astype(np.uint32)

    def _sample(self) -> None:
        """What has come since the last time, less what is not in the sample."""
        mixed = _mixed(np.concatenate(self._names[::-1]))
        chosen = np.flatnonzero((mixed & self._unsampled) == 0)
        self._sampled.append((self._row_of(mixed[chosen]), np.concatenate(self._depths[::-1])[chosen]))
        self._names, self._depths, self._unsampled_blocks = [], [], 0

    def _flush(self, use: Use) -> None:
        """What has come since the last time is used at once; the last of each block counts, any before it hits."""
        self._sample()
        rows, depths = (np.concatenate(columns) for columns in zip(*self._sampled[::-1], strict=True))
        n = len(rows)
        last = np.sort(np.unique(rows, return_index=True)[1])
        batch = replace(use, rows=rows[last], names=rows[last].astype(np.uint64), depths=depths[last])
        repeated = n - len(last)
        hits = self._hazard.serve(batch, self._ends) + repeated
        lead = hits - self._lru.serve(batch, self._ends) - repeated - self._batch_gain / self._scale
        fade = 0.5 ** (n / _HALF_LIFE_BLOCKS)
        self._seen, self._hits = self._seen * fade + n, self._hits * fade + hits
        self._won, self._squares = self._won + lead, self._squares + lead**2
        if self._won <= 0.0:
            self._won = self._squares = 0.0
        self._sampled, self._ends, self._batch, self._batch_gain = [], [], 0, 0


class _SmallCache:
    """What a policy would have cached."""

    def __init__(self, policy: Policy, rows: int, blocks: int) -> None:
        self._policy, self._blocks = policy, blocks
        self._here = np.zeros(rows, dtype=np.bool_)

    def serve(self, use: Use, ends: list[tuple[U32, Stop]]) -> int:
        """How many of these are cached; they are used, and answers ended, and what is too much goes."""
        here, policy = self._here, self._policy
        cached = here[use.rows]
        policy.use(replace(use, fresh=~cached))
        here[use.rows] = True
        for rows, stop in ends:
            policy.ended(np.unique(rows), stop)
        over = len(policy) - self._blocks
        if over > 0:
            here[policy.victims(over, use.now_s)] = False
        return int(np.count_nonzero(cached))


def _mixed(names: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = names + _ADDED
    mixed = (mixed ^ (mixed >> _FIRST_SHIFT)) * _FIRST_FACTOR
    found: NDArray[np.uint64] = (mixed ^ (mixed >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return found ^ (found >> np.uint64(31))
