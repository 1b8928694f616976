"""Leases that wait: for blocks that others fill or that are on their way, or for a free slot.

Owns who waits for what and whom to tell. A lease that waits for rows is filed under one of them only, its *pivot*:
while that one is unresolved nothing need be looked at, and when it resolves the next unresolved one is found in one
vector operation. So thousands of blocks that resolve cost nothing for leases that wait for another.
Volatile: after a restart of the daemon clients acquire again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE
from kvstore.moves import U32, U64, SessionId
from kvstore.tables.slots import ClassKey

__all__ = ["Waits"]

_Key = tuple[int, int]  # session, lease


@dataclass(slots=True)
class _Wait:
    rows: U32  # empty: it waits for slots
    words: U64  # state words of the rows when the wait began: a row that ended has another generation
    pivot: int
    slots_of: ClassKey | None
    slots: int


class Waits:
    """`unresolved(rows, words, session)` → [n] tells which of a lease's rows are still on their way."""

    __slots__ = (
        "_by_class",
        "_by_pivot",
        "_changed",
        "_per_session",
        "_pivots",
        "_unresolved",
        "_waits",
        "waited",
    )

    def __init__(self, rows: int, unresolved: Callable[[U32, U64, int], NDArray[np.bool_]]) -> None:
        self._unresolved = unresolved
        self._waits: dict[_Key, _Wait] = {}
        self._by_pivot: dict[int, list[_Key]] = {}
        self._pivots: NDArray[np.bool_] = np.zeros(rows, dtype=np.bool_)
        self._by_class: dict[ClassKey, dict[_Key, None]] = {}
        self._changed: dict[int, dict[int, None]] = {}
        self._per_session: Counter[int] = Counter()
        self.waited: NDArray[np.uint16] = np.zeros(rows, dtype=np.uint16)
        """[rows] leases that wait for the row, or for rows beside it: no victim while not zero."""

    def __len__(self) -> int:
        return len(self._waits)

    def of_session(self, session: int) -> int:
        """Leases of a session that wait."""
        return self._per_session[session]

    def wait_rows(self, session: int, lease: int, rows: U32, words: U64) -> None:
        """The lease waits for all of these rows; they may have duplicates. Replaces what it waited for."""
        self.cancel(session, lease)
        rows, first = np.unique(rows, return_index=True)
        wait = _Wait(rows=rows, words=words[first], pivot=NONE, slots_of=None, slots=0)
        self.waited[rows] += 1
        self._waits[session, lease] = wait
        self._per_session[session] += 1
        self._file((session, lease), wait)

    def wait_slots(self, session: int, lease: int, key: ClassKey, slots: int) -> None:
        """The lease waits until about `slots` of a class can be had. Replaces what it waited for."""
        self.cancel(session, lease)
        empty = np.empty(0, dtype=np.uint32)
        self._waits[session, lease] = _Wait(
            rows=empty, words=np.empty(0, dtype=np.uint64), pivot=NONE, slots_of=key, slots=max(1, slots)
        )
        self._per_session[session] += 1
        self._by_class.setdefault(key, {})[session, lease] = None

    def resolved(self, rows: U32) -> None:
        """Something became of these rows: files their waiters anew, or tells them."""
        if not self._by_pivot:
            return
        for row in rows[self._pivots[rows]].tolist():
            self._pivots[row] = False
            for key in self._by_pivot.pop(row, ()):
                wait = self._waits.get(key)
                if wait is not None and wait.pivot == row:
                    self._file(key, wait)

    def slots_wanted(self) -> list[ClassKey]:
        """Classes that some lease waits for slots of."""
        return list(self._by_class)

    def slots_available(self, key: ClassKey, slots: int) -> None:
        """Tells those who wait for slots of a class, first come first served, until `slots` are spoken for."""
        for session, lease in list(self._by_class.get(key, ())):
            if slots <= 0:
                break
            slots -= self._waits[session, lease].slots
            self.tell(session, lease)

    def cancel(self, session: int, lease: int) -> None:
        """The lease waits no more and is not told."""
        wait = self._waits.pop((session, lease), None)
        if wait is None:
            return
        self._per_session[session] -= 1
        self.waited[wait.rows] -= 1
        if wait.slots_of is not None:
            waiting = self._by_class[wait.slots_of]
            del waiting[session, lease]
            if not waiting:
                del self._by_class[wait.slots_of]
        elif wait.pivot != NONE:
            filed = self._by_pivot.get(wait.pivot, [])
            if (session, lease) in filed:
                filed.remove((session, lease))
            if not filed:
                self._by_pivot.pop(wait.pivot, None)
                self._pivots[wait.pivot] = False

    def forget_session(self, session: int) -> None:
        """None of its leases waits any more."""
        for key in [key for key in self._waits if key[0] == session]:
            self.cancel(*key)
        self._changed.pop(session, None)

    def take_changed(self) -> list[tuple[SessionId, list[int]]]:
        """Leases to tell, by session, each once."""
        changed = [(SessionId(session), list(leases)) for session, leases in self._changed.items()]
        self._changed.clear()
        return changed

    def faults(self) -> list[str]:
        """What is wrong, for `check_integrity`."""
        counts = np.zeros(len(self.waited), dtype=np.int64)
        found: list[str] = []
        for key, wait in self._waits.items():
            counts[wait.rows] += 1
            if wait.slots_of is None and key not in self._by_pivot.get(wait.pivot, ()):
                found.append(f"lease {key} waits for row {wait.pivot} and is not filed there")
        if (counts != self.waited).any():
            found.append(f"{int((counts != self.waited).sum())} rows have a wrong count of waiters")
        return found

    def _file(self, key: _Key, wait: _Wait) -> None:
        open_ = self._unresolved(wait.rows, wait.words, key[0])
        if not open_.any():
            self.tell(*key)
            return
        # The last one: blocks of a chain tend to resolve in order, so it spares looks at those before it.
        wait.pivot = int(wait.rows[len(open_) - 1 - int(open_[::-1].argmax())])
        self._pivots[wait.pivot] = True
        self._by_pivot.setdefault(wait.pivot, []).append(key)

    def tell(self, session: int, lease: int) -> None:
        """The lease is to ask again."""
        self.cancel(session, lease)
        self._changed.setdefault(session, {})[lease] = None
