"""Write-behind: blocks that came into DRAM go down to storage, in the order of their seals, from a bounded queue.

While a block is written its DRAM slot is held by the mover's bit and its NVMe slot is FILLING: neither can be reused
while bytes may still move. What the queue has no place for is dropped and counted, and caught up with later; where
queue or budget run short `admission` says what goes first. What a flush asks for goes before all that and at any price.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT, NONE, SlotState, Tier
from kvstore.moves import U8, U32, FlushLeft, FlushMark
from kvstore.state import NO_SLOTS, StoreState, mover_bit
from kvstore.tables.extents import TRAILER_BYTES
from kvstore.tables.slots import ClassKey
from kvstore.tiering.admission import Admission
from kvstore.victims.evicting import Evictor

__all__ = ["Writing"]

_QUEUED, _MOVING, _FLUSHING = 1, 2, 3
_CROWDED_PART = 4
"""With more than this part of its places taken the queue is left to run down before all of DRAM is looked through."""
_USE_SHIFT = np.uint64(30)  # of a touch key, which has milliseconds from bit 20 on
_LOOK_AGAIN_MS = 1_000
"""While writing is short: how often all that is in DRAM is looked through for what was used again meanwhile."""


class Writing:
    """Writes, from the seal to the outcome."""

    __slots__ = (
        "_evictor",
        "_flushed",
        "_look_ms",
        "_missed",
        "_progress",
        "_queue",
        "_since_flush",
        "_state",
        "_written_at",
        "admission",
        "queued",
    )

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._queue: deque[U32] = deque()
        self._flushed: deque[U32] = deque()
        rows = state.columns.shape.max_rows
        self._progress: U8 = np.zeros(rows, dtype=np.uint8)  # of each row
        self._since_flush: NDArray[np.bool_] = np.zeros(rows, dtype=np.bool_)
        """[rows] that were written since the last flush began."""
        self._written_at: U32 = np.zeros(rows, dtype=np.uint32)
        """[rows] last use of the block when it was written, in units of 1.024 s; 0: it was not."""
        self._missed = True  # after a restart nobody knows what was queued
        self._look_ms = 0
        self.queued = 0
        """Blocks that wait to be written."""
        self.admission = Admission(
            paths=state.limits.paths, rows=rows, day_bytes=state.limits.write_budget_bytes
        )

    def came(self, rows: U32, paths: list[int]) -> None:
        """Blocks have come into DRAM: see `queue`."""
        self._written_at[rows] = 0
        self.queue(rows, paths)

    def queue(self, rows: U32, paths: list[int]) -> None:
        """Blocks that are in DRAM shall be written down, in this order, if they are admitted and there is a place.

        `paths`: those that take writes.
        """
        if not paths:
            self._missed = True
            return
        state, columns = self._state, self._state.columns
        rows = self._unqueued(rows)
        if not len(rows):
            return
        pressure = self.admission.pressure(state.now_ms, paths, self.queued, state.limits.max_writes)
        decided = self.admission.choose(
            rows, columns.hash[rows], columns.depth[rows], columns.touch[rows], state.now_ms, pressure
        )
        if not decided.chosen.all():
            state.counters["refused_writes_budget" if decided.by_budget else "refused_writes_queue"] += (
                decided.refused
            )
            self._missed = True
            rows = rows[decided.chosen]
        state.counters["admitted_writes"] += self._put(self._queue, rows, _QUEUED)

    def begin_flush(self) -> None:
        """What is written from now on has been written for the flush that begins."""
        self._since_flush[:] = False

    def flush(self, rows: U32, paths: list[int]) -> None:
        """Blocks that are in DRAM shall be written down before all others, whatever it costs."""
        if not paths:
            self._missed = True
            return
        waiting = rows[self._progress[rows] == _QUEUED]
        if len(waiting):
            self._progress[waiting] = _FLUSHING
            self._flushed.append(waiting)
            left = (queued[self._progress[queued] == _QUEUED] for queued in self._queue)
            self._queue = deque(queued for queued in left if len(queued))
        self._state.counters["flushed_writes"] += len(waiting)
        self._state.counters["flushed_writes"] += self._put(self._flushed, self._unqueued(rows), _FLUSHING)

    def _unqueued(self, rows: U32) -> U32:
        unqueued: U32 = rows[(self._progress[rows] == 0) & (self._state.columns.nvme[rows] == NONE)]
        return unqueued

    def _put(self, queue: deque[U32], rows: U32, progress: int) -> int:
        """Queues as many of these as there is place for; returns how many."""
        place = max(0, self._state.limits.max_writes - self.queued)
        if len(rows) > place:
            self._state.counters["dropped_writes"] += len(rows) - place
            self._missed = True
            rows = rows[:place]
        if len(rows):
            self._progress[rows] = progress
            self.queued += len(rows)
            queue.append(rows)
        return len(rows)

    def catch_up(self, paths: list[int]) -> None:
        """Queues what was dropped, refused, or came while nothing could be written, once the queue has room again.

        What was written and evicted again goes down once more only after it was used again: where DRAM is larger than
        storage the same blocks would be written for ever.
        """
        state = self._state
        crowded = self.queued > state.limits.max_writes // _CROWDED_PART
        if not self._missed or crowded or not paths or state.now_ms < self._look_ms:
            return
        self._missed = False
        rows = self.unwritten()
        self.queue(rows[self._last_use(rows) > self._written_at[rows]], paths)
        if self._missed:  # refused: what is used again meanwhile is admitted
            self._look_ms = state.now_ms + _LOOK_AGAIN_MS

    def _last_use(self, rows: U32) -> U32:
        """[n] in units of `_written_at`."""
        last: U32 = (self._state.columns.touch[rows] >> _USE_SHIFT).astype(np.uint32)
        return last

    def unwritten(self) -> U32:
        """Rows whose block is in DRAM and not in storage. O(DRAM slots)."""
        state = self._state
        slots = np.flatnonzero((state.dram.state & np.uint64(0xFF)) == np.uint64(SlotState.SEALED))
        rows = state.dram.row[slots]
        found: U32 = rows[state.columns.nvme[rows] == NONE]
        return found

    def left_of(self, mark: FlushMark, paths: list[int]) -> FlushLeft:
        """What is left of a flush; queues again what is still to come.

        A block that was written for it and evicted again does not fit, and is not written once more: it would only
        take the place of another.
        """
        state, rows = self._state, mark.rows
        same = (state.columns.state[rows] >> GENERATION_SHIFT) == (mark.words >> GENERATION_SHIFT)
        missing = rows[same & (state.columns.nvme[rows] == NONE)]
        coming = missing[state.dram.sealed(state.columns.dram[missing])]
        unfit = self._since_flush[coming]
        self.flush(coming[~unfit], paths)
        return FlushLeft(coming=int((~unfit).sum()), missing=len(missing), unfit=int(unfit.sum()))

    def take(self, path: int, limit: int) -> list[tuple[U32, U32]]:
        """Pairs of DRAM slots and NVMe slots to write them into, by class; at most `limit` slots."""
        rows = self._pop(self._flushed, _FLUSHING, limit)
        if len(rows) < limit:
            rows = np.concatenate((rows, self._affordable(path, limit - len(rows))))
        if not len(rows):
            return []
        state = self._state
        rows = rows[np.argsort(state.columns.dram[rows])]
        sizes = state.dram.slot_bytes(state.columns.dram[rows])
        parts: list[tuple[U32, U32]] = []
        for slot_bytes in np.unique(sizes).tolist():
            for asks, of_tenant in state.quotas.by_tenant(rows[sizes == slot_bytes]):
                pair = self._give_slots(path, of_tenant, int(slot_bytes), asks)
                if len(pair[0]):
                    parts.append(pair)
        return parts

    def _affordable(self, path: int, limit: int) -> U32:
        """Up to `limit` queued rows that the path's budget covers."""
        budget, now_ms = self.admission.budgets[path], self._state.now_ms
        left = budget.left_bytes(now_ms)
        if left <= 0 or not self._queue:
            return NO_SLOTS
        rows = self._pop(self._queue, _QUEUED, limit)
        if not budget.day_bytes or not len(rows):
            return rows
        covered = int(np.searchsorted(np.cumsum(self._bytes_of(rows)), left, side="right"))
        if covered < len(rows):
            self._queue.appendleft(rows[covered:])
            self.queued += len(rows) - covered
        return rows[:covered]

    def _bytes_of(self, rows: U32) -> NDArray[np.int64]:
        """[n] bytes that writing each block takes."""
        sizes = self._state.dram.slot_bytes(self._state.columns.dram[rows])
        return sizes.astype(np.int64) + TRAILER_BYTES

    def _give_slots(self, path: int, rows: U32, slot_bytes: int, asks: int) -> tuple[U32, U32]:
        """DRAM and NVMe slots of those of these rows, all of one class and one tenant, that get one.

        The others are caught up with.
        """
        state = self._state
        key = ClassKey(device=path, slot_bytes=slot_bytes)
        owner = self._evictor.make_room(Tier.NVME, key, len(rows), asks)
        # Evicting may end rows that NVMe alone has, and none of these: they are in DRAM.
        nvme = state.nvme.allocate(owner, len(rows), np.uint64(0))
        written, lost = rows[: len(nvme)], rows[len(nvme) :]
        if len(lost):
            self._progress[lost] = 0
            self._missed = True
            state.counters["dropped_writes"] += len(lost)
        dram = state.columns.dram[written]
        if len(written):
            state.nvme.row[nvme] = written
            state.dram.hold(dram, mover_bit(path))
            self._progress[written] = _MOVING
            nbytes = len(written) * (slot_bytes + TRAILER_BYTES)
            self.admission.budgets[path].spend(state.now_ms, nbytes)
        return dram, nvme

    def _pop(self, queue: deque[U32], progress: int, limit: int) -> U32:
        """Up to `limit` rows of a queue that are still in DRAM alone, the oldest first."""
        state = self._state
        taken: list[U32] = []
        count = 0
        while count < limit and queue:
            rows = queue.popleft()
            if len(rows) > limit - count:
                queue.appendleft(rows[limit - count :])
                rows = rows[: limit - count]
            rows = rows[self._progress[rows] == progress]
            self.queued -= len(rows)
            good = state.table.sealed(rows) & state.dram.sealed(state.columns.dram[rows])
            good &= state.columns.nvme[rows] == NONE
            self._progress[rows[~good]] = 0
            taken.append(rows[good])
            count += int(good.sum())
        return np.concatenate(taken) if taken else NO_SLOTS

    # -- outcomes: flights of kind WRITE, all of one path

    def succeeded(self, path: int, flights: NDArray[np.void]) -> None:
        """The blocks are in storage."""
        state = self._state
        rows, nvme = flights["row"], flights["nvme"]
        same = (state.columns.state[rows] >> GENERATION_SHIFT) == (flights["row_word"] >> GENERATION_SHIFT)
        same &= state.table.sealed(rows) & (state.columns.nvme[rows] == NONE)
        state.fault("write.done")
        state.complete(Tier.NVME, rows[same], nvme[same], 0)
        self._since_flush[rows[same]] = True
        self._written_at[rows[same]] = self._last_use(rows[same])
        state.nvme.free(nvme[~same])
        state.counters["writes"] += int(same.sum())
        self.admission.budgets[path].accepted_bytes += int(state.nvme.slot_bytes(nvme[same]).sum())
        self._end(path, flights)

    def failed(self, path: int, flights: NDArray[np.void]) -> None:
        """Storage does not take them: its slots are never used again, the blocks stay in DRAM."""
        self._state.nvme.quarantine(flights["nvme"])
        self._state.counters["dropped_writes"] += len(flights)
        self._end(path, flights)

    def cancelled(self, path: int, flights: NDArray[np.void]) -> None:
        """Nobody writes them; they are tried again later."""
        self._state.nvme.free(flights["nvme"])
        self._end(path, flights)
        self._missed = True

    def _end(self, path: int, flights: NDArray[np.void]) -> None:
        """The mover no longer reads the DRAM slots."""
        self._progress[flights["row"]] = 0
        self._state.dram.unhold(flights["dram"], mover_bit(path))
