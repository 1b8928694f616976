"""Requests that wait: what each will ask for, and by when, as far as clients said so.

Owns a list in order of deadline and two columns by row, from which others read: prefetch what to bring up next,
eviction what to take last. A request that has asked for blocks which only storage has, or was announced and did not get
all that it asked for, is in the list too, before all that have not asked, in the order in which they first did: what
has come for one is not pushed out for another behind it.

A statement holds nothing and is believed for as long as its request waits: it ends when the request is given all that
it asked for, is cancelled, its session is gone, or it asks no more. Volatile: a new daemon knows of none.

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
_ALIKE = 16
"""Requests with the same deadline that are looked at for a block that was lost."""
_Key = tuple[int, int]  # session, lease
_Place = tuple[int, int, int, int]  # QueuedRequest.key


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
    asked_ms: int = 0
    """When it last asked; 0: it has not."""
    lacks_room: bool = False
    """It has asked, and nothing of what it lacks could be begun: it is told when that has changed."""

    @property
    def key(self) -> _Place:
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

    __slots__ = (
        "_asked",
        "_by_key",
        "_by_root",
        "_lost",
        "_order",
        "_per_session",
        "_sorted",
        "_turn",
        "soonest_ms",
        "wanted",
    )

    def __init__(self, rows: int) -> None:
        self._by_key: dict[_Key, QueuedRequest] = {}
        self._per_session: dict[int, set[int]] = {}
        self._sorted: list[_Place] = []
        self._by_root: dict[int, list[_Place]] = {}
        """Of each first row: whoever shares a block of a chain shares its first."""
        self._order = 0
        self._turn = 0
        self._asked: dict[_Key, QueuedRequest] = {}
        self._lost: list[U32] = []
        self.wanted: NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        """[rows] queued requests that will ask for the row."""
        self.soonest_ms: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        """[rows] where `wanted`: the soonest deadline of those requests."""

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
        if len(rows):
            insort(self._by_root.setdefault(int(rows[0]), []), request.key)
        return request

    def ask(self, session: int, lease: int, rows: U32, words: U64, now_ms: int) -> QueuedRequest:
        """A request asks for these blocks and is to wait for some; whatever it said before, it is due now."""
        request = self._by_key.get((session, lease))
        if request is None or not request.asked_ms:
            if request is not None:
                rows, words = request.rows, request.words
            self._turn += 1  # a deadline before all times
            request = self.put(session, lease, rows, words, self._turn)
            self._asked[session, lease] = request
        request.asked_ms = now_ms
        request.looked_at = len(request.rows)
        return request

    def first(self) -> QueuedRequest | None:
        """The one with the soonest deadline."""
        return self._by_key[self._sorted[0][2:]] if self._sorted else None

    def due_first(self, most_rows: int) -> int:
        """The deadline up to which requests that have asked want so many rows together, but at least that of the first,
        whatever it wants. 0: none has."""
        deadline_ms, rows = 0, 0
        for request in self._asked.values():
            rows += len(request.rows)
            if deadline_ms and rows > most_rows:
                break
            deadline_ms = request.deadline_ms
        return deadline_ms

    def lacking_room(self) -> list[QueuedRequest]:
        """Requests that have asked and lack room, in order."""
        return [request for request in self._asked.values() if request.lacks_room]

    def asked_before(self, until_ms: int) -> list[_Key]:
        """Those that asked then for the last time, and not since."""
        return [key for key, request in self._asked.items() if request.asked_ms < until_ms]

    def get(self, session: int, lease: int) -> QueuedRequest | None:
        """What was said for a lease."""
        return self._by_key.get((session, lease))

    def end(self, session: int, lease: int) -> QueuedRequest | None:
        """It waits no more."""
        request = self._by_key.pop((session, lease), None)
        if request is None:
            return None
        self._asked.pop((session, lease), None)
        self.wanted[request.rows] -= 1
        of_session = self._per_session[session]
        of_session.remove(lease)
        if not of_session:
            del self._per_session[session]
        del self._sorted[bisect_left(self._sorted, request.key)]
        if len(request.rows):
            self._leave(request)
        return request

    def _leave(self, request: QueuedRequest) -> None:
        """What others still want has the deadlines of those others. O(rows), for most queues: few share much."""
        rows, root = request.rows, int(request.rows[0])
        family = self._by_root[root]
        del family[bisect_left(family, request.key)]
        if not family:
            del self._by_root[root]
        left = np.flatnonzero(self.wanted[rows])
        known, shared = 0, int(left[-1]) + 1 if len(left) else 0
        for (
            _,
            _,
            session,
            lease,
        ) in family:  # the soonest first, so each adds what it shares beyond those before it
            if known >= shared:
                break
            other = self._by_key[session, lease]
            most = min(len(other.rows), len(rows))
            same = other.rows[:most] == rows[:most]
            common = most if same.all() else int(same.argmin())
            if common > known:
                self.soonest_ms[rows[known:common]] = other.deadline_ms
                known = common

    def of_session(self, session: int) -> list[int]:
        """Leases of a session that are queued."""
        return list(self._per_session.get(session, ()))

    def in_order(self) -> list[QueuedRequest]:
        """All, the soonest deadline first."""
        return [self._by_key[session, lease] for _, _, session, lease in self._sorted]

    def last_of(self, session: int) -> int:
        """The lease of a session with at least one whose deadline is furthest away."""
        return max(self._by_key[session, lease].key for lease in self._per_session[session])[3]

    def lost(self, rows: U32) -> None:
        """HBM has these blocks no more, or they are not read ahead after all; prefetch may be through with them."""
        if self._by_key:
            wanted = rows[self.wanted[rows] > 0]
            if len(wanted):
                self._lost.append(wanted)

    def look_again(self, depth: U32) -> list[QueuedRequest]:
        """Requests that have not asked and want soonest what was lost since the last call: they are to be looked at
        again from the first such block on. `depth` is that column of all rows. O(rows that were lost).
        """
        if not self._lost:
            return []
        rows, self._lost = np.unique(np.concatenate(self._lost)), []
        rows = rows[self.wanted[rows] > 0]
        deadlines_ms, again = self.soonest_ms[rows], []
        for deadline_ms in np.unique(deadlines_ms).tolist():
            due = rows[deadlines_ms == deadline_ms]
            first = bisect_left(self._sorted, (deadline_ms, 0, 0, 0))
            for place in self._sorted[first : first + _ALIKE]:
                request = self._by_key[place[2:]]
                if request.deadline_ms == deadline_ms and not request.asked_ms:
                    at = depth[due]
                    inside = at < request.looked_at
                    at = at[inside][request.rows[at[inside]] == due[inside]]
                    if len(at):
                        request.looked_at = int(at.min())
                        again.append(request)
        return again

    def not_before(self, due_ms: int, rows: U32) -> NDArray[np.bool_]:
        """[n] whether nobody wants the block by then: it may go for one that is due then."""
        found: NDArray[np.bool_] = self.wanted[rows] == 0
        found |= self.soonest_ms[rows] > due_ms
        return found

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
