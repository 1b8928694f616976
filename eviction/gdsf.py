"""GDSF: what is used often and dear to compute again stays, and what was not used for long loses its lead.

Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998: a block's
key is the clock plus uses × cost, and the clock is the key of what was evicted last. Blocks are all of one size; what
one costs grows with its depth, since each of its tokens attends to all before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Use
from eviction.class_log import Entries
from eviction.ranked import NO_PLAN, RankedPolicy

__all__ = ["GdsfPolicy"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_EVEN_DEPTH = 64
"""Blocks before a block whose attention costs as much as everything else: for blocks of 512 tokens 32,768 tokens, about
where that is for a model of 8 billion parameters."""
_CLASSES_AN_OCTAVE = 4  # values are rounded to a class's, by 9 % at most
_CLASSES = 96
_MOST_USES = 255
_HEADS = 64  # of each class are looked at to find a bound
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

    def _lowest(self, count: int, may_go: MayGo | None) -> tuple[Entries, F64]:
        logs = [(log, _VALUES[n]) for n, log in enumerate(self._logs) if log is not None and len(log)]
        if not logs:
            return NO_PLAN
        # Marks ascend within a class. So many of the least ranks are no higher than the highest of as many heads.
        heads = [log.first(_HEADS, self._stamp, may_go) for log, _ in logs]
        logs = [each for each, head in zip(logs, heads, strict=True) if len(head.rows)]
        heads = [head for head in heads if len(head.rows)]
        if not logs:
            return NO_PLAN
        of_heads = np.concatenate([head.marks + value for head, (_, value) in zip(heads, logs, strict=True)])
        if len(of_heads) >= count:
            highest = float(np.partition(of_heads, count - 1)[count - 1])
            parts = [
                log.up_to(highest - value, count, self._stamp, may_go, since=int(head.stamps[0]))
                for head, (log, value) in zip(heads, logs, strict=True)
            ]
        else:
            parts = [log.first(count, self._stamp, may_go) for log, _ in logs]
        ranks = np.concatenate([part.marks + value for part, (_, value) in zip(parts, logs, strict=True)])
        order = np.argsort(ranks, kind="stable")
        rows, stamps = (
            np.concatenate(columns) for columns in zip(*((p.rows, p.stamps) for p in parts), strict=True)
        )
        return Entries(rows=rows[order], stamps=stamps[order], marks=ranks[order]), ranks[order]

    def _left(self, ranks: F64) -> None:
        self._clock = max(self._clock, float(ranks.max()))
