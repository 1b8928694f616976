"""Promotions: blocks that only storage has, on their way into DRAM.

A promotion is a state of the DRAM slot: FILLING, linked to its row and held by the mover's bit from the moment it is
queued, so that one read serves all who wait. Owns the queues of each path.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import MAX_MOVERS, NONE, SlotState, Tier
from kvstore.moves import U8, U32, MissCause
from kvstore.state import NO_SLOTS, StoreState, mover_bit
from kvstore.tables.slots import ClassKey, SlotClass
from kvstore.tiering.early import Wish
from kvstore.tiering.health import PathHealth
from kvstore.tiering.queued import NO_DEADLINE_MS
from kvstore.victims.evicting import Evictor
from kvstore.victims.quotas import ANYBODY

__all__ = ["Promoting"]

_PROBE_STRIDE = 7919  # a prime: blocks that are probed one after the other lie far apart
_PREFETCHED, _DEMANDED, _MOVING = 1, 2, 3


@dataclass(slots=True)
class _Path:
    """Queues of one path. Entries are checked when they are taken: a slot that is no longer wanted, or that
    another path reads into by now, is passed over."""

    up: bool = True
    demanded: deque[U32] = field(default_factory=deque)
    prefetched: list[tuple[int, int, U32]] = field(default_factory=list)
    """Heap by (deadline, order of arrival)."""


class Promoting:
    """Reads, from the wish to the outcome."""

    __slots__ = (
        "_evictor",
        "_moving",
        "_order",
        "_paths",
        "_probes",
        "_progress",
        "_state",
        "health",
        "queued",
        "queued_ahead",
    )

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._paths = [_Path() for _ in range(min(state.limits.paths, MAX_MOVERS))]
        self.health = [PathHealth() for _ in self._paths]
        self._order = 0
        self._probes = 0
        self._progress: U8 = np.zeros(len(state.dram), dtype=np.uint8)  # of each DRAM slot
        self._moving = 0
        self.queued = 0
        """Promotions that no mover has yet."""
        self.queued_ahead = 0
        """Of these, those that nobody waits for."""

    @property
    def under_way(self) -> int:
        """Promotions that wait for a mover or that one has."""
        return self.queued + self._moving

    # -- paths

    def set_up(self, path: int) -> None:
        """The path has a mover."""
        self._paths[path].up = True

    def set_down(self, path: int) -> None:
        """The path has none: what only it has is a miss until there is one."""
        self._paths[path] = _Path(up=False)

    def all_down(self) -> None:
        """After a restart: a path is used again once its mover asks for moves."""
        for number in range(len(self._paths)):
            self.set_down(number)

    def writable(self) -> list[int]:
        """Live paths with memory that take writes."""
        extents, now_ms = self._state.extents, self._state.now_ms
        return [
            number
            for number, path in enumerate(self._paths)
            if path.up
            and not self._state.hung[number]
            and self.health[number].writes.open(now_ms)
            and extents.of(Tier.NVME, number)
        ]

    # -- in

    def promotable(self, rows: U32) -> NDArray[np.bool_]:
        """[n] SEALED rows that storage on a live path that gives blocks has and DRAM has not."""
        columns = self._state.columns
        nvme = columns.nvme[rows]
        found: NDArray[np.bool_] = (nvme != NONE) & (columns.dram[rows] == NONE)
        if found.any():
            up = np.zeros(256, dtype=np.bool_)
            now_ms = self._state.now_ms
            up[: len(self._paths)] = [
                path.up and health.reads.open(now_ms)
                for path, health in zip(self._paths, self.health, strict=True)
            ]
            up &= ~self._state.hung
            found[found] = up[self._state.nvme.devices(nvme[found])]
        return found

    def promote(self, key: ClassKey, rows: U32, due_ms: int) -> int:
        """Queues promotions for a run of rows that somebody waits for; returns how many of the leading ones.

        Makes room where needed, but not of what a queued request wants before `due_ms`: first of blocks that nobody
        wants, then of prefetches that no mover has begun, then of the rest.
        """
        count = min(len(rows), self._state.limits.max_reads - self.queued)
        if count <= 0:
            return 0
        owner = self._make_room(key, count, int(self._state.columns.namespace[rows[0]]), due_ms)
        # A chain longer than the tier must not chase itself through it.
        count = min(count, len(owner.free), max(1, owner.slots // 2))
        self._start(key, rows[:count], None)
        return count

    def _make_room(self, key: ClassKey, count: int, namespace: int, due_ms: int) -> SlotClass:
        state = self._state
        asks, before = state.quotas.asks(namespace), len(state.dram.class_of(key).free)

        def later(rows: U32) -> NDArray[np.bool_]:
            return state.queued.not_before(due_ms, rows)

        def later_and_lower(rows: U32) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = state.columns.nvme[rows] != NONE
            return found & later(rows)

        self.make_way(key, count, due_ms, asks=asks)
        for may_go in (later_and_lower, later):  # the only copy of a block last
            owner = self._evictor.make_room_among(key, count, may_go, asks=asks)
            if len(owner.free) >= count:
                break
        if len(owner.free) < count:
            self._evictor.short[Tier.DRAM, key] = None
        state.counters["evictions_dram_inline"] += max(0, len(owner.free) - before)
        return owner

    def make_way(
        self, key: ClassKey, count: int, due_ms: int, *, kept_free: int = 0, asks: int = ANYBODY
    ) -> None:
        """As far as prefetches are queued: room, with `kept_free` more, of blocks on disk that nobody wants, then of
        those reads, which are worth less than a block that is there."""
        if not self.queued_ahead:
            return
        state = self._state

        def unwanted(rows: U32) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = (state.columns.nvme[rows] != NONE) & (state.queued.wanted[rows] == 0)
            return found

        owner = self._evictor.make_room_among(key, count, unwanted, kept_free=kept_free, asks=asks)
        self._take_back(key, count + kept_free - len(owner.free), due_ms)

    def _take_back(self, key: ClassKey, count: int, due_ms: int) -> None:
        """Undoes up to `count` prefetches that no mover has and nobody wants by then, those needed last first; they are
        begun again when there is room."""
        queued = [slots for path in self._paths for _, _, slots in path.prefetched]
        if count <= 0 or not queued:
            return
        state, slots = self._state, np.unique(np.concatenate(queued))
        slots = slots[self._progress[slots] == _PREFETCHED]
        slots = slots[state.dram.slot_bytes(slots) == np.uint64(key.slot_bytes)]
        rows = state.dram.row[slots]
        may_go = state.queued.not_before(due_ms, rows) & (state.waits.waited[rows] == 0)
        slots, rows = slots[may_go], rows[may_go]
        wanted_ms = np.where(state.queued.wanted[rows] > 0, state.queued.soonest_ms[rows], NO_DEADLINE_MS)
        last_first = np.lexsort((state.columns.depth[rows], wanted_ms))[::-1]
        state.queued.lost(rows[last_first[:count]])
        self.undo(slots[last_first[:count]])
        for path in self._paths:  # else they pile up, where a mover never comes to those that are needed last
            left = [
                (at, order, part[self._progress[part] == _PREFETCHED]) for at, order, part in path.prefetched
            ]
            path.prefetched = [entry for entry in left if len(entry[2])]
            heapq.heapify(path.prefetched)

    def prefetch(self, key: ClassKey, rows: U32, deadline_ms: int, wish: Wish) -> U32:
        """As `promote`, into free slots beyond the reserve only; returns the DRAM slots of those that were queued."""
        owner = self._state.dram.class_of(key)
        spare = len(owner.free) - self._evictor.reserve_of(owner)
        count = min(len(rows), spare, self._state.limits.max_reads - self.queued)
        if count <= 0:
            return NO_SLOTS
        slots = self._start(key, rows[:count], deadline_ms)
        self._state.early.begin(slots, wish)
        return slots

    def probe(self, number: int) -> None:
        """Where a path's reads are paused and nobody asks for one, one of its blocks is asked for now and then.

        Another each time, so that one which cannot be read does not keep the path paused. O(NVMe slots).
        """
        state, streak, path = self._state, self.health[number].reads, self._paths[number]
        if not streak.paused or not streak.open(state.now_ms) or not path.up or state.hung[number]:
            return
        if path.demanded or path.prefetched:
            return
        sealed = (state.nvme.state & np.uint64(0xFF)) == np.uint64(SlotState.SEALED)
        slots = np.flatnonzero(sealed).astype(np.uint32)
        slots = slots[state.nvme.devices(slots) == number]
        slots = slots[state.columns.dram[state.nvme.row[slots]] == NONE]
        if len(slots):
            self._probes += 1
            at = self._probes * _PROBE_STRIDE % len(slots)
            chosen = slots[at : at + 1]
            key = ClassKey(device=0, slot_bytes=int(state.nvme.slot_bytes(chosen)[0]))
            streak.probing = self.promote(key, state.nvme.row[chosen], NO_DEADLINE_MS) > 0

    def demand(self, rows: U32) -> None:
        """Prefetched rows are wanted now: they go before what is only prefetched."""
        slots = self._state.columns.dram[rows]
        slots = slots[slots != NONE]
        self._state.early.asked(slots)
        slots = slots[self._progress[slots] == _PREFETCHED]
        self._progress[slots] = _DEMANDED
        self.queued_ahead -= len(slots)
        self._enqueue(slots, None)

    def hasten(self, rows: U32, deadline_ms: int) -> None:
        """Rows that are prefetched, perhaps for another, are needed at that time, perhaps sooner than was said."""
        slots = self._state.columns.dram[rows]
        slots = slots[slots != NONE]
        # What is queued twice is taken where it comes first.
        self._enqueue(slots[self._progress[slots] == _PREFETCHED], deadline_ms)

    def _start(self, key: ClassKey, rows: U32, deadline_ms: int | None) -> U32:
        state = self._state
        paths = state.nvme.devices(state.columns.nvme[rows])
        started: list[U32] = []
        for path in np.unique(paths).tolist():
            of_path = rows[paths == path]
            slots = state.dram.allocate(state.dram.class_of(key), len(of_path), mover_bit(path))
            state.link(Tier.DRAM, of_path, slots, 0)
            self._progress[slots] = _DEMANDED if deadline_ms is None else _PREFETCHED
            self.queued += len(slots)
            self.queued_ahead += 0 if deadline_ms is None else len(slots)
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
        slots = slots[self._progress[slots] == _PREFETCHED]
        self.undo(slots[state.waits.waited[state.dram.row[slots]] == 0])

    def cancel_all(self, path: int) -> None:
        """Reads of a path that its mover does not have yet are undone, whoever waits: they are misses."""
        slots = self._state.dram.held_by(mover_bit(path))
        self.undo(slots[(self._progress[slots] == _PREFETCHED) | (self._progress[slots] == _DEMANDED)])

    def undo(self, slots: U32) -> None:
        """FILLING DRAM slots that are to be read into, or were: no mover touches them any more."""
        progress = self._progress[slots]
        ahead = int(np.count_nonzero(progress == _PREFETCHED))
        self.queued_ahead -= ahead
        self.queued -= ahead + int(np.count_nonzero(progress == _DEMANDED))
        self._moving -= int(np.count_nonzero(progress == _MOVING))
        self._progress[slots] = 0
        self._state.early.gone(slots)
        self._state.unlink_promotions(slots)
        self._state.dram.free(slots)

    # -- out

    def take(self, number: int, limit: int, early: int) -> U32:
        """DRAM slots to read into, at most `limit`: those that somebody waits for, then prefetches by deadline.

        At most `early` of the latter: whoever comes next waits for all that a mover has. Both are sorted by NVMe slot.
        """
        path = self._paths[number]
        if not path.demanded and not path.prefetched:  # asked after every message
            return NO_SLOTS
        demanded = self._take_demanded(number, limit)
        ahead = self._take_ahead(number, min(early, limit - len(demanded)))
        self.queued_ahead -= len(ahead)
        taken = np.concatenate((self._by_place(demanded), self._by_place(ahead)))
        self._progress[taken] = _MOVING
        self._moving += len(taken)
        self.queued -= len(taken)
        return taken

    def _take_demanded(self, number: int, limit: int) -> U32:
        path, taken = self._paths[number], NO_SLOTS
        while len(taken) < limit and path.demanded:
            slots = self._still(number, path.demanded.popleft(), _DEMANDED)
            slots = slots[~np.isin(slots, taken)]
            room = limit - len(taken)
            if len(slots) > room:
                path.demanded.appendleft(slots[room:])
            taken = np.concatenate((taken, slots[:room]))
        return taken

    def _take_ahead(self, number: int, limit: int) -> U32:
        path, taken = self._paths[number], NO_SLOTS
        while len(taken) < limit and path.prefetched:
            deadline_ms, order, slots = heapq.heappop(path.prefetched)
            slots = self._still(number, slots, _PREFETCHED)
            slots = slots[~np.isin(slots, taken)]
            room = limit - len(taken)
            if len(slots) > room:
                heapq.heappush(path.prefetched, (deadline_ms, order, slots[room:]))
            taken = np.concatenate((taken, slots[:room]))
        return taken

    def _still(self, number: int, slots: U32, progress: int) -> U32:
        """Those that this path is to read into: one that was undone since it was queued may be another's."""
        found: U32 = slots[self._progress[slots] == progress]
        return found[self._state.dram.held(found, mover_bit(number))]

    def _by_place(self, slots: U32) -> U32:
        """Sorted by where storage has their blocks."""
        state = self._state
        found: U32 = slots[np.argsort(state.columns.nvme[state.dram.row[slots]])]
        return found

    # -- outcomes: flights of kind READ, all of one path

    def succeeded(self, path: int, flights: NDArray[np.void]) -> None:
        """The bytes are in DRAM, and are what was written."""
        state, slots = self._state, flights["dram"]
        self._moving -= len(slots)
        self._progress[slots] = 0
        state.fault("read.done")
        state.dram.set_state(slots, SlotState.SEALED)
        state.fault("read.sealed")
        state.dram.unhold(slots, mover_bit(path))
        state.early.arrived(slots)
        state.rankings.came(Tier.DRAM, slots)
        state.counters["promotions"] += len(slots)
        state.waits.resolved(flights["row"])

    def corrupt(self, flights: NDArray[np.void]) -> None:
        """The bytes are not what was written: the block is gone from storage."""
        state = self._state
        state.counters["checksum_failures"] += len(flights)
        self.undo(flights["dram"])
        state.drop_copies(Tier.NVME, self._still_there(flights), MissCause.CORRUPT)

    def failed(self, flights: NDArray[np.void]) -> None:
        """Storage does not give the bytes: its slot is never used again, or whoever waits would ask for ever."""
        state = self._state
        self.undo(flights["dram"])
        nvme = self._still_there(flights)
        rows = state.nvme.row[nvme]
        state.nvme_changed[nvme] = 1
        state.columns.nvme[rows] = NONE
        last = rows[~state.table.has_copy(rows)]
        state.ghosts.note(state.columns.hash[last], MissCause.CORRUPT)
        state.table.free(last)
        state.nvme.quarantine(nvme)
        state.waits.resolved(rows)

    def cancelled(self, flights: NDArray[np.void]) -> None:
        """Nobody will read them; the blocks stay where they are."""
        self.undo(flights["dram"])

    def _still_there(self, flights: NDArray[np.void]) -> U32:
        """NVMe slots that still hold the blocks of these flights."""
        state, nvme = self._state, flights["nvme"]
        there = state.nvme.sealed(nvme) & (state.nvme.generations(nvme) == flights["nvme_generation"])
        found: U32 = nvme[there & (state.nvme.row[nvme] == flights["row"])]
        return found
