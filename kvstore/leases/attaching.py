"""Sessions over their life: attached, resumed by statement, lost, dead; and the namespaces they open.

Owns the rule that nothing revokes a DMA: whatever happens to a session, its slots stay held until it releases them, it
states that it has them no more, or its processes are gone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FailedPrecondition, ResourceExhausted
from kvstore.layout import SessionState, State, Tier, states
from kvstore.leases.sessions import Session
from kvstore.moves import U32, NamespaceId
from kvstore.recorder import Event
from kvstore.state import StoreState
from kvstore.tiering.prefetching import Prefetching

__all__ = ["Attaching"]


class Attaching:
    """Transitions of sessions."""

    __slots__ = ("_prefetching", "_state")

    def __init__(self, state: StoreState, prefetching: Prefetching) -> None:
        self._state = state
        self._prefetching = prefetching

    def activate(self, session: int) -> None:
        """Its members are there. Raises: NotFound, FailedPrecondition when it is not ATTACHING."""
        sessions = self._state.sessions
        sessions.get(session)
        if sessions.state(session) is SessionState.ATTACHING:
            sessions.set_state(session, SessionState.ATTACHED)
            self._state.recorder.note(Event.ACTIVATE, session)
        elif sessions.state(session) is not SessionState.ATTACHED:
            raise FailedPrecondition(f"session {session} has to resume")

    def resume(self, session: int, stated: dict[Tier, tuple[U32, U32]]) -> None:
        """ATTACHED again, with what it states (slots and generations by tier) and held; the rest comes back.

        Raises: NotFound; FailedPrecondition for a session some of whose processes are dead.
        """
        state = self._state
        found = state.sessions.get(session)
        if state.sessions.state(session) is SessionState.DYING:
            raise FailedPrecondition(f"session {session} has lost a process: attach anew")
        self.revoke(found)
        for tier, (slots, generations) in stated.items():
            pool = state.pool(tier)
            kept = slots[state.held_slots(pool, slots, generations, found.holder)]
            held = pool.held_by(found.holder)
            state.let_go(tier, held[~np.isin(held, kept)], found.holder)
        state.fault("resume.freed")
        state.sessions.set_state(session, SessionState.ATTACHED)
        state.counters["resumes"] += 1
        state.recorder.note(Event.RESUME, session)

    def lost(self, session: int, to: SessionState) -> None:
        """It gets nothing new (`to`: LOST or DYING); what it holds stays held, what it fills nobody waits for."""
        state = self._state
        found = state.sessions.get(session)
        state.recorder.note(Event.DYING if to is SessionState.DYING else Event.LOST, session)
        if state.sessions.state(session) is not SessionState.DYING:
            state.sessions.set_state(session, to)
        self.revoke(found)

    def dead(self, session: int) -> int:
        """Nothing touches its slots any more: all come back, sealed blocks stay. Returns how many slots it held."""
        state = self._state
        found = state.sessions.get(session)
        self.revoke(found)
        freed = state.let_go_all(found)
        state.suspects.forget(session)
        state.recorder.note(Event.DEAD, session, freed)
        state.fault("dead.freed")
        state.sessions.set_state(session, SessionState.FREE)
        return freed

    def revoke(self, session: Session) -> None:
        """Ends what the session waits for, what it asked for ahead, and the rows reserved for its fills."""
        state = self._state
        state.waits.forget_session(session.id)
        self._prefetching.forget_session(session)
        state.rankings.forget_session(session.id)
        session.unseen.clear()
        session.want_slots = session.want_room = 0
        held = state.hbm.held_by(session.holder)
        state.unlink_fills(held[state.hbm.filling(held)])

    def intern_namespace(self, digest: bytes) -> NamespaceId:
        """Handle of a namespace; takes over one that nobody uses when all are taken. Raises: ResourceExhausted."""
        namespaces = self._state.namespaces
        handle = namespaces.intern(digest, None)
        if handle is None:
            handle = namespaces.intern(digest, self._namespaces_in_use())
        if handle is None:
            raise ResourceExhausted("all namespaces are in use", retry_after_s=60.0)
        return handle

    def _namespaces_in_use(self) -> NDArray[np.bool_]:
        columns = self._state.columns
        used = np.zeros(columns.shape.max_namespaces, dtype=np.bool_)
        used[columns.namespace[states(columns.state) != State.FREE]] = True
        for session in self._state.sessions:
            used[list(session.namespaces)] = True
        return used
