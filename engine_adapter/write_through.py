"""Copies blocks down to DRAM as soon as they are published, so that they outlive the HBM of their device.

Runs on the stream's and the copier's threads, never on the engine's. A published HBM slot is kept (one local reference)
until it is paired with a DRAM slot in hand and copied; the store is told after the copy. Best effort: where room does
not come, the oldest blocks of a bounded backlog are let go of and stay in HBM alone.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copier import Copier, CopyBatch, Direction
from kvstore.client import Listener, SealResult, Session, SlotRun
from kvstore.moves import SealOutcome
from kvstore.wire.packed import COPY

__all__ = ["WriteThrough", "copies"]

_BATCH_BLOCKS = 32


def copies(sources: SlotRun, targets: SlotRun) -> NDArray[np.void]:
    """COPY[n]: what the store is told of completed copies."""
    records = np.empty(len(sources), dtype=COPY)
    records["source"], records["source_generation"] = sources.slots, sources.generations
    records["target"], records["target_generation"] = targets.slots, targets.generations
    return records


class WriteThrough(Listener):
    """The listener of one session."""

    def __init__(self, session: Session, copier: Copier, *, max_backlog_blocks: int) -> None:
        self._session = session
        self._copier = copier
        self._max_backlog_blocks = max_backlog_blocks
        self._lock = threading.Lock()
        self._backlog: deque[SlotRun] = deque()
        self._backlog_blocks = 0
        self._copying_blocks = 0
        self.dropped_blocks = 0

    def sealed(self, result: SealResult) -> None:
        """Published blocks join the backlog."""
        published = result.seals[result.outcomes == SealOutcome.PUBLISHED]
        if not len(published):
            return
        run = SlotRun(slots=published["slot"].copy(), generations=published["generation"].copy())
        self._session.share_hbm(run.slots)
        with self._lock:
            self._backlog.append(run)
            self._backlog_blocks += len(run)
        self._trim()
        self._pump()

    @property
    def backlog_blocks(self) -> int:
        """Published blocks that wait for room or are being copied."""
        with self._lock:
            return self._backlog_blocks + self._copying_blocks

    def room(self) -> None:
        """Pairs what waits with the room that came."""
        self._pump()

    def _trim(self) -> None:
        while True:
            with self._lock:
                if self._backlog_blocks <= self._max_backlog_blocks or len(self._backlog) < 2:
                    return
                oldest = self._backlog.popleft()
                self._backlog_blocks -= len(oldest)
                self.dropped_blocks += len(oldest)
            self._session.step(dropped_hbm=oldest.slots)

    def _pump(self) -> None:
        """Starts copies as far as backlog and room go."""
        while (pair := self._pair()) is not None:
            sources, targets = pair
            batch = CopyBatch(
                direction=Direction.STORE,
                sources=self._session.hbm.address_of(sources.slots),
                targets=self._session.dram.address_of(targets.slots),
                nbytes=self._session.hbm.slot_bytes,
                done=partial(self._copied, sources, targets),
            )
            if not self._copier.submit(batch):
                self._ended(len(sources))
                self._session.step(dropped_hbm=sources.slots, dropped_dram=targets.slots)
                return

    def _pair(self) -> tuple[SlotRun, SlotRun] | None:
        """The oldest blocks of the backlog and as many DRAM slots; None where one of them is lacking."""
        with self._lock:
            if not self._backlog:
                return None
            oldest = self._backlog.popleft()
            count = min(len(oldest), self._session.room_in_hand, _BATCH_BLOCKS)
            room = self._session.take_room(count) if count else None
            if room is None:
                self._backlog.appendleft(oldest)
                return None
            if count < len(oldest):
                rest = SlotRun(slots=oldest.slots[count:], generations=oldest.generations[count:])
                self._backlog.appendleft(rest)
            self._backlog_blocks -= count
            self._copying_blocks += count
            return SlotRun(slots=oldest.slots[:count], generations=oldest.generations[:count]), room

    def _ended(self, blocks: int) -> None:
        with self._lock:
            self._copying_blocks -= blocks

    def _copied(self, sources: SlotRun, targets: SlotRun) -> None:
        self._session.step(
            stores=copies(sources, targets), dropped_hbm=sources.slots, dropped_dram=targets.slots
        )
        self._ended(len(sources))
        self._pump()
