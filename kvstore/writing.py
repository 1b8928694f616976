"""Write-behind: blocks that came into DRAM go down to storage, in the order of their seals, from a bounded queue.

While a block is written its DRAM slot is held by the mover's bit and its NVMe slot is FILLING: neither can be reused
while bytes may still move. What the queue has no place for is dropped and counted, and caught up with later.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.evicting import Evictor
from kvstore.layout import GENERATION_SHIFT, NONE, SlotState, Tier
from kvstore.moves import U8, U32, FlushLeft, FlushMark
from kvstore.slots import ClassKey
from kvstore.state import NO_SLOTS, StoreState, mover_bit

__all__ = ["Writing"]

_QUEUED, _MOVING = 1, 2


class Writing:
    """Writes, from the seal to the outcome."""

    __slots__ = ("_evictor", "_missed", "_progress", "_queue", "_state", "queued")

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._queue: deque[U32] = deque()
        self._progress: U8 = np.zeros(state.columns.shape.max_rows, dtype=np.uint8)  # of each row
        self._missed = True  # after a restart nobody knows what was queued
        self.queued = 0
        """Blocks that wait to be written."""

    def queue(self, rows: U32, *, can_write: bool) -> None:
        """Blocks that are in DRAM shall be written down, in this order; what there is no place for is dropped."""
        if not can_write:
            self._missed = True
            return
        state = self._state
        rows = rows[(self._progress[rows] == 0) & (state.columns.nvme[rows] == NONE)]
        place = max(0, state.limits.max_writes - self.queued)
        if len(rows) > place:
            state.counters["dropped_writes"] += len(rows) - place
            self._missed = True
            rows = rows[:place]
        if len(rows):
            self._progress[rows] = _QUEUED
            self.queued += len(rows)
            self._queue.append(rows)

    def catch_up(self, *, can_write: bool) -> None:
        """Queues what was dropped, or came while nothing could be written, once the queue has run dry."""
        if self._missed and not self.queued and can_write:
            self._missed = False
            self.queue(self.unwritten(), can_write=True)

    def unwritten(self) -> U32:
        """Rows whose block is in DRAM and not in storage. O(DRAM slots)."""
        state = self._state
        slots = np.flatnonzero((state.dram.state & np.uint64(0xFF)) == np.uint64(SlotState.SEALED))
        rows = state.dram.row[slots]
        found: U32 = rows[state.columns.nvme[rows] == NONE]
        return found

    def left_of(self, mark: FlushMark, *, can_write: bool) -> FlushLeft:
        """What is left of a flush; queues again what is still to come."""
        state, rows = self._state, mark.rows
        same = (state.columns.state[rows] >> GENERATION_SHIFT) == (mark.words >> GENERATION_SHIFT)
        missing = rows[same & (state.columns.nvme[rows] == NONE)]
        coming = missing[state.dram.sealed(state.columns.dram[missing])]
        self.queue(coming, can_write=can_write)
        return FlushLeft(coming=len(coming), missing=len(missing))

    def take(self, path: int, limit: int) -> list[tuple[U32, U32]]:
        """Pairs of DRAM slots and NVMe slots to write them into, by class; at most `limit` slots."""
        state = self._state
        rows = self._pop(limit)
        if not len(rows):
            return []
        rows = rows[np.argsort(state.columns.dram[rows])]
        sizes = state.dram.slot_bytes(state.columns.dram[rows])
        parts: list[tuple[U32, U32]] = []
        for slot_bytes in np.unique(sizes).tolist():
            of_size = rows[sizes == slot_bytes]
            key = ClassKey(device=path, slot_bytes=int(slot_bytes))
            owner = self._evictor.make_room(Tier.NVME, key, len(of_size))
            # Evicting may end rows that NVMe alone has, and none of these: they are in DRAM.
            nvme = state.nvme.allocate(owner, len(of_size), np.uint64(0))
            written, lost = of_size[: len(nvme)], of_size[len(nvme) :]
            if len(lost):
                self._progress[lost] = 0
                self._missed = True
                state.counters["dropped_writes"] += len(lost)
            if len(written):
                dram = state.columns.dram[written]
                state.nvme.row[nvme] = written
                state.dram.hold(dram, mover_bit(path))
                self._progress[written] = _MOVING
                parts.append((dram, nvme))
        return parts

    def _pop(self, limit: int) -> U32:
        """Up to `limit` queued rows that are still in DRAM alone, the oldest first."""
        state = self._state
        taken: list[U32] = []
        count = 0
        while count < limit and self._queue:
            rows = self._queue.popleft()
            if len(rows) > limit - count:
                self._queue.appendleft(rows[limit - count :])
                rows = rows[: limit - count]
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
        state.nvme.free(nvme[~same])
        state.counters["writes"] += int(same.sum())
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
