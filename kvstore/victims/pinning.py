"""Pins: blocks whose last copy is not evicted until a time.

Owns when each pin ends. The mark itself is the block's priority. Pins end with the daemon: an administrator's wish of
some minutes is not worth a column.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvstore.errors import ResourceExhausted
from kvstore.layout import GENERATION_SHIFT, Tier
from kvstore.moves import U32, U64
from kvstore.state import StoreState
from kvstore.tables.table import PINNED

__all__ = ["Pins"]


class Pins:
    """Pinned rows in batches, by the time they end."""

    __slots__ = ("_batches", "_order", "_state")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._batches: list[
            tuple[int, int, U32, U64]
        ] = []  # heap by (end, order): rows and their state words
        self._order = 0

    def pin(self, namespace: int, hashes: U64, until_ms: int) -> int:
        """Pins the cached leading run of a chain; returns its blocks.

        Raises: ResourceExhausted beyond the limit, and then nothing is pinned.
        """
        rows = self._cached_run(namespace, hashes)
        limit = self._state.limits.max_pins
        if sum(len(batch[2]) for batch in self._batches) + len(rows) > limit:
            raise ResourceExhausted(f"at most {limit} blocks can be pinned")
        if len(rows):
            self._order += 1
            heapq.heappush(self._batches, (until_ms, self._order, rows, self._state.words(rows)))
            self._state.columns.priority[rows] = PINNED
        return len(rows)

    def unpin(self, namespace: int, hashes: U64) -> int:
        """Takes every pin of a chain's cached leading run back; returns how many blocks were pinned."""
        rows = self._cached_run(namespace, hashes)
        pinned = int(np.count_nonzero(self._state.columns.priority[rows] == PINNED))
        self._state.columns.priority[rows] = 0
        kept = []
        for until_ms, order, batch, words in self._batches:
            stays = ~np.isin(batch, rows)
            if stays.any():
                kept.append((until_ms, order, batch[stays], words[stays]))
        self._batches = kept
        heapq.heapify(self._batches)
        self._note()
        return pinned

    def _cached_run(self, namespace: int, hashes: U64) -> U32:
        rows = self._state.table.locate(hashes, namespace)
        sealed = self._state.table.sealed(rows)
        return np.unique(rows[: len(sealed) if sealed.all() else int(sealed.argmin())])

    def _note(self) -> None:
        """There may be victims again."""
        for tier in Tier:
            for owner in self._state.pool(tier).classes.values():
                owner.freed, owner.exhausted = True, False

    def expire(self, now_ms: int) -> None:
        """Ends the pins whose time has come; a row that another pin still covers stays pinned."""
        ended = False
        while self._batches and self._batches[0][0] <= now_ms:
            _, _, rows, _ = heapq.heappop(self._batches)
            self._state.columns.priority[rows] = 0
            ended = True
        if ended:
            self._note()
            for _, _, rows, words in self._batches:
                same = (self._state.words(rows) >> GENERATION_SHIFT) == (words >> GENERATION_SHIFT)
                self._state.columns.priority[rows[same]] = PINNED
