"""Prefetch: what queued requests will ask for comes into DRAM before they do, the soonest deadline first.

It holds nothing and hurts nobody. Slots are those that are free beyond the reserve, then those of blocks that storage
has too and that no queued request wants sooner. Together, blocks that were brought up and not asked for yet take at
most a part of DRAM (`StoreLimits.prefetch_share`): a queue longer than DRAM is brought up as fast as it is used, never
faster. Each block is brought up once for a request, so whatever goes wrong costs at most one needless read; what it
had in HBM and lost there while it waits, or what was queued and not begun, is looked at again, before what others want
later.

Reads are queued a little ahead of the movers alone, so that what is said later can still come sooner. What somebody
waits for goes before all of them (`kvstore.tiering.promoting`).
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT, NONE, SessionState
from kvstore.leases.sessions import Session
from kvstore.moves import U32, U64, Grant, Outcome
from kvstore.recorder import Event
from kvstore.state import StoreState
from kvstore.tables.slots import ClassKey, SlotClass
from kvstore.tiering.early import Wish
from kvstore.tiering.next_turns import ExpectedTurn, NextTurns
from kvstore.tiering.promoting import Promoting
from kvstore.tiering.queued import NO_DEADLINE_MS, QueuedRequest
from kvstore.victims.evicting import Evictor

__all__ = ["Prefetching"]

_AHEAD_BYTES = 256 << 20
"""Reads that wait for each path's mover: 40 ms of a fast disk, and never fewer than `_AHEAD_BLOCKS`."""
_AHEAD_BLOCKS = 64
_LOOKED_AT = 1024
"""Rows of a request that are looked at together: 0.1 ms."""


_FEW = 64
_IDLE_MS = 500
"""So long nothing was read or written and nobody waited: then some is read for a next turn, and again so much later."""
_IDLE_BYTES = 32 << 20
_EXPECTED = 16
"""Conversations that are looked at in a turn of the background."""
_ASKED_MS = 30_000
"""A request that has not asked again for so long is believed no more: an engine that waits asks every few seconds."""
_Key = tuple[int, int, int, int]  # QueuedRequest.key


class Prefetching:
    """What is brought up ahead, and when. Every call but `pump` is O(blocks of the request)."""

    __slots__ = ("_busy_ms", "_evictor", "_pending", "_promoting", "_served", "_state", "_stuck", "turns")

    def __init__(self, state: StoreState, evictor: Evictor, promoting: Promoting) -> None:
        self._state = state
        self._evictor = evictor
        self._promoting = promoting
        self._pending: dict[ClassKey, list[_Key]] = {}
        """Heaps of requests; those that are no longer queued are passed over. Classes do not share slots."""
        self._stuck: set[ClassKey] = set()
        """Where the last search for victims found none; the background lets the next one begin."""
        self._busy_ms = 0
        self._served: list[tuple[U32, U64, int]] = []
        """Prompts, and when they were served, that `turns` is to be told of: nobody waits for that behind an answer."""
        self.turns: NextTurns | None = None
        """Whose next turns are read ahead while nothing else is read or written; None: nobody's."""

    # -- what clients say

    def prefetch(self, session: Session, namespace: int, lease: int, hashes: U64, deadline_ms: int) -> None:
        """A request waits. `deadline_ms`: a time when it is expected to run; 0: unknown."""
        state = self._state
        self.cancel(session, lease)
        rows = state.table.locate(hashes, namespace)
        known = rows != NONE
        rows = rows[: len(known) if known.all() else int(known.argmin())]
        if not len(rows):
            return
        while len(state.queued.of_session(session.id)) >= state.limits.max_waiting_leases:
            self.cancel(session, state.queued.last_of(session.id))
        request = state.queued.put(session.id, lease, rows, state.words(rows), deadline_ms)
        self._promoting.hasten(rows, request.deadline_ms)
        self._push(session.dram_key, request.key)
        state.recorder.note(Event.PREFETCH, session.id, len(rows), c=lease)
        self.pump()

    def answered(self, session: Session, lease: int, grant: Grant, reserve: int, rows: U32) -> None:
        """The request has asked for its blocks itself ([n] rows, NONE where there was none); until it is given all of
        them, and the `reserve`, they stay wanted, and it has its turn among those that asked.

        Whatever it lacks: one whose blocks were all on their way already, or that lacks HBM alone, would keep its
        deadline, and whoever asked after it would push out what has come for it.
        """
        queued = self._state.queued
        if self.turns is not None and len(grant.reserve_slots) >= reserve and grant.complete:
            known = rows != NONE
            rows = rows if known.all() else rows[: int(known.argmin())]
            if len(rows):
                self._served.append((rows, self._state.words(rows), self._state.now_ms))
        request = queued.get(session.id, lease)
        if request is None:
            return
        if len(grant.reserve_slots) >= reserve and (grant.outcomes < Outcome.PROMOTING).all():
            queued.end(session.id, lease)
            self._stuck.clear()
        else:
            queued.ask(session.id, lease, request.rows, request.words, self._state.now_ms)

    def cancel(self, session: Session, lease: int) -> None:
        """The request waits no more. Takes back what no mover has begun and nobody else wants."""
        state = self._state
        request = state.queued.end(session.id, lease)
        if request is None:
            return
        self._stuck.clear()
        rows = request.still(0, len(request.rows), state.columns.state)
        slots = state.columns.dram[rows[state.queued.wanted[rows] == 0]]
        self._promoting.cancel_queued(slots[slots != NONE])

    def forget_session(self, session: Session) -> None:
        """None of its requests waits any more."""
        for lease in self._state.queued.of_session(session.id):
            self.cancel(session, lease)

    # -- what is done about it

    def tick(self, queued_writes: int) -> None:
        """The background's turn: perhaps there is room where there was none, or nothing to do for a disk."""
        self._stuck.clear()
        for session, lease in self._state.queued.asked_before(self._state.now_ms - _ASKED_MS):
            self.cancel(self._state.sessions.get(session), lease)
        self.pump()
        if queued_writes or self._promoting.under_way or len(self._state.queued):
            self._busy_ms = self._state.now_ms
        elif self.turns is not None and self._state.now_ms - self._busy_ms >= _IDLE_MS:
            self._busy_ms = self._state.now_ms
            self._read_for_next_turn(self.turns)

    def pump(self) -> None:
        """Queues reads, the soonest deadline first, as far as there is room for them. O(1) where nothing is to do.

        Strictly in order: while the next request finds no room, none behind it takes what it waits for.
        """
        if self._served and self.turns is not None:
            served, self._served = self._served, []
            for rows, words, now_ms in served:
                self.turns.turn(rows, words, now_ms)
        lacking = self._serve_who_asked()
        for lost in self._state.queued.look_again(self._state.columns.depth):
            self._push(self._state.sessions.get(lost.session).dram_key, lost.key)
        for key in list(self._pending):
            if key in lacking:
                continue
            heap = self._pending[key]
            while heap:
                request = self._live(heap[0])
                if request is not None and not self._bring(request):
                    break
                heapq.heappop(heap)
            if not heap:
                del self._pending[key]

    def _serve_who_asked(self) -> set[ClassKey]:
        """Begins what requests wait for that found no room when they asked; classes where somebody still lacks it."""
        lacking: set[ClassKey] = set()
        for request in self._state.queued.lacking_room():
            key = self._state.sessions.get(request.session).dram_key
            if key in lacking or not self._give_room(request, key):
                lacking.add(key)
        return lacking

    def _give_room(self, request: QueuedRequest, key: ClassKey) -> bool:
        """Goes on with what a request waits for; whether all of it is on its way, or there is no use in waiting."""
        state, promoting = self._state, self._promoting
        last_hope = request is state.queued.first() and not promoting.under_way
        if key in self._stuck and not last_hope:
            return False
        rows = request.still(0, len(request.rows), state.columns.state)
        below = rows[self._is_below(state.sessions.get(request.session), rows)]
        started = promoting.promote(key, below, request.deadline_ms)
        coming = rows[state.promoted(rows)]
        if len(coming):
            state.waits.wait_rows(request.session, request.lease, coming, state.words(coming))
        if started < len(below) and (started or not last_hope):
            self._stuck.add(key)
            return False
        request.lacks_room = False
        if not len(coming):
            state.waits.tell(request.session, request.lease)
        return True

    def _push(self, of_class: ClassKey, key: _Key) -> None:
        heap = self._pending.setdefault(of_class, [])
        if len(heap) > 2 * len(self._state.queued) + _FEW:  # else they pile up behind one that finds no room
            heap[:] = [each for each in heap if self._live(each) is not None]
            heapq.heapify(heap)
        heapq.heappush(heap, key)

    def _live(self, key: _Key) -> QueuedRequest | None:
        """The request, while it is queued as it was."""
        request = self._state.queued.get(key[2], key[3])
        return request if request is not None and request.key == key else None

    def _bring(self, request: QueuedRequest) -> bool:
        """Goes on with one request; whether all of it was looked at."""
        state = self._state
        if state.sessions.state(request.session) is not SessionState.ATTACHED:
            return True
        session = state.sessions.get(request.session)
        while request.looked_at < len(request.rows):
            if not self._has_room(
                session.dram_key
            ):  # said before rows are looked at: it is asked after every call
                return False
            first = request.looked_at
            last = min(first + _LOOKED_AT, len(request.rows))
            rows = request.still(first, last, state.columns.state)
            wanted = rows[self._is_below(session, rows)]
            started = self._start(session.dram_key, wanted, request.deadline_ms)
            if started < len(wanted):
                where = np.flatnonzero(request.rows[first:last] == wanted[started])
                request.looked_at = first + int(where[0])
                return False
            request.looked_at = last
        return True

    def _is_below(self, session: Session, rows: U32) -> NDArray[np.bool_]:
        """[n] whether storage has a block of the session's size that neither DRAM nor its HBM has."""
        state = self._state
        below = self._promoting.promotable(rows)
        if session.device is not None:
            hbm = state.columns.hbm[session.device, rows]
            below &= ~(state.hbm.sealed(hbm) | state.hbm.filling(hbm))
        sizes = state.nvme.slot_bytes(np.where(below, state.columns.nvme[rows], np.uint32(0)))
        below &= sizes == np.uint64(session.slot_bytes)
        return below

    def _start(self, key: ClassKey, rows: U32, deadline_ms: int) -> int:
        """Queues reads of the first of these rows, as many as there is room for; how many."""
        if not len(rows):
            return 0
        count = min(len(rows), self._allowed(key))
        if count <= 0:
            return 0
        owner = self._state.dram.class_of(key)
        if key not in self._stuck and len(owner.free) - self._evictor.reserve_of(owner) < count:
            self._make_room(owner, count, deadline_ms)
        slots = self._promoting.prefetch(key, rows[:count], deadline_ms, Wish.PREFETCH)
        self._state.counters["prefetches"] += len(slots)
        return len(slots)

    def _make_room(self, owner: SlotClass, count: int, deadline_ms: int) -> None:
        """Beyond the reserve: of blocks that nobody wants, then of reads that nobody has begun, then of the rest."""
        state, key = self._state, owner.key

        def may_go(victims: U32) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = state.columns.nvme[victims] != NONE
            return found & state.queued.not_before(deadline_ms, victims)

        reserve = self._evictor.reserve_of(owner)
        self._promoting.make_way(key, count, deadline_ms, kept_free=reserve)
        self._evictor.make_room_among(key, count, may_go, kept_free=reserve)
        if len(owner.free) <= self._evictor.reserve_of(owner):
            self._stuck.add(key)

    def _has_room(self, key: ClassKey) -> bool:
        """Whether one more block could be begun, as far as can be told in O(1)."""
        if key in self._stuck:
            owner = self._state.dram.class_of(key)
            if len(owner.free) <= self._evictor.reserve_of(owner):
                return False
        return self._allowed(key) > 0

    def _allowed(self, key: ClassKey) -> int:
        """Blocks more that may be under way or unused, by the size of DRAM and by what waits for the movers."""
        state = self._state
        slots = state.dram.class_of(key).slots + state.unassigned_slots(key)
        window = int(slots * state.limits.prefetch_share) - state.early.unused(key.slot_bytes)
        ahead = max(_AHEAD_BLOCKS, _AHEAD_BYTES // key.slot_bytes) * state.limits.paths
        return min(
            window, ahead - self._promoting.queued_ahead, state.limits.max_reads - self._promoting.queued
        )

    # -- while nothing else is to be done

    def _read_for_next_turn(self, turns: NextTurns) -> None:
        """Queues some reads for the conversation that is likeliest to go on soon and has blocks on disk alone."""
        state = self._state
        for turn in turns.due(state.now_ms, _EXPECTED):
            same = (state.words(turn.rows) >> GENERATION_SHIFT) == (turn.words >> GENERATION_SHIFT)
            rows = turn.rows[same]
            rows = rows[self._promoting.promotable(rows) & (state.columns.hbm[:, rows] == NONE).all(axis=0)]
            if len(rows) and self._read_some(turns, turn, rows):
                return
            turns.brought(turn)

    def _read_some(self, turns: NextTurns, turn: ExpectedTurn, rows: U32) -> bool:
        """Whether there was room for some, free or of blocks that are worth less than half as much by their age."""
        state = self._state
        sizes = state.nvme.slot_bytes(state.columns.nvme[rows])
        key = ClassKey(device=0, slot_bytes=int(sizes[0]))
        count = min(int((sizes == sizes[0]).sum()), self._allowed(key), max(1, _IDLE_BYTES // key.slot_bytes))
        if count <= 0:
            return False

        def may_go(victims: U32) -> NDArray[np.bool_]:
            touched_ms = (state.columns.touch[victims] >> np.uint64(20)).astype(np.int64)
            found: NDArray[np.bool_] = turns.worth_of_all(touched_ms, state.now_ms) * 2 < turn.worth
            found &= (state.columns.nvme[victims] != NONE) & (state.queued.wanted[victims] == 0)
            return found

        owner = state.dram.class_of(key)
        self._evictor.make_room_among(key, count, may_go, kept_free=self._evictor.reserve_of(owner))
        wanted = rows[sizes == sizes[0]][:count]
        return len(self._promoting.prefetch(key, wanted, NO_DEADLINE_MS, Wish.NEXT_TURN)) > 0
