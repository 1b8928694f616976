"""Free ids (rows, or slots of one class) given out in ascending runs.

Owns which ids of its ranges are free; whoever takes or gives says so here. Chains that are stored together so lie
together, which makes a match a comparison of contiguous rows and a disk read one request. Pure and volatile: after a
restart it is rebuilt from the state words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["FreeRuns"]

_RUN_SEARCH_MIN = 16
"""Below this many ids a search for a run costs more than it gives."""
_EMPTY: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)


class FreeRuns:
    """Free ids in a set of disjoint ranges. Every operation is vectorised; `take` costs O(one range) at most now and
    then, O(n) otherwise."""

    __slots__ = ("_at", "_bases", "_counts", "_free", "_ready", "_sizes")

    def __init__(self, free: NDArray[np.bool_]) -> None:
        """`free` is a bitmap over all ids, shared with other classes of the same pool."""
        self._free = free
        self._bases: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._sizes: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._counts: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._at = 0
        self._ready = _EMPTY

    def __len__(self) -> int:
        """Free ids."""
        return int(self._counts.sum())

    def is_free(self) -> NDArray[np.bool_]:
        """[all ids] the bitmap, not to be changed."""
        return self._free

    def add_range(self, base: int, size: int) -> None:
        """Ids [base, base + size) belong here from now on; the bitmap says which are free."""
        at = int(np.searchsorted(self._bases, base))
        count = int(np.count_nonzero(self._free[base : base + size]))
        self._bases = np.insert(self._bases, at, base)
        self._sizes = np.insert(self._sizes, at, size)
        self._counts = np.insert(self._counts, at, count)
        self._at, self._ready = at, _EMPTY

    def remove_range(self, base: int) -> None:
        """The range that starts at `base` belongs here no more."""
        at = int(np.searchsorted(self._bases, base))
        self._bases = np.delete(self._bases, at)
        self._sizes = np.delete(self._sizes, at)
        self._counts = np.delete(self._counts, at)
        self._at, self._ready = 0, _EMPTY

    def spans(self) -> list[tuple[int, int]]:
        """As `ranges`, of the ranges alone that have an id that is not free."""
        used = self._counts < self._sizes
        return list(zip(self._bases[used].tolist(), self._sizes[used].tolist(), strict=True))

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges as (base, size), ascending, neighbours merged."""
        merged: list[tuple[int, int]] = []
        for base, size in zip(self._bases.tolist(), self._sizes.tolist(), strict=True):
            if merged and merged[-1][0] + merged[-1][1] == base:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((base, size))
        return merged

    def take(self, count: int) -> NDArray[np.uint32]:
        """Up to `count` ids, fewer only where no more are free; one run where there is a range with such a run."""
        count = min(count, len(self))
        parts: list[NDArray[np.uint32]] = []
        while count > 0:
            if not len(self._ready):
                self._advance()
            part = self._pick(count)
            self._free[part] = False
            self._counts[self._at] -= len(part)
            parts.append(part)
            count -= len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else _EMPTY

    def give(self, ids: NDArray[np.uint32]) -> None:
        """These ids, all of ranges here and none of them free, are free again."""
        if not len(ids):
            return
        self._free[ids] = True
        at = np.searchsorted(self._bases, ids, side="right") - 1
        self._counts += np.bincount(at, minlength=len(self._counts))

    def claim(self, ids: NDArray[np.uint32]) -> None:
        """These ids, all free, are taken."""
        self._free[ids] = False
        at = np.searchsorted(self._bases, ids, side="right") - 1
        self._counts -= np.bincount(at, minlength=len(self._counts))
        self._ready = _EMPTY

    def take_runs(self, count: int, *, least: int) -> list[tuple[int, int]]:
        """Up to `count` ids as runs (first id, ids) of at least `least`, or of all it wants; the last range first.

        Whoever wants many at a time, and does not mind getting fewer. O(ids of the ranges looked at).
        """
        runs: list[tuple[int, int]] = []
        for at in reversed(range(len(self._bases))):
            base, size = int(self._bases[at]), int(self._sizes[at])
            for first, length in self._runs_of(at, base, size, max(1, min(least, count))):
                first, length = max(first, first + length - count), min(length, count)
                if not length:
                    break
                self._free[first : first + length] = False
                self._counts[at] -= length
                count -= length
                if runs and runs[-1][0] == first + length:
                    runs[-1] = (first, length + runs[-1][1])
                else:
                    runs.append((first, length))
        self._ready = _EMPTY
        return runs[::-1]

    def _runs_of(self, at: int, base: int, size: int, least: int) -> list[tuple[int, int]]:
        """Free runs of one range, the last first."""
        if self._counts[at] == size:
            return [(base, size)]
        if self._counts[at] < least:
            return []
        edges = np.flatnonzero(np.diff(self._free[base : base + size], prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        long = ends - starts >= least
        pairs = zip((starts[long] + base).tolist(), (ends - starts)[long].tolist(), strict=True)
        return list(pairs)[::-1]

    def _advance(self) -> None:
        """Goes on to the next range with a free id; there is one."""
        order = np.roll(self._counts, -(self._at + 1))
        self._at = (self._at + 1 + int((order > 0).argmax())) % len(self._counts)
        base, size = int(self._bases[self._at]), int(self._sizes[self._at])
        self._ready = (np.flatnonzero(self._free[base : base + size]) + base).astype(np.uint32)

    def _pick(self, count: int) -> NDArray[np.uint32]:
        """Takes up to `count` of the ids at hand: the first run that is long enough, else the first ids."""
        ready = self._ready
        if (
            count < _RUN_SEARCH_MIN
            or count >= len(ready)
            or int(ready[count - 1]) - int(ready[0]) == count - 1
        ):
            self._ready = ready[count:]
            return ready[:count]
        breaks = np.flatnonzero(np.diff(ready) != 1) + 1
        starts = np.concatenate(([0], breaks))
        lengths = np.diff(np.concatenate((starts, [len(ready)])))
        fits = lengths >= count
        start = int(starts[fits.argmax()]) if fits.any() else 0
        self._ready = np.concatenate((ready[:start], ready[start + count :]))
        return ready[start : start + count]
