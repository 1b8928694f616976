"""Small caches beside the real one, which see a fixed sample of its blocks: how often would another policy have hit?

A block is in the sample by its name alone, in all shadows alike, and a shadow holds the sampled share of the capacity,
so its hit rate estimates that of a whole cache (Waldspurger, Saemundsson, Ahmad, Park, "Cache modeling and optimization
using miniature simulations", ATC 2017). It holds no block, only what its policy knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eviction.base import Policy, PolicyFactory, Stop, Use

__all__ = ["SHADOW_BLOCKS", "Lead", "Shadows"]

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
SHADOW_BLOCKS = 128
"""At least so many hold the share of a few requests."""
_MOST_HALVINGS = 8
_ROWS_A_BLOCK = (
    64  # blocks that share a shadow's row are taken for one: so that is rare, and alike in all shadows
)
_FEWEST_ROWS = 1 << 16
_BATCH_SHARE = (
    4  # of a shadow's blocks are used together: requests in a batch are one use, which costs some order
)
_SAMPLED_AT_ONCE = 1 << 12  # blocks: a quarter of a large cache would make one use late
_HALF_LIFE_BLOCKS = 8192.0
_REFERENCE = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """How much more often a candidate hit than the cache."""

    share: float
    """Of the sampled blocks, the older the less."""
    deviations: float
    """`share` in standard deviations of it."""
    blocks: float
    """Of the whole cache, since the candidate stood worst."""


class Shadows:
    """One small cache a candidate, and how often each hit lately.

    Each is compared with LRU in the same sample: what the whole cache hit more than LRU is known without one (`floor`).
    """

    def __init__(
        self, candidates: dict[str, PolicyFactory], capacity_blocks: int, *, blocks: int = SHADOW_BLOCKS
    ) -> None:
        """`candidates` has `lru`. Of a larger cache each shadow holds some `blocks`, of a smaller one all."""
        halvings = max(capacity_blocks // blocks, 1).bit_length() - 1
        halvings = min(halvings, _MOST_HALVINGS)
        self._unsampled = np.uint64((1 << halvings) - 1)
        self._shift = np.uint64(halvings)
        self._scale = float(1 << halvings)
        self._blocks = max(capacity_blocks >> halvings, 1)
        self._size = 1 << max(_ROWS_A_BLOCK * self._blocks, _FEWEST_ROWS).bit_length()
        self._policies: dict[str, Policy] = {
            name: made(rows=self._size, capacity_blocks=self._blocks) for name, made in candidates.items()
        }
        self._here: dict[str, NDArray[np.bool_]] = {
            name: np.zeros(self._size, dtype=np.bool_) for name in candidates
        }
        self._names: list[NDArray[np.uint64]] = []
        self._depths: list[NDArray[np.uint32]] = []
        self._ends: list[tuple[NDArray[np.uint32], Stop]] = []
        self._sampled: list[
            tuple[NDArray[np.uint32], NDArray[np.uint32]]
        ] = []  # rows and depths, the last use first
        self._batch = self._batch_gain = self._unsampled_blocks = 0
        self._batch_blocks = max((self._blocks << halvings) // _BATCH_SHARE, 1)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another policy is followed from now on: what was counted beside the last one counts no more."""
        self.seen = 0.0
        """Sampled blocks, the older the less."""
        self.gain = 0.0
        """Of these, what the cache hit more than LRU would have."""
        self.hits = dict.fromkeys(self._policies, 0.0)
        self._squares = dict.fromkeys(self._policies, 0.0)  # of the leads, batch by batch
        self._won = dict.fromkeys(self._policies, 0.0)

    def use(self, use: Use, gain: int) -> bool:
        """Whether there is something new in `hits`. `gain`: blocks that the cache hit more than LRU would have."""
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

    def lead(self, name: str) -> Lead:
        """Of a candidate over the cache."""
        hits = self.hits[name] - self.hits[_REFERENCE] - self.gain
        return Lead(
            share=hits / max(self.seen, 1.0),
            deviations=hits / max(self._squares[name], 1.0) ** 0.5,
            blocks=self._won[name],
        )

    def _row_of(self, mixed: NDArray[np.uint64]) -> NDArray[np.uint32]:
        return ((mixed >> self._shift) & np.uint64(self._size - 1)).astype(np.uint32)

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
        rows, depths = rows[last], depths[last]
        fade = 0.5 ** (n / _HALF_LIFE_BLOCKS)
        self.seen = self.seen * fade + n
        names, gain = rows.astype(np.uint64), self._batch_gain / self._scale
        self.gain = self.gain * fade + gain
        hits = dict[str, float]()
        for name, policy in self._policies.items():
            here = self._here[name]
            cached = here[rows]
            hits[name] = float(np.count_nonzero(cached) + n - len(rows))
            policy.use(replace(use, rows=rows, fresh=~cached, names=names, depths=depths))
            here[rows] = True
            for ended, stop in self._ends:
                policy.ended(np.unique(ended), stop)
            over = len(policy) - self._blocks
            if over > 0:
                here[policy.victims(over, use.now_s)] = False
        for name in self._policies:
            lead = hits[name] - hits[_REFERENCE] - gain
            self.hits[name] = self.hits[name] * fade + hits[name]
            self._squares[name] = self._squares[name] * fade + lead**2
            self._won[name] = max(self._won[name] + lead * self._scale, 0.0)
        self._sampled, self._ends, self._batch, self._batch_gain = [], [], 0, 0


def _mixed(names: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = names + _ADDED
    mixed = (mixed ^ (mixed >> _FIRST_SHIFT)) * _FIRST_FACTOR
    found: NDArray[np.uint64] = (mixed ^ (mixed >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return found ^ (found >> np.uint64(31))
