"""Moves between DRAM and storage: promotions, write-behind, and what became of them.

Owns the queues of each path and the table of moves in flight. Promotion is a state of the DRAM slot: FILLING, linked
to its row and held by the mover's bit from the moment it is queued. A block being written keeps its DRAM slot held by
the mover's bit and its NVMe slot FILLING until the answer, so neither can be reused while bytes may still move.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.evicting import Evictor
from kvstore.extents import TRAILER_BYTES
from kvstore.layout import GENERATION_SHIFT, MAX_MOVERS, NONE, SlotState, State, Tier
from kvstore.moves import U8, U32, U64, FlushMark, MissCause, MoveKind, MoveStatus, NvmeChanges
from kvstore.slots import ClassKey
from kvstore.state import NO_SLOTS, StoreState, mover_bit
from kvstore.wire.packed import MOVE, NVME_ENTRY

__all__ = ["Moving"]

_IN_FLIGHT = np.dtype(
    [
        ("id", "<u8"),  # 0: unused
        ("kind", "u1"),
        ("path", "u1"),
        ("row", "<u4"),
        ("row_word", "<u8"),
        ("dram", "<u4"),
        ("nvme", "<u4"),
        ("nvme_generation", "<u4"),
    ]
)
_MAX_IN_FLIGHT = 1 << 14
_NEVER_MS = 1 << 62
_QUEUED, _MOVING = 1, 2


@dataclass(slots=True)
class _Path:
    """Queues of one path. Entries are checked when they are taken: a slot that is no longer wanted is passed over."""

    up: bool = True
    demanded: deque[U32] = field(default_factory=deque)
    prefetched: list[tuple[int, int, U32]] = field(default_factory=list)
    """Heap by (deadline, order of arrival)."""


class Moving:
    """All moves. Slots named in calls are checked by the callers."""

    __slots__ = (
        "_evictor",
        "_flight",
        "_free_flights",
        "_missed",
        "_order",
        "_paths",
        "_queued_reads",
        "_queued_writes",
        "_read_state",
        "_serial",
        "_state",
        "_write_state",
        "_writes",
    )

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._paths = [_Path() for _ in range(min(state.limits.paths, MAX_MOVERS))]
        self._flight = np.zeros(_MAX_IN_FLIGHT, dtype=_IN_FLIGHT)
        self._free_flights: U32 = np.arange(_MAX_IN_FLIGHT, dtype=np.uint32)
        self._serial = 1
        self._order = 0
        self._missed = True
        self._read_state: U8 = np.zeros(len(state.dram), dtype=np.uint8)
        self._write_state: U8 = np.zeros(state.columns.shape.max_rows, dtype=np.uint8)
        self._writes: deque[U32] = deque()
        self._queued_reads = 0
        self._queued_writes = 0

    @property
    def can_write(self) -> bool:
        """Whether there is a live path with memory."""
        extents = self._state.extents
        return any(path.up and extents.of(Tier.NVME, number) for number, path in enumerate(self._paths))

    def all_down(self) -> None:
        """After a restart: a path is used again once its mover asks for moves."""
        for path in self._paths:
            path.up = False

    @property
    def queued_reads(self) -> int:
        """Promotions that no mover has yet."""
        return self._queued_reads

    @property
    def queued_writes(self) -> int:
        """Blocks that wait to be written down."""
        return self._queued_writes

    @property
    def in_flight(self) -> int:
        """Moves that a mover has."""
        return _MAX_IN_FLIGHT - len(self._free_flights)

    # -- promotions

    def promotable(self, rows: U32) -> NDArray[np.bool_]:
        """[n] SEALED rows that storage on a live path has and DRAM has not."""
        columns = self._state.columns
        nvme = columns.nvme[rows]
        found: NDArray[np.bool_] = (nvme != NONE) & (columns.dram[rows] == NONE)
        if found.any():
            up = np.zeros(256, dtype=np.bool_)
            up[: len(self._paths)] = [path.up for path in self._paths]
            found[found] = up[self._state.nvme.devices(nvme[found])]
        return found

    def promote(self, key: ClassKey, rows: U32) -> int:
        """Queues promotions for a run of rows, evicting where needed; returns how many of the leading ones."""
        count = min(len(rows), self._state.limits.max_reads - self._queued_reads)
        if count <= 0:
            return 0
        owner = self._evictor.make_room(Tier.DRAM, key, count)
        # A chain longer than the tier must not chase itself through it.
        count = min(count, len(owner.free), max(1, owner.slots // 2))
        self._start(key, rows[:count], None)
        return count

    def prefetch(self, key: ClassKey, rows: U32, deadline_ms: int) -> U32:
        """As `promote`, into free slots beyond the reserve only; returns the DRAM slots of those that were queued."""
        owner = self._state.dram.class_of(key)
        if len(owner.free) < len(rows):
            owner = self._evictor.make_room(Tier.DRAM, key, 0)
        spare = len(owner.free) - self._evictor.reserve_of(owner)
        count = min(len(rows), spare, self._state.limits.max_reads - self._queued_reads)
        return self._start(key, rows[:count], deadline_ms or _NEVER_MS) if count > 0 else NO_SLOTS

    def demand(self, rows: U32) -> None:
        """Prefetched rows are wanted now: they go before what is only prefetched."""
        slots = self._state.columns.dram[rows]
        slots = slots[slots != NONE]
        self._enqueue(slots[self._read_state[slots] == _QUEUED], None)

    def _start(self, key: ClassKey, rows: U32, deadline_ms: int | None) -> U32:
        state = self._state
        paths = state.nvme.devices(state.columns.nvme[rows])
        started: list[U32] = []
        for path in np.unique(paths).tolist():
            of_path = rows[paths == path]
            slots = state.dram.allocate(state.dram.class_of(key), len(of_path), mover_bit(path))
            of_path = of_path[: len(slots)]
            state.link(Tier.DRAM, of_path, slots, 0)
            self._read_state[slots] = _QUEUED
            self._queued_reads += len(slots)
            self._enqueue(slots, deadline_ms)
            started.append(slots)
        return np.concatenate(started) if started else NO_SLOTS

    def _enqueue(self, slots: U32, deadline_ms: int | None) -> None:
        if not len(slots):
            return
        state = self._state
        paths = state.nvme.devices(state.columns.nvme[state.dram.row[slots]])
        for number in np.unique(paths).tolist():
            path = self._paths[number]
            if deadline_ms is None:
                path.demanded.append(slots[paths == number])
            else:
                self._order += 1
                heapq.heappush(path.prefetched, (deadline_ms, self._order, slots[paths == number]))

    def cancel_queued(self, slots: U32) -> None:
        """Prefetches that no mover has yet and nobody waits for are undone."""
        state = self._state
        slots = slots[self._read_state[slots] == _QUEUED]
        rows = state.dram.row[slots]
        self._undo_reads(slots[state.waits.waited[rows] == 0])

    def _undo_reads(self, slots: U32) -> None:
        self._queued_reads -= int(np.count_nonzero(self._read_state[slots] == _QUEUED))
        self._read_state[slots] = 0
        self._state.unlink_promotions(slots)
        self._state.dram.free(slots)

    # -- write-behind

    def queue_writes(self, rows: U32) -> None:
        """Blocks that are in DRAM shall be written down, in this order; what the queue has no place for is dropped."""
        if not self.can_write:
            self._missed = True
            return
        state = self._state
        wanted = (self._write_state[rows] == 0) & (state.columns.nvme[rows] == NONE)
        rows = rows[wanted]
        place = max(0, state.limits.max_writes - self._queued_writes)
        if len(rows) > place:
            state.counters["dropped_writes"] += len(rows) - place
            self._missed = True
        rows = rows[:place]
        if len(rows):
            self._write_state[rows] = _QUEUED
            self._queued_writes += len(rows)
            self._writes.append(rows)

    def catch_up(self) -> None:
        """Queues what was dropped or came while no path was up, once the queue has run dry. The background's part."""
        if self._missed and not self._queued_writes and self.can_write:
            self._missed = False
            self.queue_writes(self.unwritten())

    def unwritten(self) -> U32:
        """Rows whose block is in DRAM and not in storage. O(DRAM slots)."""
        state = self._state
        slots = np.flatnonzero((state.dram.state & np.uint64(0xFF)) == np.uint64(SlotState.SEALED))
        rows = state.dram.row[slots]
        found: U32 = rows[state.columns.nvme[rows] == NONE]
        return found

    def unwritten_of(self, mark: FlushMark) -> int:
        """Blocks of a flush that storage does not have; queues those again that are in DRAM."""
        state = self._state
        rows, columns = mark.rows, state.columns
        same = (columns.state[rows] >> GENERATION_SHIFT) == (mark.words >> GENERATION_SHIFT)
        durable = same & (columns.nvme[rows] != NONE)
        self.queue_writes(rows[same & ~durable & state.dram.sealed(columns.dram[rows])])
        return int(np.count_nonzero(~durable))

    def take_changes(self, path: int) -> NvmeChanges:
        """What the durable index has to learn of a path."""
        state, columns = self._state, self._state.columns
        slots = np.flatnonzero(state.nvme_changed).astype(np.uint32)
        slots = slots[state.nvme.devices(slots) == path]
        state.nvme_changed[slots] = False
        sealed = state.nvme.sealed(slots)
        holds = slots[sealed]
        rows = state.nvme.row[holds]
        published = np.zeros(len(holds), dtype=NVME_ENTRY)
        published["slot"], published["generation"] = holds, state.nvme.generations(holds)
        published["namespace"], published["depth"] = columns.namespace[rows], columns.depth[rows]
        published["touch"], published["hash"] = columns.touch[rows], columns.hash[rows]
        published["parent"] = self.parent_hashes(rows)
        published["ns_digest"] = state.namespaces.digests16(columns.namespace[rows])
        return NvmeChanges(published=published, freed=slots[~sealed])

    # -- out

    def take(self, number: int, limit: int) -> NDArray[np.void]:
        """Moves for a path's mover: promotions that somebody waits for, prefetches, then writes; at most `limit`."""
        path = self._paths[number]
        path.up = True
        limit = min(limit, len(self._free_flights))
        reads = self._pop_reads(path, limit)
        parts = [self._moves_of_reads(number, reads)] if len(reads) else []
        if limit > len(reads) and self._writes:
            parts += self._take_writes(number, limit - len(reads))
        return np.concatenate(parts) if parts else np.empty(0, dtype=MOVE)

    def _pop_reads(self, path: _Path, limit: int) -> U32:
        taken: list[U32] = []
        count = 0
        while count < limit and (path.demanded or path.prefetched):
            deadline_ms = None
            if path.demanded:
                slots = path.demanded.popleft()
            else:
                deadline_ms, _, slots = heapq.heappop(path.prefetched)
            slots = slots[self._read_state[slots] == _QUEUED]
            if len(slots) > limit - count:
                rest, slots = slots[limit - count :], slots[: limit - count]
                if deadline_ms is None:
                    path.demanded.appendleft(rest)
                else:
                    heapq.heappush(path.prefetched, (deadline_ms, 0, rest))
            self._read_state[slots] = _MOVING
            self._queued_reads -= len(slots)
            taken.append(slots)
            count += len(slots)
        return np.concatenate(taken) if taken else NO_SLOTS

    def _moves_of_reads(self, path: int, dram: U32) -> NDArray[np.void]:
        state = self._state
        nvme = state.columns.nvme[state.dram.row[dram]]
        order = np.argsort(nvme)
        return self._record(MoveKind.READ, path, dram[order], nvme[order])

    def _take_writes(self, path: int, limit: int) -> list[NDArray[np.void]]:
        state = self._state
        rows = self._pop_writes(limit)
        if not len(rows):
            return []
        rows = rows[np.argsort(state.columns.dram[rows])]
        sizes = state.dram.slot_bytes(state.columns.dram[rows])
        parts: list[NDArray[np.void]] = []
        for slot_bytes in np.unique(sizes).tolist():
            of_size = rows[sizes == slot_bytes]
            owner = self._evictor.make_room(
                Tier.NVME, ClassKey(device=path, slot_bytes=int(slot_bytes)), len(of_size)
            )
            nvme = state.nvme.allocate(owner, len(of_size), np.uint64(0))
            lost = of_size[len(nvme) :]
            self._write_state[lost] = 0
            state.counters["dropped_writes"] += len(lost)
            if len(nvme):
                written = of_size[: len(nvme)]
                state.nvme.row[nvme] = written
                state.dram.hold(state.columns.dram[written], mover_bit(path))
                self._write_state[written] = _MOVING
                parts.append(self._record(MoveKind.WRITE, path, state.columns.dram[written], nvme))
        return parts

    def _pop_writes(self, limit: int) -> U32:
        """Up to `limit` queued rows that are still in DRAM alone, the oldest first."""
        state = self._state
        taken: list[U32] = []
        count = 0
        while count < limit and self._writes:
            rows = self._writes.popleft()
            if len(rows) > limit - count:
                self._writes.appendleft(rows[limit - count :])
                rows = rows[: limit - count]
            self._queued_writes -= len(rows)
            good = state.table.sealed(rows) & state.dram.sealed(state.columns.dram[rows])
            good &= (state.columns.nvme[rows] == NONE) & (self._write_state[rows] == _QUEUED)
            self._write_state[rows[~good]] = 0
            taken.append(rows[good])
            count += int(good.sum())
        return np.unique(np.concatenate(taken)) if taken else NO_SLOTS

    def _record(self, kind: MoveKind, path: int, dram: U32, nvme: U32) -> NDArray[np.void]:
        """Enters moves into the table of those in flight and writes them out."""
        state, columns = self._state, self._state.columns
        n = len(dram)
        at, self._free_flights = self._free_flights[:n], self._free_flights[n:]
        rows = state.dram.row[dram]
        moves = np.zeros(n, dtype=MOVE)
        moves["id"] = (np.arange(self._serial, self._serial + n, dtype=np.uint64) << np.uint64(14)) | at
        self._serial += n
        moves["kind"] = kind
        moves["dram_slot"], moves["nvme_slot"] = dram, nvme
        moves["dram_extent"], moves["nvme_extent"] = state.dram.extent[dram], state.nvme.extent[nvme]
        sizes = state.dram.slot_bytes(dram)
        dram_base = columns.extent_slot_base[moves["dram_extent"]]
        nvme_base = columns.extent_slot_base[moves["nvme_extent"]]
        moves["dram_offset"] = (dram - dram_base).astype(np.uint64) * sizes
        moves["nvme_offset"] = (nvme - nvme_base).astype(np.uint64) * (sizes + np.uint64(TRAILER_BYTES))
        moves["length"] = sizes
        moves["generation"] = state.nvme.generations(nvme)
        moves["namespace"], moves["depth"] = columns.namespace[rows], columns.depth[rows]
        moves["hash"], moves["parent"] = columns.hash[rows], self.parent_hashes(rows)
        moves["ns_digest"] = state.namespaces.digests16(columns.namespace[rows])
        flights = self._flight
        flights["id"][at], flights["kind"][at], flights["path"][at] = moves["id"], kind, path
        flights["row"][at], flights["row_word"][at] = rows, columns.state[rows]
        flights["dram"][at], flights["nvme"][at] = dram, nvme
        flights["nvme_generation"][at] = moves["generation"]
        return moves

    def parent_hashes(self, rows: U32) -> U64:
        """[n, 2] hash of each row's parent, zeros where it has left the table. A hint: nothing is served by it."""
        columns = self._state.columns
        parents = columns.parent[rows]
        known = parents != NONE
        safe = np.where(known, parents, 0)
        known &= columns.depth[safe] + 1 == columns.depth[rows]
        known &= columns.namespace[safe] == columns.namespace[rows]
        known &= (columns.state[safe] & np.uint64(0xFF)) != np.uint64(State.FREE)
        found: U64 = np.where(known[:, None], columns.hash[safe], np.uint64(0))
        return found

    # -- back in

    def done(self, number: int, ids: U64, statuses: U8) -> None:
        """What became of moves; ids that are not in flight on this path are passed over."""
        at = (ids & np.uint64(_MAX_IN_FLIGHT - 1)).astype(np.int64)
        known = (self._flight["id"][at] == ids) & (ids != 0) & (self._flight["path"][at] == number)
        at, first = np.unique(at[known], return_index=True)
        self._finish(number, self._flight[at], statuses[known][first])
        self._release_flights(at)

    def mover_dead(self, number: int) -> None:
        """All that the path's mover had fails; whatever else its bit or a half-written slot kept is free again."""
        state = self._state
        path = self._paths[number]
        path.up = False
        mine = np.flatnonzero((self._flight["id"] != 0) & (self._flight["path"] == number))
        self._finish(number, self._flight[mine], np.full(len(mine), MoveStatus.CANCELLED, dtype=np.uint8))
        self._release_flights(mine)
        path.demanded.clear()
        path.prefetched.clear()
        held = state.dram.held_by(mover_bit(number))
        filling = state.dram.filling(held)
        self._undo_reads(held[filling])
        state.dram.unhold(held[~filling], mover_bit(number))
        torn = np.flatnonzero((state.nvme.state & np.uint64(0xFF)) == np.uint64(SlotState.FILLING)).astype(
            np.uint32
        )
        state.nvme.free(torn[state.nvme.devices(torn) == number])

    def _release_flights(self, at: NDArray[np.int64]) -> None:
        self._flight["id"][at] = 0
        self._free_flights = np.concatenate((self._free_flights, at.astype(np.uint32)))

    def _finish(self, path: int, flights: NDArray[np.void], statuses: U8) -> None:
        state = self._state
        reads = flights["kind"] == MoveKind.READ
        for status, act in (
            (MoveStatus.OK, self._read_ok),
            (MoveStatus.CORRUPT, self._read_corrupt),
            (MoveStatus.IO_ERROR, self._read_failed),
            (MoveStatus.CANCELLED, self._read_cancelled),
        ):
            self._each(act, flights[reads & (statuses == status)])
        self._each(self._write_ok, flights[~reads & (statuses == MoveStatus.OK)])
        bad = (statuses == MoveStatus.IO_ERROR) | (statuses == MoveStatus.CORRUPT)
        self._each(self._write_failed, flights[~reads & bad])
        self._each(self._write_cancelled, flights[~reads & (statuses == MoveStatus.CANCELLED)])
        errors = int(np.count_nonzero(bad & ~(reads & (statuses == MoveStatus.CORRUPT))))
        if errors:
            state.counters[f"io_errors_path_{path}"] += errors
            state.counters["io_errors"] += errors

    def _each(self, act: Callable[[NDArray[np.void]], None], flights: NDArray[np.void]) -> None:
        if len(flights):
            act(flights)

    # -- reads

    def _read_ok(self, flights: NDArray[np.void]) -> None:
        state = self._state
        self._read_state[flights["dram"]] = 0
        linked = state.dram.row[flights["dram"]] == flights["row"]
        slots, rows = flights["dram"][linked], flights["row"][linked]
        state.fault("read.done")
        state.dram.set_state(slots, SlotState.SEALED)
        state.fault("read.sealed")
        state.dram.unhold(slots, mover_bit(int(flights["path"][0])))
        state.dram.free(flights["dram"][~linked])
        state.counters["promotions"] += len(slots)
        state.waits.resolved(rows)

    def _read_corrupt(self, flights: NDArray[np.void]) -> None:
        self._state.counters["checksum_failures"] += len(flights)
        self._lose(flights, SlotState.FREE)

    def _read_failed(self, flights: NDArray[np.void]) -> None:
        self._lose(flights, SlotState.QUARANTINED)

    def _read_cancelled(self, flights: NDArray[np.void]) -> None:
        self._undo_reads(flights["dram"])

    def _lose(self, flights: NDArray[np.void], left: SlotState) -> None:
        """The blocks cannot be read from storage: they are gone from there, and gone altogether if nowhere else."""
        state = self._state
        self._undo_reads(flights["dram"])
        nvme = flights["nvme"]
        still = state.nvme.sealed(nvme) & (state.nvme.generations(nvme) == flights["nvme_generation"])
        nvme = nvme[still & (state.nvme.row[nvme] == flights["row"])]
        if left is SlotState.QUARANTINED:
            self._quarantine(nvme)
        else:
            state.drop_copies(Tier.NVME, nvme, MissCause.CORRUPT)

    def _quarantine(self, nvme: U32) -> None:
        """SEALED slots whose medium failed are never given out again."""
        state = self._state
        rows = state.nvme.row[nvme]
        state.columns.nvme[rows] = NONE
        state.nvme_changed[nvme] = True
        last = rows[~state.table.has_copy(rows)]
        state.ghosts.note(state.columns.hash[last], MissCause.CORRUPT)
        state.table.free(last)
        state.nvme.set_state(nvme, SlotState.QUARANTINED)
        state.nvme.row[nvme] = NONE
        state.waits.resolved(rows)

    # -- writes

    def _end_write(self, flights: NDArray[np.void]) -> None:
        """The mover no longer reads the DRAM slots."""
        state = self._state
        self._write_state[flights["row"]] = 0
        state.dram.unhold(flights["dram"], mover_bit(int(flights["path"][0])))

    def _write_ok(self, flights: NDArray[np.void]) -> None:
        state = self._state
        rows, nvme = flights["row"], flights["nvme"]
        same = (state.columns.state[rows] >> GENERATION_SHIFT) == (flights["row_word"] >> GENERATION_SHIFT)
        same &= state.table.sealed(rows) & (state.columns.nvme[rows] == NONE)
        state.fault("write.done")
        state.complete(Tier.NVME, rows[same], nvme[same], 0)
        state.nvme.free(nvme[~same])
        state.counters["writes"] += int(same.sum())
        self._end_write(flights)

    def _write_failed(self, flights: NDArray[np.void]) -> None:
        state = self._state
        state.nvme.row[flights["nvme"]] = NONE
        state.nvme.set_state(flights["nvme"], SlotState.QUARANTINED)
        state.counters["dropped_writes"] += len(flights)
        self._end_write(flights)

    def _write_cancelled(self, flights: NDArray[np.void]) -> None:
        self._state.nvme.free(flights["nvme"])
        self._end_write(flights)
        self.queue_writes(flights["row"])
