"""Entries of one class in the order of their use, in segments, so that no call pays for the whole log at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo, Rows

__all__ = ["NO_ENTRIES", "ClassLog", "Entries"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_FEWEST_SEGMENT = 1 << 8
_MOST_SEGMENT = 1 << 15
_TIDIED = 3  # pairs of neighbours that are looked at when a segment is begun: dead entries are found sooner than made


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Blocks with what they are ranked by, [n] each."""

    rows: Rows
    stamps: I64  # serial number of the use
    marks: F64  # of the use: a time, or whatever a policy ranks by; ascends with the stamps

    def picked(self, places: I64 | slice) -> Entries:
        """Those alone."""
        return Entries(rows=self.rows[places], stamps=self.stamps[places], marks=self.marks[places])

    def live(self, alive: I64) -> I64:
        """Places of those that count. `alive`: [rows] the stamp of each row that counts."""
        return np.flatnonzero(alive[self.rows] == self.stamps)

    def of_those(self, places: I64, may_go: MayGo | None) -> I64:
        """Those places whose blocks may go."""
        return places if may_go is None else places[may_go(self.rows[places])]


class _Segment:
    __slots__ = ("columns", "end", "start")

    def __init__(self, size: int) -> None:
        self.columns = Entries(
            rows=np.empty(size, dtype=np.uint32),
            stamps=np.empty(size, dtype=np.int64),
            marks=np.empty(size, dtype=np.float64),
        )
        self.start = 0  # all before it are dead
        self.end = 0

    def entries(self) -> Entries:
        return self.columns.picked(slice(self.start, self.end))


class ClassLog:
    """Entries of blocks used since, or gone, are dead."""

    __slots__ = ("_hand", "_segments")

    def __init__(self) -> None:
        self._segments = [_Segment(_FEWEST_SEGMENT)]
        self._hand = 0  # where the next look for dead entries begins

    def __len__(self) -> int:
        return sum(segment.end - segment.start for segment in self._segments)

    def append(self, entries: Entries, alive: I64) -> None:
        """Amortised O(n). `alive`: [rows] the stamp of each row that counts."""
        at, n = 0, len(entries.rows)
        while at < n:
            last = self._segments[-1]
            many = min(n - at, len(last.columns.rows) - last.end)
            if not many:
                self._begin_segment(alive)
                continue
            where, what = slice(last.end, last.end + many), slice(at, at + many)
            last.columns.rows[where] = entries.rows[what]
            last.columns.stamps[where] = entries.stamps[what]
            last.columns.marks[where] = entries.marks[what]
            last.end += many
            at += many

    def parts(self) -> Iterator[Entries]:
        """All, dead ones too, as views; marks and stamps ascend, from one to the next as well."""
        return (segment.entries() for segment in self._segments if segment.end > segment.start)

    def first(self, count: int, alive: I64, may_go: MayGo | None = None) -> Entries:
        """The oldest `count` live entries that may go, or all. O(count and what is between them); the dead before them
        but once."""
        found: list[Entries] = []
        at, width = 0, 2 * count
        while count > 0 and at < len(self._segments):
            segment = self._segments[at]
            position = segment.start
            while count > 0 and position < segment.end:
                entries = segment.columns.picked(slice(position, min(position + width, segment.end)))
                live = entries.live(alive)
                if position == segment.start:
                    segment.start += int(live[0]) if len(live) else len(entries.rows)
                live = entries.of_those(live, may_go)[:count]
                found.append(entries.picked(live))
                count -= len(live)
                position += len(entries.rows)
                width *= 4
            if segment.start == segment.end and segment is not self._segments[-1]:
                self._drop(at)
            else:
                at += 1
        return _joined(found)

    def up_to(
        self, mark: float, most: int, alive: I64, may_go: MayGo | None = None, since: int = 0
    ) -> Entries:
        """The oldest `most` live entries that may go, with marks up to this one, or a rounding error less.

        None with a stamp below `since` is looked at.
        """
        found: list[Entries] = []
        bound = np.nextafter(mark, np.inf)
        for entries in self.parts():
            if most <= 0 or entries.marks[0] > bound:
                break
            if entries.stamps[-1] < since:
                continue
            low = int(np.searchsorted(entries.stamps, since))
            below = entries.picked(slice(low, int(np.searchsorted(entries.marks, bound, side="right"))))
            found.append(below.picked(below.of_those(below.live(alive), may_go)[:most]))
            most -= len(found[-1].rows)
        return _joined(found)

    def _begin_segment(self, alive: I64) -> None:
        for _ in range(_TIDIED):
            self._tidy(alive)
        size = min(max(2 * len(self._segments[-1].columns.rows), _FEWEST_SEGMENT), _MOST_SEGMENT)
        self._segments.append(_Segment(size))

    def _drop(self, at: int) -> None:
        del self._segments[at]
        if self._hand > at:
            self._hand -= 1

    def _tidy(self, alive: I64) -> None:
        """A look at the next two neighbours: they become one where their entries that count fit into half of one."""
        if self._hand + 1 >= len(self._segments):
            self._hand = 0
            if len(self._segments) < 2:
                return
        one, other = self._segments[self._hand : self._hand + 2]
        parts = [entries.picked(entries.live(alive)) for entries in (one.entries(), other.entries())]
        count = sum(len(part.rows) for part in parts)
        if count > _MOST_SEGMENT // 2:
            self._hand += 1
            return
        one.columns, one.start, one.end = _joined(parts), 0, count
        self._drop(self._hand + 1)


def _joined(parts: list[Entries]) -> Entries:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_ENTRIES
    return Entries(
        rows=np.concatenate([part.rows for part in parts]),
        stamps=np.concatenate([part.stamps for part in parts]),
        marks=np.concatenate([part.marks for part in parts]),
    )


NO_ENTRIES = Entries(
    rows=np.empty(0, dtype=np.uint32), stamps=np.empty(0, dtype=np.int64), marks=np.empty(0, dtype=np.float64)
)
