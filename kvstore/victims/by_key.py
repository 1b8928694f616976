"""Victims of a class by the store's own key: (last use, −depth), behind that what should go later.

In a large class only the windows are searched where a sample of the whole class finds old blocks: the cost of a search
does not grow with the tier, and the order is LRU up to the sample's error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, Columns, SlotState, Tier
from kvstore.moves import U32, U64
from kvstore.state import NO_SLOTS, StoreState
from kvstore.tables.slots import ClassKey, SlotClass, SlotPool

__all__ = ["ONLY_COPY_MS", "ByKey", "Chosen", "kept", "lower", "unheld"]

Evictable = Callable[[SlotPool, U32], NDArray[np.bool_]]
"""[n] whether each slot may be a victim now."""

ONLY_COPY_MS = 300_000
_ONLY_COPY_KEY = np.uint64(ONLY_COPY_MS << 20)
"""A block that no lower tier has counts as used five minutes later than it was: what is lower too goes first, and
stale blocks that were never written down still go in the end."""
_SMALL_CLASS_SLOTS = 1 << 15  # searched as a whole
_WINDOW_SLOTS = 1 << 13
_WIDE_WINDOW_SLOTS = 1 << 16
_MAX_WINDOWS = 4  # searched at once where anything is found: 0.2 ms each
_SAMPLE_SLOTS = 4096
_FEWEST_SAMPLED = 16  # of fewer nothing is known, and a search by windows finds a handful at a time
_KNOWN = np.uint64(1 << 61)  # above every touch key until 2039, below what is retained
_STATE_BITS = np.uint64(0xFF)


@dataclass(slots=True)
class Chosen:
    """Victims chosen ahead, in order, as they were then."""

    slots: U32
    touches: U64
    kept: NDArray[np.bool_]
    """Whether each was `kept` then: what is kept only since is no victim of this choice."""

    def keep(self, which: slice | NDArray[np.bool_]) -> None:
        """The others are used up."""
        self.slots, self.touches, self.kept = self.slots[which], self.touches[which], self.kept[which]


class ByKey:
    """Looks for victims; changes nothing."""

    __slots__ = ("_evictable", "_hand", "_state", "_stopped")

    def __init__(self, state: StoreState, evictable: Evictable) -> None:
        self._state = state
        self._evictable = evictable
        self._hand: Counter[tuple[Tier, ClassKey]] = Counter()
        self._stopped: Counter[tuple[Tier, ClassKey]] = Counter()

    def choose(self, pool: SlotPool, owner: SlotClass, count: int, among: U32 | None = None) -> Chosen:
        """About `count` victims of a class, fewer where they lie scattered; none only where none may go.

        `among`: slots of the tier, of whatever class, beside which none may go.
        """
        if among is not None:
            return self._best(pool, among[self._of_class(owner)[pool.extent[among]]], count)
        ranges = owner.free.ranges()
        if owner.slots <= _SMALL_CLASS_SLOTS:
            return self._best(pool, _slots_of(ranges, 0, 1), count)
        found = self._oldest(pool, owner, ranges, count)
        if not len(found):  # hardly a block of the sample may go
            found = self._any(pool, owner, count)
        return self._best(pool, found, count)

    def _oldest(self, pool: SlotPool, owner: SlotClass, ranges: list[tuple[int, int]], count: int) -> U32:
        """Evictable slots of a large class, of those that go first: about `count`, fewer where they lie scattered; none
        where nearly none may go.

        A sample of the whole class says below which key twice as many lie, or a 32nd of all, and where: chains are
        stored together, so what is old lies in few windows, and only those are searched.
        """
        stride = max(1, owner.slots // _SAMPLE_SLOTS)
        self._hand[pool.tier, owner.key] += 1
        sample = _slots_of(ranges, self._hand[pool.tier, owner.key] % stride, stride)
        sample = sample[self._evictable(pool, sample)]
        if len(sample) < _FEWEST_SAMPLED:
            return NO_SLOTS
        keys = self._keys(pool, sample)
        rank = min(max(-(-2 * count // stride), len(keys) // 32), len(keys) - 1)
        threshold = np.partition(keys, rank)[rank]
        windows, hits = np.unique(sample[keys <= threshold] // _WINDOW_SLOTS, return_counts=True)
        parts: list[U32] = []
        found = 0
        for searched, window in enumerate(windows[np.argsort(-hits, kind="stable")].tolist(), start=1):
            parts.append(self._below(pool, owner, window * _WINDOW_SLOTS, threshold))
            found += len(parts[-1])
            if found >= count or (found and searched >= _MAX_WINDOWS):
                break
        return np.concatenate(parts)

    def _below(self, pool: SlotPool, owner: SlotClass, low: int, threshold: np.uint64) -> U32:
        """Evictable slots of one window with keys up to `threshold`."""
        slots = unheld(pool, low, low + _WINDOW_SLOTS)
        slots = slots[self._state.columns.touch.take(pool.row.take(slots)) <= threshold]
        slots = slots[self._of_class(owner).take(pool.extent.take(slots))]
        slots = slots[self._evictable(pool, slots)]
        below: U32 = slots[self._keys(pool, slots) <= threshold]
        return below

    def _any(self, pool: SlotPool, owner: SlotClass, count: int) -> U32:
        """About `count` evictable slots of a large class of which a sample hits hardly any, from where the last look
        stopped; none only where none may go.

        Nearly all are held then, which is seen a window at once: 3 ms for a million.
        """
        of_class, name = self._of_class(owner), (pool.tier, owner.key)
        windows = -(-len(pool) // _WIDE_WINDOW_SLOTS)
        begin = self._stopped[name]
        parts: list[U32] = [NO_SLOTS]
        found = asked = 0
        for window in range(begin, begin + windows):
            low = window % windows * _WIDE_WINDOW_SLOTS
            slots = unheld(pool, low, low + _WIDE_WINDOW_SLOTS)
            slots = slots[of_class.take(pool.extent.take(slots))]
            asked += len(slots)
            parts.append(slots[self._evictable(pool, slots)][:_WINDOW_SLOTS])
            found += len(parts[-1])
            if found >= count or (found and asked >= _WINDOW_SLOTS):
                self._stopped[name] = window % windows
                break
        return np.concatenate(parts)

    def _of_class(self, owner: SlotClass) -> NDArray[np.bool_]:
        """[extents] whether each is of the class."""
        of_class = np.zeros(len(self._state.columns.extent_state), dtype=np.bool_)
        of_class[owner.extents] = True
        return of_class

    def _best(self, pool: SlotPool, slots: U32, count: int) -> Chosen:
        """What the policy takes of these slots."""
        eligible = self._evictable(pool, slots)
        keys = np.zeros(len(slots), dtype=np.uint64)
        keys[eligible] = self._keys(pool, slots[eligible])
        best = slots[self._state.policy.victims(keys, eligible, count)]
        rows = pool.row.take(best)
        return Chosen(best, self._state.columns.touch.take(rows), kept(self._state, rows))

    def _keys(self, pool: SlotPool, slots: U32) -> U64:
        """[n] eviction keys of SEALED slots."""
        rows = pool.row.take(slots)
        columns = self._state.columns
        keys: U64 = columns.touch.take(rows)
        ranking = self._state.rankings.get(pool.tier)
        if ranking is not None:
            keys[ranking.knows(rows)] |= _KNOWN
        self._state.retention.raise_keys(keys, rows, self._state.now_ms)
        self._state.queued.raise_keys(keys, rows, columns.depth)
        if pool.tier is Tier.NVME:
            return keys
        only = ~lower(self._state.columns, pool.tier, rows)
        keys[only] += _ONLY_COPY_KEY
        return keys

    def still_good(self, pool: SlotPool, chosen: Chosen, count: int) -> NDArray[np.bool_]:
        """[count, or fewer] whether the next victims are as they were when they were chosen."""
        slots, state = chosen.slots[:count], self._state
        good = self._evictable(pool, slots)
        rows = pool.row.take(slots[good])
        same = state.columns.touch.take(rows) == chosen.touches[:count][good]
        good[good] = same & (~kept(state, rows) | chosen.kept[:count][good])
        return good


def kept(state: StoreState, rows: U32) -> NDArray[np.bool_]:
    """[n] whether a queued request wants each block, or an engine had it retained: it goes after all others."""
    wanted: NDArray[np.bool_] = state.queued.wanted.take(rows) > 0
    return wanted | state.retention.holds(rows, state.now_ms)


def lower(columns: Columns, tier: Tier, rows: U32) -> NDArray[np.bool_]:
    """[n] whether a lower tier has each block as well."""
    found: NDArray[np.bool_] = columns.nvme.take(rows) != NONE
    if tier is Tier.HBM:
        found |= columns.dram.take(rows) != NONE
    return found


def unheld(pool: SlotPool, low: int, high: int) -> U32:
    """Complete slots of a range that nobody holds."""
    good = (pool.state[low:high] & _STATE_BITS) == np.uint64(SlotState.SEALED)
    if len(pool.holders):
        good &= pool.holders[low:high] == 0
    return (np.flatnonzero(good) + low).astype(np.uint32)


def _slots_of(ranges: list[tuple[int, int]], offset: int, stride: int) -> U32:
    """Every `stride`-th slot of ranges (base, size), beginning at `offset`."""
    parts = [np.arange(base + offset, base + size, stride, dtype=np.uint32) for base, size in ranges]
    return np.concatenate(parts) if parts else NO_SLOTS
