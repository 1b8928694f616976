"""Requests that wait to run: what each will ask for, and by when, as far as clients said so.

Owns a list in order of deadline and two columns by row, from which others read: prefetch what to bring up next,
eviction what to take last. A statement holds nothing and is believed for as long as its request waits: it ends when the
request is given all that it asked for, is cancelled, or its session is gone. Volatile: clients of a new daemon say it
again.

A row that ended and came back with another block meanwhile is wanted for nothing, which costs that block a better
place among victims and nothing else; `QueuedRequest.still` tells for those who must know.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT, touch_key
from kvstore.moves import U32, U64

__all__ = ["NO_DEADLINE_MS", "Queued", "QueuedRequest"]

NO_DEADLINE_MS = (1 << 42) - 1
"""Of a request that did not say: after all that did. Times of the store fit into 42 bits until the year 2109."""
_LAST = np.uint64(1 << 63)  # above every touch key
_Key = tuple[int, int]  # session, lease


@dataclass(slots=True, kw_only=True)
class QueuedRequest:
    """One statement. `rows` are those of the leading run that was known then, `words` their state words."""

    session: int
    lease: int
    rows: U32
    words: U64
    deadline_ms: int
    order: int
    looked_at: int = 0
    """Leading rows that prefetch is through with: each is brought up once at most."""

    @property
    def key(self) -> tuple[int, int, int, int]:
        """By deadline, then as they came."""
        return (self.deadline_ms, self.order, self.session, self.lease)

    def still(self, first: int, last: int, states: U64) -> U32:
        """Those of rows [first, last) that are of the same blocks as they were; `states` are all rows' words now."""
        rows = self.rows[first:last]
        same = (states[rows] >> GENERATION_SHIFT) == (self.words[first:last] >> GENERATION_SHIFT)
        found: U32 = rows[same]
        return found


class Queued:
    """The list and the columns. `put` and `end` are O(rows of the request)."""

    __slots__ = ("_by_key", "_count", "_order", "_per_session", "_sorted", "soonest_ms", "wanted")

    def __init__(self, rows: int) -> None:
        self._by_key: dict[_Key, QueuedRequest] = {}
        self._per_session: dict[int, set[int]] = {}
        self._sorted: list[tuple[int, int, int, int]] = []
        self._order = 0
        self.wanted: NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        """[rows] queued requests that will ask for the row."""
        self.soonest_ms: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        """[rows] where `wanted`: the soonest deadline that was stated since it was last wanted by none."""

    def __len__(self) -> int:
        return len(self._by_key)

    def put(self, session: int, lease: int, rows: U32, words: U64, deadline_ms: int) -> QueuedRequest:
        """A request waits. Replaces what was said for its lease. `deadline_ms` 0: none."""
        self.end(session, lease)
        self._order += 1
        deadline_ms = min(deadline_ms or NO_DEADLINE_MS, NO_DEADLINE_MS)
        request = QueuedRequest(
            session=session, lease=lease, rows=rows, words=words, deadline_ms=deadline_ms, order=self._order
        )
        new = self.wanted[rows] == 0
        self.soonest_ms[rows] = np.where(new, deadline_ms, np.minimum(self.soonest_ms[rows], deadline_ms))
        self.wanted[rows] += 1
        self._by_key[session, lease] = request
        self._per_session.setdefault(session, set()).add(lease)
        insort(self._sorted, request.key)
        return request

    def get(self, session: int, lease: int) -> QueuedRequest | None:
        """What was said for a lease."""
        return self._by_key.get((session, lease))

    def end(self, session: int, lease: int) -> QueuedRequest | None:
        """It waits no more."""
        request = self._by_key.pop((session, lease), None)
        if request is None:
            return None
        self.wanted[request.rows] -= 1
        of_session = self._per_session[session]
        of_session.remove(lease)
        if not of_session:
            del self._per_session[session]
        del self._sorted[bisect_left(self._sorted, request.key)]
        return request

    def of_session(self, session: int) -> list[int]:
        """Leases of a session that are queued."""
        return list(self._per_session.get(session, ()))

    def in_order(self) -> list[QueuedRequest]:
        """All, the soonest deadline first."""
        return [self._by_key[session, lease] for _, _, session, lease in self._sorted]

    def last_of(self, session: int) -> int:
        """The lease of a session with at least one whose deadline is furthest away."""
        return max(self._by_key[session, lease].key for lease in self._per_session[session])[3]

    def raise_keys(self, keys: U64, rows: U32, depth: U32) -> None:
        """Puts the eviction keys ([n], the smaller goes first) of wanted rows behind all others', in place.

        `depth` is that column of all rows.

        Among them the furthest deadline goes first, and within one the tail. So nothing is pinned: where only wanted
        blocks are left, they go, and those that are needed last go first.
        """
        if not self._by_key:
            return
        wanted = self.wanted[rows] > 0
        if wanted.any():
            away_ms = (NO_DEADLINE_MS - self.soonest_ms[rows[wanted]]).astype(np.uint64)
            keys[wanted] = _LAST | touch_key(away_ms, depth[rows[wanted]])

    def faults(self) -> list[str]:
        """What is wrong, for `check_integrity`."""
        counts = np.zeros(len(self.wanted), dtype=np.int64)
        for request in self._by_key.values():
            counts[np.unique(request.rows)] += 1
        wrong = int((counts != self.wanted).sum())
        return [f"{wrong} rows have a wrong count of queued requests"] if wrong else []
