"""Copies blocks down to DRAM as soon as they are published, so that they outlive the HBM of their device.

Runs on the stream's and the copier's threads, never on the engine's. A published HBM slot is kept (one local reference)
until it is paired with a DRAM slot in hand and copied; the store is told after the copy. Best effort: where room does
not come, the oldest blocks of a bounded backlog are let go of and stay in HBM alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier, CopyBatch, Direction
from kvstore.client import Listener, SealResult, Session, SlotRun, copied
from kvstore.errors import Unavailable
from kvstore.moves import SealOutcome

__all__ = ["Watch", "WriteThrough"]

_BATCH_BLOCKS = 32
_BATCH_BYTES = 64 << 20
"""A batch has up to the larger of the two: what each costs in Python is then little beside a millisecond of copying."""
_LOG_INTERVAL_S = 10.0
_LOG = logging.getLogger("kvstore.write_through")


class Watch(Protocol):
    """Whether blocks are to be copied, and what the copies cost (`engine_adapter.loading.choice`). Any thread."""

    @property
    def may_store(self) -> bool:
        """Whether blocks are to be copied to DRAM."""
        ...

    def stored(self, nbytes: int, began_at: float) -> None:
        """A copy of so many bytes has ended, that was handed to the copier then (monotonic clock)."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    run: SlotRun
    since: float


class WriteThrough(Listener):
    """The listener of one session."""

    def __init__(
        self, session: Session, copier: Copier, *, max_backlog_blocks: int, watch: Watch | None = None
    ) -> None:
        """`watch`: takes DRAM out of use where copies cost more than they save; None: it stays in use."""
        self._watch = watch
        self._session = session
        self._copier = copier
        self._max_backlog_blocks = max_backlog_blocks
        self._batch_blocks = max(_BATCH_BLOCKS, _BATCH_BYTES // session.hbm.slot_bytes)
        self._lock = threading.Lock()
        self._backlog: deque[_Waiting] = deque()
        self._backlog_blocks = 0
        self._copying_blocks = 0
        self._dropped_blocks = 0
        self._logged_at = -_LOG_INTERVAL_S

    def sealed(self, result: SealResult) -> None:
        """Published blocks join the backlog."""
        published = result.seals[result.outcomes == SealOutcome.PUBLISHED]
        if not len(published):
            return
        self.adopt(SlotRun(slots=published["slot"].copy(), generations=published["generation"].copy()))

    def adopt(self, run: SlotRun) -> None:
        """Published blocks that the session holds join the backlog, where DRAM is in use."""
        if not len(run) or (self._watch is not None and not self._watch.may_store):
            return
        self._session.share_hbm(run.slots)
        with self._lock:
            self._backlog.append(_Waiting(run, time.monotonic()))
            self._backlog_blocks += len(run)
        self._pump()
        self._trim()

    @property
    def backlog_blocks(self) -> int:
        """Published blocks that wait for room or are being copied."""
        with self._lock:
            return self._backlog_blocks + self._copying_blocks

    def room(self) -> None:
        """Pairs what waits with the room that came."""
        self._pump()

    def shed(self, older_than_s: float) -> None:
        """Lets go of what has waited longer than that: its pages are wanted, and no room comes."""
        until = time.monotonic() - older_than_s
        with self._lock:
            old = sum(len(waiting.run) for waiting in self._backlog if waiting.since < until)
            shed = self._take(old)
        self._let_go(shed)

    def _trim(self) -> None:
        """Lets go of what is over the bound, and of no more."""
        with self._lock:
            shed = self._take(self._backlog_blocks - self._max_backlog_blocks)
        self._let_go(shed)

    def _take(self, blocks: int) -> list[SlotRun]:
        """So many blocks out of the backlog: the oldest runs, and of the last of them its tail. The lock is held."""
        taken: list[SlotRun] = []
        while blocks > 0:
            waiting = self._backlog.popleft()
            kept = max(0, len(waiting.run) - blocks)
            taken.append(waiting.run.part(kept, len(waiting.run)))
            if kept:
                self._backlog.appendleft(_Waiting(waiting.run.part(0, kept), waiting.since))
            self._backlog_blocks -= len(taken[-1])
            blocks -= len(taken[-1])
        return taken

    def _let_go(self, runs: list[SlotRun]) -> None:
        for run in runs:
            self._note_dropped(len(run))
            self._session.step(dropped_hbm=run.slots)

    def _note_dropped(self, blocks: int) -> None:
        """Says now and then that blocks stay in HBM alone: they go with their device."""
        now = time.monotonic()
        with self._lock:
            self._dropped_blocks += blocks
            if now - self._logged_at < _LOG_INTERVAL_S:
                return
            self._logged_at = now
            dropped = self._dropped_blocks
        _LOG.warning("%d blocks so far were not copied to DRAM: no room came in time", dropped)

    def _pump(self) -> None:
        """Starts copies as far as backlog and room go."""
        while (pair := self._pair()) is not None:
            sources, targets = pair
            sums = np.zeros((len(sources), 2), dtype=np.uint64)
            batch = CopyBatch(
                direction=Direction.STORE,
                sources=self._session.hbm.address_of(sources.slots),
                targets=self._session.dram.address_of(targets.slots),
                nbytes=self._session.hbm.slot_bytes,
                done=partial(self._copied, sources, targets, sums, time.monotonic()),
                failed=partial(self._ended, len(sources)),  # the slots stay held: something may write to them
                hbm_slots=sources.slots,
                dram_slots=targets.slots,
                sums=sums,
            )
            if not self._submit(batch):
                self._ended(len(sources))
                self._note_dropped(len(sources))
                self._session.step(dropped_hbm=sources.slots, dropped_dram=targets.slots)
                return

    def _submit(self, batch: CopyBatch) -> bool:
        try:
            return self._copier.submit(batch)
        except Unavailable:  # whoever loads next says so
            return False

    def _pair(self) -> tuple[SlotRun, SlotRun] | None:
        """The oldest blocks of the backlog and as many DRAM slots; None where one of them is lacking."""
        with self._lock:
            if not self._backlog:
                return None
            waiting = self._backlog[0]
            run = waiting.run
            count = min(len(run), self._session.room_in_hand, self._batch_blocks)
            room = self._session.take_room(count) if count else None
            if room is None:
                return None
            self._backlog.popleft()
            if count < len(run):
                rest = run.part(count, len(run))
                self._backlog.appendleft(_Waiting(rest, waiting.since))
            self._backlog_blocks -= count
            self._copying_blocks += count
            return run.part(0, count), room

    def _ended(self, blocks: int) -> None:
        with self._lock:
            self._copying_blocks -= blocks

    def _copied(self, sources: SlotRun, targets: SlotRun, sums: NDArray[np.uint64], began_at: float) -> None:
        if self._watch is not None:
            self._watch.stored(len(sources) * self._session.hbm.slot_bytes, began_at)
        self._session.step(
            stores=copied(sources, targets, checksums=sums),
            dropped_hbm=sources.slots,
            dropped_dram=targets.slots,
        )
        self._ended(len(sources))
        self._pump()
