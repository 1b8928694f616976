"""Slots given ahead, and whom a freed slot is for.

Owns fairness: what a session asked to have in hand comes from free slots, shared among the sessions that draw on the
same class, and leases that wait for a slot are told in the order in which they came.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import SlotState, Tier
from kvstore.leases.sessions import Session
from kvstore.moves import U32, Slots
from kvstore.state import NO_SLOTS, StoreState
from kvstore.tables.slots import ClassKey, SlotClass
from kvstore.victims.evicting import Evictor

__all__ = ["Crediting"]


class Crediting:
    """Credit, room, and wake-ups."""

    __slots__ = ("_evictor", "_state")

    def __init__(self, state: StoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor

    def top_up(self, session: Session) -> Slots | None:
        """What is due to the session now, held by it already; None where there is nothing."""
        hbm = self._ahead(session, Tier.HBM, session.hbm_key, session.want_slots)
        room = session.want_room if self._state.uses.needs_room(session.use) else 0
        dram = self._ahead(session, Tier.DRAM, session.dram_key, room)
        session.want_slots -= len(hbm)
        session.want_room -= len(dram)
        if not len(hbm) and not len(dram):
            return None
        self._state.counters["slots_ahead"] += len(hbm) + len(dram)
        return Slots(
            hbm_slots=hbm,
            hbm_generations=self._state.hbm.generations(hbm),
            dram_slots=dram,
            dram_generations=self._state.dram.generations(dram),
        )

    def _ahead(self, session: Session, tier: Tier, key: ClassKey | None, wanted: int) -> U32:
        wanted = self._state.may_hold(session, wanted) if key is not None and wanted > 0 else 0
        if wanted <= 0 or key is None:
            return NO_SLOTS
        asks = self._state.quotas.asks(session.namespace)
        if tier is Tier.DRAM and (len(self._state.queued) or self._state.early.unused(key.slot_bytes)):
            owner = self._room_beside_queue(key, wanted, asks)
        else:
            owner = self._evictor.make_room(tier, key, wanted, asks)
        share = -(-len(owner.free) // max(1, self._state.drawing_on(tier, key)))
        slots = self._state.pool(tier).allocate(owner, min(wanted, share), session.holder)
        session.held_bound += len(slots)
        return slots

    def _room_beside_queue(self, key: ClassKey, wanted: int, asks: int) -> SlotClass:
        """Room for what may be written some day is not worth a second read of what is needed next: of blocks read ahead
        of requests that have not asked yet, and of what those want that have, the first of them, or the first few up to
        half of DRAM and as long as a quarter of it is left, so that what is computed meanwhile finds some."""
        state, slots = self._state, self._state.dram.class_of(key).slots
        due_ms = state.queued.due_first(
            min(slots // 2, slots - slots // 4 - state.early.unused(key.slot_bytes))
        )

        def may_go(rows: U32) -> NDArray[np.bool_]:
            return ~state.early.awaited(state.columns.dram[rows]) & state.queued.not_before(due_ms, rows)

        owner = self._evictor.make_room_among(key, wanted, may_go, asks=asks)
        if len(owner.free) < wanted:
            self._evictor.short[Tier.DRAM, key] = None
        return owner

    def wake(self) -> None:
        """Tells leases that wait for a slot, where slots of their class came free or could be freed."""
        waits = self._state.waits
        for key in waits.slots_wanted():
            owner = self._state.hbm.class_of(key)
            if owner.freed:
                owner.freed = False
                waits.slots_available(key, self._available(owner))

    def _available(self, owner: SlotClass) -> int:
        """Slots of a class that are free or held by nobody. O(slots of the class)."""
        hbm = self._state.hbm
        unheld = 0
        for base, size in owner.free.ranges():
            sealed = (hbm.state[base : base + size] & np.uint64(0xFF)) == np.uint64(SlotState.SEALED)
            unheld += int(np.count_nonzero(sealed & (hbm.holders[base : base + size] == 0)))
        return len(owner.free) + unheld
