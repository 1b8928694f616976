"""Reuse-hazard classes: the block that can be expected to give the fewest hits for its time in the cache goes first.

What is known of a block when it was used says how soon it may be used again: how often it was used by now, how long
ago the last time was, and why the answer ended. How much each says is learned online (`reuse_ages`), from blocks that
are cached and from those that no longer are.

Two models look at the same lives, one by the count of uses, one by the last gap and the stop reason; the hazard is
the mean of their log odds. One table of all three would have too few lives in most of its classes; one
model alone is the better one on one kind of load, and the mean is about as good as the better one on each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows, Stop, Use
from eviction.class_log import Entries
from eviction.names import NOWHERE, Names
from eviction.ranked import NO_PLAN, RankedPolicy
from eviction.reuse_ages import BUCKETS, ReuseAges, age_buckets, age_cuts

__all__ = ["HazardPolicy"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_MOST_USES = 6  # and more
_GAP_BUCKETS = 4  # age buckets in a class of gaps: two octaves
_NO_GAP = BUCKETS // _GAP_BUCKETS  # used once
_GAPS = _NO_GAP + 1
_STOPS = len(Stop)
_CLASSES = _MOST_USES * _GAPS * _STOPS
_REMEMBERED = 8  # times the capacity: blocks that left stay known, and lives stay open
_FEWEST_REMEMBERED = 1 << 16
_REFRESH_LIVES = 4096
_REFRESH_USES = 32  # a refresh takes some milliseconds
_FEWEST_SEARCHED = 4096


class HazardPolicy(RankedPolicy):
    """Implements Policy."""

    def __init__(self, *, rows: int, capacity_blocks: int, teacher: HazardPolicy | None = None) -> None:
        """With a `teacher` it learns nothing itself and believes what that has learned: a shadow sees too little."""
        super().__init__(rows=rows, capacity_blocks=capacity_blocks, classes=_CLASSES)
        remembered = max(_REMEMBERED * capacity_blocks, _FEWEST_REMEMBERED)
        self._names = Names(max(rows, remembered))
        places = len(self._names)
        self._life = np.zeros(
            places, dtype=np.int64
        )  # [places] one more than the open life of what is named there
        self._uses = np.zeros(places, dtype=np.uint8)  # [places] so far, at most _MOST_USES - 1
        self._life_of = np.zeros(rows, dtype=np.int64)  # [rows] open life of the last use
        self._ages = ReuseAges((_MOST_USES, _GAPS * _STOPS), remembered)
        self._refresh_at = self._uses_to_refresh = 0
        self.places: I64 = np.empty(0, dtype=np.int64)
        """[n] of the blocks of the last use, where this keeps what it knows of them by name; NOWHERE: nowhere."""
        self.known: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        """[n] whether it knew them before that use."""
        self._teacher = self if teacher is None else teacher

    @property
    def most_places(self) -> int:
        """All `places` are below it."""
        return len(self._names)

    def find(self, names: NDArray[np.uint64]) -> I64:
        """[n] as `places`, of any names."""
        return self._names.find(names)

    @property
    def lives(self) -> int:
        """Uses of blocks that it has been told of so far."""
        return self._ages.lives

    @property
    def worth(self) -> F64:
        """[class, age bucket] hits a second of a slot."""
        return self._ages.worth

    def _classify(self, use: Use) -> I64:
        places = self._names.find(use.names)
        n, fresh_class = len(places), _NO_GAP * _STOPS + int(use.stop)
        self.places, self.known = places, places != NOWHERE
        all_known = bool(self.known.all())
        old = places if all_known else places[self.known]
        uses = self._uses[old]  # before this one
        ages = self._ages.end(self._life[old] - 1, use.now_s)
        gaps = np.minimum(age_buckets(ages) // _GAP_BUCKETS, _NO_GAP)
        classes: I64 = (uses * np.int64(_GAPS) + gaps) * _STOPS + int(use.stop)
        if not all_known:
            of_known, classes = classes, np.full(n, fresh_class)
            classes[self.known] = of_known
        first = self._ages.begin(classes, use.now_s)
        lives = np.arange(first, first + n)
        self._life_of[use.rows] = lives
        self._uses[old] = np.minimum(uses + 1, _MOST_USES - 1)
        # First, so that none of these has to make way.
        self._life[old] = (lives if all_known else lives[self.known]) + 1
        if not all_known:
            self._name_new(use.names, places, lives)
        self._uses_to_refresh -= 1
        if self._teacher is self and self._ages.lives >= self._refresh_at and self._uses_to_refresh <= 0:
            self._ages.refresh(use.now_s)
            self._uses_to_refresh = _REFRESH_USES
            # Often at first, when every life teaches much.
            self._refresh_at = self._ages.lives + min(_REFRESH_LIVES, 256 + self._ages.lives // 4)
        return classes

    def _name_new(self, names: NDArray[np.uint64], places: I64, lives: I64) -> None:
        """Names that have no place get one; those that they push out are no longer followed."""
        new = (~self.known).nonzero()[0]
        places[new] = put = self._names.put(names[new], self._life)
        lives = lives[new]
        if (nowhere := put == NOWHERE).any():
            self._ages.forget(lives[nowhere])
            put, lives = put[~nowhere], lives[~nowhere]
        pushed_out = self._life[put]
        if (pushed_out := pushed_out[pushed_out > 0]).size:
            self._ages.forget(pushed_out - 1)
        self._uses[put] = 1
        self._life[put] = lives + 1

    def _ended(self, rows: Rows, stop: Stop) -> None:
        """Their lives, and they, are of the classes of that reason from now on."""
        lives = self._life_of[rows]
        old = self._ages.classes(lives)
        classes = old // _STOPS * _STOPS + int(stop)
        changed = classes != old
        rows, classes = rows[changed], classes[changed]
        if len(rows):
            self._ages.relabel(lives[changed], classes)
            self._enter(rows[::-1], classes[::-1])

    def _mark(self) -> float:
        return self._now_s

    def _young_ranks(self, classes: I64, uses: I64, marks: F64) -> F64:
        buckets = age_buckets(self._now_s - marks)
        found: F64 = self._teacher.worth.reshape(-1).take(classes * BUCKETS + buckets.take(uses))
        return found

    def _lowest(self, count: int, may_go: MayGo | None) -> tuple[Entries, F64]:
        parts: list[Entries] = []
        cuts: list[I64] = []
        numbers: list[int] = []
        for number, log in enumerate(self._logs):
            for entries in log.parts() if log is not None else ():
                parts.append(entries)
                cuts.append(age_cuts(entries.marks, self._now_s))
                numbers.append(number)
        if not parts:
            return NO_PLAN
        edges = np.array(cuts)  # [logs, BUCKETS + 1] of each bucket the first entry, from the oldest bucket's
        low, high = edges[:, 1:], edges[:, :-1]
        which, bucket = np.nonzero(low < high)
        ranks = self._teacher.worth[np.array(numbers)[which], bucket]
        order = np.argsort(ranks, kind="stable")
        which, bucket = which[order], bucket[order]
        bounds = np.stack((low[which, bucket], high[which, bucket]), axis=1)
        return self._of_segments([parts[w] for w in which.tolist()], bounds, ranks[order], count, may_go)

    def _of_segments(
        self, logs: list[Entries], bounds: I64, ranks: F64, count: int, may_go: MayGo | None
    ) -> tuple[Entries, F64]:
        """The live entries of the first segments that may go, until there are `count`."""
        rows: list[Rows] = [np.empty(0, dtype=np.uint32)]
        stamps: list[I64] = [np.empty(0, dtype=np.int64)]
        of_rank: list[F64] = [np.empty(0)]
        widths = bounds[:, 1] - bounds[:, 0]
        reach, at, width = np.cumsum(widths), 0, max(2 * count, _FEWEST_SEARCHED)
        while count > 0 and at < len(logs):
            stop = int(np.searchsorted(reach, (reach[at - 1] if at else 0) + width)) + 1
            pieces = list(zip(logs[at:stop], bounds[at:stop].tolist(), strict=True))
            part = np.concatenate([entries.rows[low:high] for entries, (low, high) in pieces])
            their = np.concatenate([entries.stamps[low:high] for entries, (low, high) in pieces])
            live = np.flatnonzero(self._stamp[part] == their)
            if may_go is not None:
                live = live[may_go(part[live])]
            rows.append(part[live])
            stamps.append(their[live])
            of_rank.append(np.repeat(ranks[at:stop], widths[at:stop])[live])
            count -= len(live)
            at = stop
            if may_go is not None:  # much may lie before any that may go
                width *= 2
        found = np.concatenate(of_rank)
        return Entries(rows=np.concatenate(rows), stamps=np.concatenate(stamps), marks=found), found

    def _left(self, ranks: F64) -> None:
        """Nothing: what left keeps its name and its life."""
