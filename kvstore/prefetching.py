"""Prefetch: promotions ahead of use, which hold nothing, evict nothing, and end with their request."""

from __future__ import annotations

import numpy as np

from kvstore.layout import NONE
from kvstore.moves import U64
from kvstore.promoting import Promoting
from kvstore.recorder import Event
from kvstore.sessions import Prefetched, Session
from kvstore.state import StoreState

__all__ = ["Prefetching"]


class Prefetching:
    """What leases have had promoted ahead."""

    __slots__ = ("_promoting", "_state")

    def __init__(self, state: StoreState, promoting: Promoting) -> None:
        self._state = state
        self._promoting = promoting

    def prefetch(self, session: Session, namespace: int, lease: int, hashes: U64, deadline_ms: int) -> None:
        """Queues promotions of the leading known run, as far as free slots allow. `deadline_ms` is a time; 0: none."""
        state = self._state
        self.cancel(session, lease)
        rows = state.table.locate(hashes, namespace)
        known = rows != NONE
        rows = rows[: len(known) if known.all() else int(known.argmin())]
        if not len(rows):
            return
        state.table.touch(rows, state.now_ms)
        below = self._promoting.promotable(rows)
        if session.device is not None:
            below &= ~state.hbm.sealed(state.columns.hbm[session.device, rows])
        sizes = state.nvme.slot_bytes(np.where(below, state.columns.nvme[rows], np.uint32(0)))
        below &= sizes == np.uint64(session.slot_bytes)
        slots = self._promoting.prefetch(session.dram_key, rows[below], deadline_ms)
        if not len(slots):
            return
        while len(session.prefetches) >= state.limits.max_waiting_leases:
            del session.prefetches[next(iter(session.prefetches))]
        session.prefetches[lease] = Prefetched(slots, state.dram.state[slots])
        state.counters["prefetches"] += len(slots)
        state.recorder.note(Event.PREFETCH, session.id, len(slots), c=lease)

    def started(self, session: Session, lease: int) -> None:
        """The request runs: its prefetches are its own business no more."""
        session.prefetches.pop(lease, None)

    def cancel(self, session: Session, lease: int) -> None:
        """Takes back what no mover has begun and nobody waits for."""
        taken = session.prefetches.pop(lease, None)
        if taken is not None:
            same = self._state.dram.state[taken.slots] == taken.words
            self._promoting.cancel_queued(taken.slots[same])

    def forget_session(self, session: Session) -> None:
        """All of a session's."""
        for lease in list(session.prefetches):
            self.cancel(session, lease)
