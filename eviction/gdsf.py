"""GDSF: what is used often and dear to compute again stays, and what was not used for long loses its lead.

Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998: a block's
key is the clock plus uses × cost, and the clock is the key of what was evicted last. Blocks are all of one size; what
one costs grows with its depth, since each of its tokens attends to all before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import Rows, Use
from eviction.ranked import Entries, RankedPolicy

__all__ = ["GdsfPolicy"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_EVEN_DEPTH = 64
"""Blocks before a block whose attention costs as much as everything else: for blocks of 512 tokens 32,768 tokens, about
where that is for a model of 8 billion parameters."""
_CLASSES_AN_OCTAVE = 4  # values are rounded to a class's, by 9 % at most
_CLASSES = 96
_MOST_USES = 255
_VALUES: F64 = 2.0 ** (np.arange(_CLASSES) / _CLASSES_AN_OCTAVE)


class GdsfPolicy(RankedPolicy):
    """Implements Policy."""

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        super().__init__(rows=rows, capacity_blocks=capacity_blocks, classes=_CLASSES)
        self._uses = np.zeros(rows, dtype=np.uint8)
        self._clock = 0.0

    def _classify(self, use: Use) -> I64:
        before = np.where(use.fresh, 0, self._uses[use.rows]).astype(np.int64)
        uses = np.minimum(before + 1, _MOST_USES)
        self._uses[use.rows] = uses
        value = uses * (1.0 + use.depths / _EVEN_DEPTH)
        classes: I64 = np.minimum(np.rint(np.log2(value) * _CLASSES_AN_OCTAVE), _CLASSES - 1).astype(np.int64)
        return classes

    def _mark(self) -> float:
        return self._clock

    def _young_ranks(self, classes: I64, uses: I64, marks: F64) -> F64:
        found: F64 = _VALUES[classes] + marks[uses]
        return found

    def _lowest(self, count: int) -> tuple[Entries, F64]:
        rows: list[Rows] = [np.empty(0, dtype=np.uint32)]
        stamps: list[I64] = [np.empty(0, dtype=np.int64)]
        ranks: list[F64] = [np.empty(0)]
        for number, log in enumerate(self._logs):
            if log is not None and len(log):
                entries = log.first(
                    count, self._stamp
                )  # marks ascend, so no later one of the class goes before
                rows.append(entries.rows)
                stamps.append(entries.stamps)
                ranks.append(entries.marks + _VALUES[number])
        of_all = np.concatenate(ranks)
        if len(of_all) > count:
            order = np.argpartition(of_all, count)[: count + 1]
            order = order[np.argsort(of_all[order], kind="stable")]
        else:
            order = np.argsort(of_all, kind="stable")
        entries = Entries(
            rows=np.concatenate(rows)[order], stamps=np.concatenate(stamps)[order], marks=of_all[order]
        )
        return entries, entries.marks

    def _left(self, ranks: F64) -> None:
        self._clock = max(self._clock, float(ranks.max()))
