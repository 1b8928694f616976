"""Acquire: the only place that grants hits and slots for a chain.

Order: find, hold what is a hit, and only then look for free slots, so that making room never evicts what this very
call gives. What is granted is held in the shared tables before the answer exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, Tier, touch_key
from kvstore.leases.sessions import Session
from kvstore.leases.uses import Allowed
from kvstore.moves import U8, U32, U64, Grant, Outcome
from kvstore.recorder import Event
from kvstore.state import NO_SLOTS, StoreState
from kvstore.tables.slots import ClassKey
from kvstore.tables.table import distinct
from kvstore.tiering.promoting import Promoting
from kvstore.tiering.queued import QueuedRequest
from kvstore.victims.evicting import Evictor

__all__ = ["Acquiring", "Request", "note_grant"]


_HIT_HBM, _HIT_DRAM = np.uint8(Outcome.HIT_HBM), np.uint8(Outcome.HIT_DRAM)
_COUNTER: Mapping[int, str] = {
    Outcome.MISS: "blocks_miss",
    Outcome.HIT_HBM: "blocks_hit_hbm",
    Outcome.HIT_DRAM: "blocks_hit_dram",
    Outcome.PROMOTING: "blocks_promoting",
    Outcome.PENDING: "blocks_pending",
    Outcome.NO_SLOT: "blocks_no_slot",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One acquire, checked."""

    session: Session
    namespace: int
    lease: int
    hashes: U64  # [n, 2] the chain from `first` on
    first: int
    parent: int  # row of the block before `first`, NONE where there is none
    reserve: int
    private_fill: bool
    allowed: Allowed
    now_ms: int


class _Draft:
    """A grant being written: one element a block."""

    __slots__ = ("dram", "fresh", "hbm", "outcomes", "rows")

    def __init__(self, rows: U32) -> None:
        n = len(rows)
        self.rows = rows
        self.outcomes: U8 = np.full(n, Outcome.LATER, dtype=np.uint8)
        self.hbm: U32 = np.full(n, NONE, dtype=np.uint32)
        self.dram: U32 = np.full(n, NONE, dtype=np.uint32)
        self.fresh: NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        """Hits that the session did not hold before."""


class Acquiring:
    """Answers acquires."""

    __slots__ = ("_evictor", "_promoting", "_state")

    def __init__(self, state: StoreState, evictor: Evictor, promoting: Promoting) -> None:
        self._state = state
        self._evictor = evictor
        self._promoting = promoting

    def find(self, hashes: U64, namespace: int, allowed: Allowed) -> U32:
        """Row of each block of a chain, NONE where there is none; what is found was used now, unless all is off."""
        table = self._state.table
        rows = table.locate(hashes, namespace)
        if allowed.counts or allowed.writes:
            known = rows != NONE
            table.touch(rows if known.all() else rows[known], self._state.now_ms)
        return rows

    def acquire(self, request: Request, rows: U32) -> Grant:
        """The grant for a request whose blocks have these rows ([n], NONE where there is none)."""
        state = self._state
        request.session.namespace = request.namespace
        state.waits.cancel(request.session.id, request.lease)
        draft = _Draft(rows)
        served = request.allowed.reads
        hits = self._hits(request, draft) if served else 0
        waits = (
            served and hits < len(rows) and not request.private_fill and self._waits_at(request, draft, hits)
        )
        if waits:
            hits = self._spare_others(request, draft, hits)
        fills = 0 if waits else len(rows) - hits
        reserve = self._give_slots(request, draft, hits, fills, 0 if waits else request.reserve)
        short = self._count(draft)
        if not waits and not short:
            self._note_lookup(request, draft, hits)
        block = request.hashes[0].tobytes() if len(rows) else bytes(16)
        given = len(rows) - hits if not waits else 0
        state.recorder.note(
            Event.GRANT, request.session.id, len(rows), hits, given + len(reserve), request.lease, block
        )
        return Grant(
            outcomes=draft.outcomes,
            hbm_slots=draft.hbm,
            hbm_generations=self._generations(Tier.HBM, draft.hbm),
            dram_slots=draft.dram,
            dram_generations=self._generations(Tier.DRAM, draft.dram),
            reserve_slots=reserve,
            reserve_generations=self._generations(Tier.HBM, reserve),
        )

    # -- hits

    def _hits(self, request: Request, draft: _Draft) -> int:
        """Marks and holds the leading run of hits; returns its length."""
        state, session = self._state, request.session
        sealed = state.table.sealed(draft.rows)
        run = len(sealed) if sealed.all() else int(sealed.argmin())
        rows = draft.rows[:run]
        in_hbm, hbm = self._in_hbm(session, rows)
        if in_hbm.all():  # the common case asks nothing of DRAM
            run = state.may_hold(session, run)
            in_hbm, in_dram, dram = in_hbm[:run], np.zeros(run, dtype=np.bool_), NO_SLOTS
        else:
            dram = state.table.slots(Tier.DRAM, rows, 0)
            in_dram = state.dram.sealed(dram) & ~in_hbm
            if session.device is not None and not request.private_fill:
                in_dram &= ~state.hbm.filling(hbm)  # somebody is loading it: wait for that one copy
            in_dram &= self._of_size(Tier.DRAM, dram, in_dram, session)
            if not session.verifies and state.checksums.some_unread:
                in_dram &= ~self._unread(dram, in_dram)
            good = in_hbm | in_dram
            run = state.may_hold(session, run if good.all() else int(good.argmin()))
            in_hbm, in_dram = in_hbm[:run], in_dram[:run]
        for pool, slots, given, wanted, outcome in (
            (state.hbm, hbm, draft.hbm, in_hbm, _HIT_HBM),
            (state.dram, dram, draft.dram, in_dram, _HIT_DRAM),
        ):
            if count := np.count_nonzero(wanted):
                where = slice(run) if count == run else np.flatnonzero(wanted)
                held = slots[where]
                draft.outcomes[where] = outcome
                given[where] = held
                draft.fresh[where] = ~pool.held(held, session.holder)
                pool.hold(held, session.holder)
                if pool is state.dram:
                    state.sample.served(held)
                    state.early.asked(held)
        session.held_bound += run
        state.fault("acquire.held")
        return run

    def _in_hbm(self, session: Session, rows: U32) -> tuple[NDArray[np.bool_], U32]:
        """[n] whether the session's HBM has each block, of its size, and in which slot."""
        state = self._state
        if session.device is None:
            return np.zeros(len(rows), dtype=np.bool_), np.full(len(rows), NONE, dtype=np.uint32)
        hbm = state.table.slots(Tier.HBM, rows, session.device)
        in_hbm = state.hbm.sealed(hbm)
        return in_hbm & self._of_size(Tier.HBM, hbm, in_hbm, session), hbm

    def _of_size(
        self, tier: Tier, slots: U32, wanted: NDArray[np.bool_], session: Session
    ) -> NDArray[np.bool_]:
        """[n] whether the wanted slots have the session's size: two geometries never meet under one namespace."""
        pool = self._state.pool(tier)
        if pool.is_all_of(session.slot_bytes):
            return wanted
        sizes = pool.slot_bytes(np.where(wanted, slots, 0))
        same: NDArray[np.bool_] = sizes == np.uint64(session.slot_bytes)
        return same

    def _unread(self, dram: U32, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[n] whether nobody has looked at the bytes of the wanted slots; somebody will: then they are hits."""
        unread = np.zeros(len(dram), dtype=np.bool_)
        unread[wanted] = self._state.checksums.unread(dram[wanted])
        if unread.any():
            self._state.sample.ask(dram[unread])
        return unread

    # -- slots

    def _give_slots(self, request: Request, draft: _Draft, hits: int, fills: int, reserve: int) -> U32:
        """HBM slots for what is loaded and filled, then the reserve, which is returned."""
        state, session = self._state, request.session
        if session.hbm_key is None:
            draft.outcomes[hits : hits + fills] = Outcome.MISS
            return NO_SLOTS
        loads = np.flatnonzero(draft.outcomes[:hits] == _HIT_DRAM)
        needed = len(loads) + fills
        asked = state.may_hold(session, needed + reserve)
        if not asked:
            if needed:
                self._no_slot(request, draft, int(loads[0]) if len(loads) else hits, needed)
            return NO_SLOTS
        asks = state.quotas.asks(request.namespace)
        owner = self._evictor.make_room(Tier.HBM, session.hbm_key, asked, asks)
        slots = state.hbm.allocate(owner, asked, session.holder)
        session.held_bound += len(slots)
        wanted = np.concatenate((loads, np.arange(hits, hits + fills))) if fills else loads
        served = wanted[: len(slots)]
        draft.hbm[served] = slots[: len(served)]
        loaded = served[served < hits]
        if len(loaded):
            self._link_loads(session, draft.rows[loaded], draft.hbm[loaded])
        filled = served[served >= hits]
        if len(filled):
            draft.outcomes[filled] = Outcome.MISS
            self._reserve_rows(request, draft, hits, len(filled))
        if len(served) < needed:
            self._no_slot(request, draft, int(wanted[len(served)]), needed - len(served))
        return slots[len(served) :]

    def _link_loads(self, session: Session, rows: U32, slots: U32) -> None:
        """A block that is being loaded names the slot it goes into, so that nobody loads it twice."""
        state = self._state
        assert session.device is not None
        single = state.columns.hbm[session.device, rows] == NONE
        state.link(Tier.HBM, rows[single], slots[single], session.device)

    def _reserve_rows(self, request: Request, draft: _Draft, hits: int, count: int) -> None:
        """Reserves the hashes that no row has for the slots given; the other slots stay private."""
        state = self._state
        span = slice(hits, hits + count)
        rows = draft.rows[span]
        new = rows == NONE
        new[new] = distinct(request.hashes[span][new])
        device = request.session.device
        if not new.any() or device is None or not request.allowed.writes:
            return  # a row that is reserved and never sealed would have others wait for it
        depths = np.arange(request.first + hits, request.first + hits + count, dtype=np.uint32)[new]
        rows[new] = state.table.reserve(
            hashes=request.hashes[span][new],
            namespaces=request.namespace,
            depths=depths,
            parents=np.full(len(depths), NONE, dtype=np.uint32),
            touches=touch_key(request.now_ms, depths),
        )
        state.fault("acquire.reserved")
        parents = np.empty(count, dtype=np.uint32)
        parents[0] = draft.rows[hits - 1] if hits else request.parent
        parents[1:] = rows[:-1]
        new &= rows != NONE
        state.columns.parent[rows[new]] = parents[new]
        state.link(Tier.HBM, rows[new], draft.hbm[span][new], device)

    def _spare_others(self, request: Request, draft: _Draft, hits: int) -> int:
        """Of `hits`, those that a request which waits is given: it takes no HBM from what others are queued for.

        It cannot begin, and they could. What DRAM has of it stays there until it asks again.
        """
        state, key = self._state, request.session.hbm_key
        loads = np.flatnonzero(draft.outcomes[:hits] == _HIT_DRAM)
        if key is None or len(loads) <= len(state.hbm.class_of(key).free):
            return hits
        room = self._evictor.unwanted(Tier.HBM, key, len(loads))
        if len(loads) <= room:
            return hits
        at = int(loads[room])
        self._let_go(request.session, key, draft, at)
        draft.outcomes[at:hits] = Outcome.LATER
        return at

    def _no_slot(self, request: Request, draft: _Draft, at: int, missing: int) -> None:
        """From the first block that lacks a slot on nothing is given; what this call held for it is let go."""
        key = request.session.hbm_key
        assert key is not None
        self._let_go(request.session, key, draft, at)
        draft.outcomes[at:] = Outcome.NO_SLOT
        self._state.waits.wait_slots(request.session.id, request.lease, key, missing)

    def _let_go(self, session: Session, key: ClassKey, draft: _Draft, at: int) -> None:
        """From this block on nothing is given."""
        state = self._state
        owner = state.hbm.class_of(key)
        freed = owner.freed and key in state.waits.slots_wanted()
        for pool, given in ((state.hbm, draft.hbm), (state.dram, draft.dram)):
            slots = given[at:][draft.fresh[at:] & (given[at:] != NONE)]
            pool.unhold(slots[~np.isin(slots, given[:at])], session.holder)
        owner.freed = freed  # for those who wait already; what this call let go is no reason to ask again
        draft.hbm[at:] = NONE
        draft.dram[at:] = NONE

    # -- waiting

    def _waits_at(self, request: Request, draft: _Draft, hits: int) -> bool:
        """Whether the block at `hits` is on its way; then marks those like it behind it and has the lease wait.

        Starts the promotions that the chain needs. False: the block is a miss, and so is all behind it.
        """
        state, session = self._state, request.session
        known = draft.rows[hits:] != NONE
        rows = draft.rows[hits : hits + (len(known) if known.all() else int(known.argmin()))]
        if not len(rows):
            return False
        pending = state.table.filling(rows)
        ready = np.zeros(len(rows), dtype=np.bool_)
        if session.device is not None:
            hbm = state.columns.hbm[session.device, rows]
            pending |= state.hbm.filling(hbm)
            ready = state.hbm.sealed(hbm)
        dram = state.columns.dram[rows]
        promoting = state.promoted(rows) & ~pending
        ready |= state.dram.sealed(dram)
        ready &= ~pending  # somebody is loading it: wait for that one copy
        below = self._promoting.promotable(rows) & ~pending & ~ready
        below &= self._of_size(Tier.NVME, state.columns.nvme[rows], below, session)
        usable = pending | promoting | ready | below
        run = len(usable) if usable.all() else int(usable.argmin())
        if not run or ready[0]:  # readable, but not by this session: another size
            return False
        pending, promoting, below = pending[:run], promoting[:run], below[:run]
        self._promoting.demand(rows[:run][promoting])
        wanted = np.flatnonzero(below)
        started = self._promote(request, draft.rows[: hits + run], rows[wanted]) if len(wanted) else 0
        promoting[wanted[:started]] = True
        if started < len(wanted):
            pending[wanted[started] :] = False
            promoting[wanted[started] :] = False
        marked = pending | promoting
        if not marked[0]:
            if not self._waits_for_room(request):
                return False
            draft.outcomes[hits] = Outcome.PROMOTING  # when it is its turn
            return True
        outcomes = draft.outcomes[hits : hits + run]
        outcomes[pending] = Outcome.PENDING
        outcomes[promoting] = Outcome.PROMOTING
        waited = rows[:run][marked]
        state.waits.wait_rows(session.id, request.lease, waited, state.words(waited))
        return True

    def _promote(self, request: Request, chain: U32, rows: U32) -> int:
        """Has blocks of the chain's run brought up; how many of the leading ones. Others follow as there is room.

        None while a request lacks room that has asked before this one: it would take what that one waits for.
        """
        state, session = self._state, request.session
        queued = state.queued.ask(session.id, request.lease, chain, state.words(chain), request.now_ms)
        before = state.queued.lacking_room()
        if any(
            each.deadline_ms < queued.deadline_ms and self._key_of(each) == session.dram_key
            for each in before
        ):
            return 0
        started = self._promoting.promote(session.dram_key, rows, queued.deadline_ms)
        queued.lacks_room = 0 < started < len(rows)
        return started

    def _key_of(self, queued: QueuedRequest) -> ClassKey:
        return self._state.sessions.get(queued.session).dram_key

    def _waits_for_room(self, request: Request) -> bool:
        """Nothing of what is lacking could be begun: whether it waits for its turn. False: it computes.

        It waits while requests before it have the room, which they give back, and while anything comes into it at all.
        """
        queued = self._state.queued
        waiting = queued.get(request.session.id, request.lease)
        if waiting is None or (waiting is queued.first() and not self._promoting.under_way):
            return False
        waiting.lacks_room = True
        return True

    # -- the answer

    def _generations(self, tier: Tier, slots: U32) -> U32:
        """[n] generations of slots, 0 where none is given."""
        given = slots != NONE
        count = np.count_nonzero(given)
        if not count:
            return np.zeros(len(slots), dtype=np.uint32)
        if count == len(slots):
            return self._state.pool(tier).generations(slots)
        generations = self._state.pool(tier).generations(np.where(given, slots, 0))
        return np.where(given, generations, np.uint32(0))

    def _note_lookup(self, request: Request, draft: _Draft, hits: int) -> None:
        """The request has got its blocks: what it hit, and what it would have hit where hits are only counted."""
        state, counters = self._state, self._state.counters
        if request.allowed.reads:
            state.quotas.note_lookup(request.namespace, len(draft.rows), hits)
        if request.allowed.reads or not request.allowed.counts:
            return
        sealed = state.table.sealed(draft.rows)
        rows = draft.rows[: len(sealed) if sealed.all() else int(sealed.argmin())]
        in_hbm, _ = self._in_hbm(request.session, rows)
        in_dram = state.dram.sealed(state.columns.dram[rows]) & ~in_hbm
        counters["blocks_dry_run"] += len(draft.rows)
        counters["blocks_would_hit_hbm"] += int(np.count_nonzero(in_hbm))
        counters["blocks_would_hit_dram"] += int(np.count_nonzero(in_dram))
        counters["blocks_would_hit_nvme"] += int(np.count_nonzero(~in_hbm & ~in_dram))

    def _count(self, draft: _Draft) -> bool:
        """Whether some block got no slot."""
        outcomes, short = draft.outcomes, False
        if len(outcomes) and np.count_nonzero(outcomes == outcomes[0]) == len(outcomes):  # mostly
            counts = {int(outcomes[0]): len(outcomes)}
        else:
            counts = dict(enumerate(np.bincount(outcomes).tolist()))
        for outcome, count in counts.items():
            if count and outcome in _COUNTER:
                self._state.counters[_COUNTER[outcome]] += count
                short |= outcome == Outcome.NO_SLOT
        return short


def note_grant(session: Session, grant: Grant, grant_id: int, limit: int) -> None:
    """The session remembers what message `grant_id` carries until its client has seen it; at most `limit` of them."""
    hbm = grant.hbm_slots[grant.hbm_slots != NONE]
    if len(grant.reserve_slots):
        hbm = np.concatenate((hbm, grant.reserve_slots))
    session.granted(grant_id, hbm, grant.dram_slots[grant.dram_slots != NONE], ahead=False, limit=limit)
