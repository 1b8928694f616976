"""What may be written to storage when writing is dear: a daily budget for each path, and which blocks go first.

Everything is admitted while budget and queue are ample. As either runs short, a block that was used for the first time
is admitted only where it lies near the root of its chain, the nearer the shorter they are: what is shallow is shared by
more prompts. What was used again lately is admitted as long as anything is. A flush asks nobody.

Pure: time is told. Nothing is kept of a block but two counts of a sketch and the touch that was counted last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import U32, U64

__all__ = ["DAY_MS", "Admission", "Admitted", "TouchSketch", "WriteBudget"]

DAY_MS = 86_400_000
_DEPTH_SHARE = 4
_MIN_LEAD_BYTES = 16 << 20
_AMPLE = 0.5
"""Part of a budget, or of the queue, from which on it counts as ample."""
_SHALLOW_BLOCKS = 32
"""Blocks from the root that go first: 1,024 tokens at 32 a block, a system prompt."""
_AGAIN = 1.5
"""Count from which a block was used again: this time, and one before that has lost at most half of its weight."""
_HALF_LIFE_MS = 3_600_000
_SKETCH_CELLS = 1 << 17
_MAX_EXPONENT = 500.0
_UNBOUNDED = 1 << 62


class WriteBudget:
    """Bytes that one path may write in a day: in any 24 hours at most `day_bytes`, flushes apart.

    A bucket that holds a quarter of a day and takes in the other three quarters during one. It is kept as a debt, which
    shrinks with time. What is on disk of it (`promised`) runs ahead of the truth: only what was promised there may be
    spent, so a kill costs a part of the budget and never exceeds it.
    """

    __slots__ = (
        "_at_ms",
        "_debt",
        "_promised",
        "accepted_bytes",
        "day_bytes",
        "depth_bytes",
        "spent_bytes",
    )

    def __init__(self, day_bytes: int) -> None:
        """`day_bytes` 0: no bound."""
        self.day_bytes = day_bytes
        self.depth_bytes = day_bytes // _DEPTH_SHARE
        self._debt = 0.0
        self._promised = float(_UNBOUNDED)
        self._at_ms = 0
        self.accepted_bytes = 0
        """Of blocks that are on the path now or were, since this object was made."""
        self.spent_bytes = 0
        """All that was written for them, flushes included, also where there is no bound."""

    def restore(self, debt_bytes: int, at_ms: int, now_ms: int) -> None:
        """What was kept on disk; from now on only what is promised there may be spent."""
        self._at_ms = min(at_ms, now_ms)
        self._debt = self._promised = float(max(0, debt_bytes))
        self._pass(now_ms)

    @property
    def lead_bytes(self) -> int:
        """How far a promise goes beyond the truth: a sixteenth of the bucket, or what a few large blocks take."""
        return min(self.depth_bytes, max(self.depth_bytes // 16, _MIN_LEAD_BYTES))

    def to_promise(self, now_ms: int) -> int | None:
        """Debt to keep on disk now, for `promised`; None: what is there still leads."""
        self._pass(now_ms)
        if not self.day_bytes or self._promised - self._debt >= self.lead_bytes / 2:
            return None
        return round(self._debt) + self.lead_bytes

    def promised(self, debt_bytes: int, at_ms: int) -> None:
        """So much debt stands on disk, as of `at_ms`."""
        self._pass(at_ms)
        self._promised = max(0.0, debt_bytes - self._worked_off(self._at_ms - at_ms))

    def debt_bytes(self, now_ms: int) -> int:
        """What was written and has not been worked off."""
        self._pass(now_ms)
        return round(self._debt)

    def left_bytes(self, now_ms: int) -> int:
        """What may be written now; 0 while a flush has taken more than there was."""
        if not self.day_bytes:
            return _UNBOUNDED
        self._pass(now_ms)
        return max(0, int(min(self.depth_bytes, self._promised) - self._debt))

    def fullness(self, now_ms: int) -> float:
        """Part of the bucket that is left, 0 to 1."""
        if not self.day_bytes:
            return 1.0
        self._pass(now_ms)
        return max(0.0, 1.0 - self._debt / max(1, self.depth_bytes))

    def spend(self, now_ms: int, nbytes: int) -> None:
        """So much is being written; also more than is left, where a flush or the index wants it."""
        self.spent_bytes += nbytes
        if self.day_bytes:
            self._pass(now_ms)
            self._debt += nbytes

    def _pass(self, now_ms: int) -> None:
        """Time goes by; a clock that was set back stands still here."""
        gone_ms = max(0, now_ms - self._at_ms)
        self._at_ms = max(self._at_ms, now_ms)
        worked_off = self._worked_off(gone_ms)
        self._debt = max(0.0, self._debt - worked_off)
        if self._promised < _UNBOUNDED:
            self._promised = max(0.0, self._promised - worked_off)

    def _worked_off(self, gone_ms: int) -> float:
        return gone_ms * (self.day_bytes - self.depth_bytes) / DAY_MS


class TouchSketch:
    """How often blocks were used lately: counts that halve in an hour, in two rows of cells; the smaller is believed.

    A count-min sketch (Cormode and Muthukrishnan, 2005) under forward decay (Cormode and others, 2009): instead of
    shrinking all cells, what is added grows with time. Counts are never too small.
    """

    __slots__ = ("_cells", "_since_ms")

    def __init__(self) -> None:
        self._cells = np.zeros((2, _SKETCH_CELLS), dtype=np.float64)
        self._since_ms = -1

    def add(self, hashes: U64, now_ms: int) -> NDArray[np.float64]:
        """[n] counts of distinct blocks ([n, 2]), this use included. O(n)."""
        weight = self._weight(now_ms)
        first, second = self._places(hashes)
        np.add.at(self._cells[0], first, weight)
        np.add.at(self._cells[1], second, weight)
        counts: NDArray[np.float64] = np.minimum(self._cells[0, first], self._cells[1, second]) / weight
        return counts

    def counts(self, hashes: U64, now_ms: int) -> NDArray[np.float64]:
        """[n] counts as they are. O(n)."""
        first, second = self._places(hashes)
        counts: NDArray[np.float64] = np.minimum(self._cells[0, first], self._cells[1, second])
        return counts / self._weight(now_ms)

    def _places(self, hashes: U64) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        mask = np.uint64(_SKETCH_CELLS - 1)
        return (hashes[:, 0] & mask).astype(np.intp), (hashes[:, 1] & mask).astype(np.intp)

    def _weight(self, now_ms: int) -> float:
        if self._since_ms < 0:
            self._since_ms = now_ms
        exponent = max(0.0, (now_ms - self._since_ms) / _HALF_LIFE_MS)
        if exponent > _MAX_EXPONENT:  # before a double overflows
            self._cells *= 2.0 ** -min(exponent, 1000.0)
            self._since_ms, exponent = now_ms, 0.0
        return float(2.0**exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What was decided about blocks that want to be written."""

    chosen: NDArray[np.bool_]  # [n]
    refused: int
    """Of those that are not chosen, how many are refused for the first time since they were used."""
    by_budget: bool
    """Whether the budget, not the queue, is what runs short."""


class Admission:
    """Budgets of all paths, and the choice of what is written. One owner: the store."""

    __slots__ = ("_counted", "_rows", "_sketch", "budgets")

    def __init__(self, *, paths: int, rows: int, day_bytes: int) -> None:
        self.budgets = [WriteBudget(day_bytes) for _ in range(paths)]
        self._rows = rows
        self._sketch = (
            TouchSketch() if day_bytes else None
        )  # made late, or never, where only the queue runs short
        self._counted: U64 = np.zeros(rows if day_bytes else 0, dtype=np.uint64)

    def pressure(self, now_ms: int, paths: list[int], queued: int, places: int) -> tuple[float, bool]:
        """(how short writing is, 0 to 1; whether the budget is what is short). `paths`: those that take writes."""
        fullest = max((self.budgets[path].fullness(now_ms) for path in paths), default=1.0)
        by_budget = max(0.0, 1.0 - fullest / _AMPLE)
        by_queue = max(0.0, (queued / max(1, places) - _AMPLE) / (1.0 - _AMPLE))
        return min(1.0, max(by_budget, by_queue)), by_budget > by_queue

    def choose(
        self, rows: U32, hashes: U64, depths: U32, touches: U64, now_ms: int, pressure: tuple[float, bool]
    ) -> Admitted:
        """Which of these rows may be queued; each array [n]. O(n)."""
        short, by_budget = pressure
        if not short and self._sketch is None:
            return Admitted(chosen=np.ones(len(rows), dtype=np.bool_), refused=0, by_budget=False)
        again, news = self._count(rows, hashes, touches, now_ms)
        if not short:
            return Admitted(chosen=np.ones(len(rows), dtype=np.bool_), refused=0, by_budget=False)
        chosen: NDArray[np.bool_] = again | (depths < _SHALLOW_BLOCKS * (1.0 - short))
        return Admitted(chosen=chosen, refused=int(np.count_nonzero(news & ~chosen)), by_budget=by_budget)

    def _count(
        self, rows: U32, hashes: U64, touches: U64, now_ms: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """([n] used again lately, [n] used since it was counted last). Where there is a budget all are counted."""
        if self._sketch is None:
            self._sketch, self._counted = TouchSketch(), np.zeros(self._rows, dtype=np.uint64)
        news = self._counted[rows] != touches
        self._counted[rows] = touches
        counts = np.empty(len(rows), dtype=np.float64)
        counts[news] = self._sketch.add(hashes[news], now_ms)
        counts[~news] = self._sketch.counts(hashes[~news], now_ms)
        return counts >= _AGAIN, news
