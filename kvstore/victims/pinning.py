"""Pins: blocks whose last copy is not evicted until a time, each by somebody with a name.

Owns when each pin ends and whose it is: a block stays pinned while one pin of it is left. The mark itself is the
block's priority. Pins end with the daemon: an administrator's wish of some minutes is not worth a column.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from kvstore.errors import InvalidArgument, ResourceExhausted
from kvstore.layout import GENERATION_SHIFT, Tier
from kvstore.moves import U32, U64
from kvstore.state import StoreState
from kvstore.tables.table import PINNED

__all__ = ["PinnedBy", "Pins"]

_MAX_OWNER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedBy:
    """All pins of one owner."""

    owner: str
    blocks: int
    until_ms: int
    """When the last of them ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    owner: str
    until_ms: int
    rows: U32
    words: U64  # their state words: a row that has another block since is not pinned


class Pins:
    """Pinned rows in batches, by the time they end."""

    __slots__ = ("_heap", "_order", "_state")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._heap: list[tuple[int, int, _Pin]] = []  # by (end, order)
        self._order = 0

    def pin(self, namespace: int, hashes: U64, until_ms: int, owner: str = "") -> int:
        """Pins the cached leading run of a chain; returns its blocks.

        Raises: InvalidArgument; ResourceExhausted beyond the limit. Then nothing is pinned.
        """
        if len(owner) > _MAX_OWNER or not owner.isprintable():
            raise InvalidArgument(f"an owner is a name of at most {_MAX_OWNER} printable characters")
        rows = self._cached_run(namespace, hashes)
        limit = self._state.limits.max_pins
        if sum(len(pin.rows) for *_, pin in self._heap) + len(rows) > limit:
            raise ResourceExhausted(f"at most {limit} blocks can be pinned")
        if len(rows):
            self._put(_Pin(owner=owner, until_ms=until_ms, rows=rows, words=self._state.words(rows)))
            self._state.columns.priority[rows] = PINNED
        return len(rows)

    def unpin(self, namespace: int, hashes: U64, owner: str = "") -> int:
        """Takes the owner's pins of a chain's cached leading run back, of no owner everybody's; returns how many blocks
        were pinned by them."""
        rows = self._cached_run(namespace, hashes)
        pins, self._heap = [pin for *_, pin in self._heap], []
        freed = np.zeros(len(rows), dtype=np.bool_)
        for pin in pins:
            taken = np.isin(pin.rows, rows) & (not owner or pin.owner == owner)
            freed |= np.isin(rows, pin.rows[taken & self._same(pin)])
            if not taken.all():
                self._put(replace(pin, rows=pin.rows[~taken], words=pin.words[~taken]))
        self._unmark(rows[freed])
        return int(np.count_nonzero(freed))

    def owners(self) -> list[PinnedBy]:
        """Who has pinned how much, by name. O(pinned blocks)."""
        found: list[PinnedBy] = []
        for owner in sorted({pin.owner for *_, pin in self._heap}):
            pins = [pin for *_, pin in self._heap if pin.owner == owner]
            rows = np.unique(np.concatenate([pin.rows[self._same(pin)] for pin in pins]))
            until_ms = max(pin.until_ms for pin in pins)
            found.append(PinnedBy(owner=owner, blocks=len(rows), until_ms=until_ms))
        return found

    def expire(self, now_ms: int) -> None:
        """Ends the pins whose time has come; a row that another pin still covers stays pinned."""
        ended: list[U32] = []
        while self._heap and self._heap[0][0] <= now_ms:
            ended.append(heapq.heappop(self._heap)[2].rows)
        if ended:
            self._unmark(np.concatenate(ended))

    def _put(self, pin: _Pin) -> None:
        self._order += 1
        heapq.heappush(self._heap, (pin.until_ms, self._order, pin))

    def _cached_run(self, namespace: int, hashes: U64) -> U32:
        rows = self._state.table.locate(hashes, namespace)
        sealed = self._state.table.sealed(rows)
        return np.unique(rows[: len(sealed) if sealed.all() else int(sealed.argmin())])

    def _same(self, pin: _Pin) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[rows] whether each still has the block that was pinned."""
        same = (self._state.words(pin.rows) >> GENERATION_SHIFT) == (pin.words >> GENERATION_SHIFT)
        return np.asarray(same, dtype=np.bool_)

    def _unmark(self, rows: U32) -> None:
        """Pins of these rows are over: those that another one covers stay pinned, the others may be victims."""
        self._state.columns.priority[rows] = 0
        for *_, pin in self._heap:
            self._state.columns.priority[pin.rows[self._same(pin)]] = PINNED
        for tier in Tier:
            for owner in self._state.pool(tier).classes.values():
                owner.freed, owner.exhausted = True, False
