"""The life of sessions: attach, members that present themselves, resume, detach, death.

A session is dead when every member that presented itself is gone (`liveness`) and no other can still come; a member
that never presented itself was never sent a descriptor, so it touches nothing. Owner loop only.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.daemon.kept import Kept
from kvstore.daemon.liveness import Life, check_pidfd, same_process
from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.daemon.session import Session
from kvstore.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, KvstoreError
from kvstore.faults import fault
from kvstore.moves import U32, SessionId
from kvstore.recorder import Event

__all__ = ["Member", "Sessions", "member_names"]

_LOG = Log("sessions")


def member_names(session: int, member: int) -> tuple[str, str]:
    """What the keeper calls a member's pidfd and our end of its socket."""
    return f"pid-{session}-{member}", f"live-{session}-{member}"


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of a session that has presented itself."""

    session: SessionId
    number: int
    connection: socket.socket
    life: Life


class Sessions:
    """Sessions and their members."""

    def __init__(self, owner: Owner, kept: Kept) -> None:
        self._owner = owner
        self._kept = kept
        self._members: dict[tuple[SessionId, int], Member] = {}
        self._presenting: set[tuple[bytes, int]] = set()
        """Token's digest and number of members whose HELLO is under way."""
        self._on_member_gone: Callable[[Member], None] = lambda _: None

    def on_member_gone(self, listener: Callable[[Member], None]) -> None:
        """Who reads the connections: told before a member's connection is closed."""
        self._on_member_gone = listener

    def members(self, session: SessionId | None = None) -> list[Member]:
        """Members that have presented themselves, of one session or of all."""
        return [member for member in self._members.values() if session in (None, member.session)]

    def attach(
        self,
        *,
        digest: bytes,
        name: str,
        device: int | None,
        slot_bytes: int,
        hbm_bytes: int,
        members: int,
        identity: int,
    ) -> Session:
        """A new session, which has some seconds to present its members."""
        number = self._owner.store.attach(
            now_ms=self._owner.now_ms(),
            name=name,
            token_digest=digest,
            device=device,
            slot_bytes=slot_bytes,
            members=members,
            identity=identity,
        )
        session = Session(
            id=number,
            digest=digest,
            name=name,
            device=device,
            slot_bytes=slot_bytes,
            hbm_bytes=hbm_bytes,
            members=members,
            identity=identity,
        )
        # Ids start above those of every earlier boot, so a client's `seen` never means a message it has not read.
        session.last_sent = self._owner.now_ms() << 20
        self._owner.add_session(session)
        self._expect(session)
        self._owner.counters.add("attaches_total")
        self._owner.recorder.note(Event.ATTACH, number, 0, members, c=slot_bytes)
        _LOG.info("attached", session=number, name=name, members=members, slot_bytes=slot_bytes)
        return session

    def _expect(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self._owner.config.limits.session_lost_s
        session.deadline = loop.call_later(delay_s, self._not_presented, session)

    def _not_presented(self, session: Session) -> None:
        """Some members never came: whoever did come decides by living or not; with none the session ends."""
        session.deadline = None
        if not self.members(session.id):
            _LOG.warning("session dropped: nobody presented itself", session=session.id, name=session.name)
            self._end(session)
        else:
            self._end_if_gone(session)

    async def present(self, session: Session, number: int, connection: socket.socket, pidfd: int) -> Member:
        """A member's HELLO. `pidfd` becomes ours, also on failure; the connection stays the caller's until success."""
        try:
            old = self._check_present(session, number, pidfd)
            names = member_names(session.id, number)
            await self._store_once(
                session, number, dict(zip(names, (pidfd, connection.fileno()), strict=True))
            )
            fault("hello.stored")
            if self._owner.sessions.get(session.id) is not session:
                # Its number may be another session's by now, with descriptors of these names.
                if self._owner.sessions.get(session.id) is None:
                    self._kept.remove(names)
                raise FailedPrecondition("the session has ended meanwhile")
        except BaseException:
            os.close(pidfd)
            raise
        if (
            old is not None
        ):  # the same process, whose connection was lost; the keeper has the new descriptors by now
            self._release(old)
        member = self._watch(session, number, connection, pidfd)
        if not session.presented and self._all_here(session) and not session.lost:
            self._owner.store.activate(session.id)
        return member

    async def _store_once(self, session: Session, number: int, fds: Mapping[str, int]) -> None:
        """Gives a member's descriptors to the keeper; of two HELLOs at one time the second is refused."""
        place = (session.digest, number)
        if place in self._presenting:
            raise AlreadyExists(f"member {number} is presenting itself already")
        self._presenting.add(place)
        try:
            await self._kept.add(fds)
        finally:
            self._presenting.discard(place)

    def _all_here(self, session: Session) -> bool:
        """Whether every member has presented itself; notes it."""
        if len(self.members(session.id)) == session.members:
            session.cancel_deadline()
            session.presented = True
            session.all_here.set()
        return session.presented

    def _check_present(self, session: Session, number: int, pidfd: int) -> Member | None:
        """The member as it presented itself before, if it may do so again."""
        check_pidfd(pidfd)
        if number >= session.members:
            raise InvalidArgument(f"member {number} of a session of {session.members}")
        old = self._members.get((session.id, number))
        if old is None:
            return None
        if not old.life.closed or not same_process(old.life.pidfd, pidfd):
            raise AlreadyExists(f"member {number} has presented itself already")
        return old

    def adopt(self, session: Session, number: int, connection: socket.socket, pidfd: int) -> Member:
        """A member of before a restart of the daemon."""
        return self._watch(session, number, connection, pidfd)

    def recovered(self, session: Session) -> None:
        """A session of before a restart, whose known members have been adopted: others have the usual time to come."""
        if not self._all_here(session):
            self._expect(session)

    def _watch(self, session: Session, number: int, connection: socket.socket, pidfd: int) -> Member:
        life = Life(pidfd, lambda: self._end_if_gone(session))
        member = Member(session=session.id, number=number, connection=connection, life=life)
        self._members[session.id, number] = member
        return member

    def resume(
        self, session: Session, hbm: U32, hbm_generations: U32, dram: U32, dram_generations: U32
    ) -> None:
        """The client states what it holds; an old stream ends first."""
        if not session.presented:
            raise FailedPrecondition("the session's members have not presented themselves yet")
        now_ms = self._owner.now_ms()
        if session.outbox is not None:
            self._close_stream(session, Aborted("the session was resumed on another stream"))
            self._owner.store.lost(session.id, now_ms)
        self._owner.store.resume(
            now_ms=now_ms,
            session=session.id,
            hbm_slots=hbm,
            hbm_gens=hbm_generations,
            dram_slots=dram,
            dram_gens=dram_generations,
        )
        session.lost = False
        self._owner.counters.add("resumes_total")
        _LOG.info("resumed", session=session.id, name=session.name, hbm=len(hbm), dram=len(dram))
        self._owner.settle_soon()

    def detach(self, session: Session) -> None:
        """The client's word that it touches nothing any more."""
        self._owner.store.detach(session.id, self._owner.now_ms())
        self._clear(session)
        _LOG.info("detached", session=session.id, name=session.name)

    def forget(self, session: Session) -> int:
        """The administrator's word that a session's processes are gone; slots freed."""
        return self._end(session)

    def _end_if_gone(self, session: Session) -> None:
        """A member is gone: with it the session, where it was the last that can be; else it is dying."""
        members = self.members(session.id)
        if session.deadline is not None or not members:
            return
        if all(member.life.ended for member in members):
            self._end(session)
        elif (
            any(member.life.ended for member in members)
            and self._owner.find_session(session.digest) is session
        ):
            self._close_stream(session, Aborted("a member of the session has died"))
            self._owner.store.dying(session.id, self._owner.now_ms())
            self._owner.settle_soon()

    def _close_stream(self, session: Session, reason: KvstoreError) -> None:
        """Ends the stream from this side; the store is told by the caller."""
        session.lost = True
        session.wants = False
        if session.outbox is not None:
            session.outbox.fail(reason)
            session.outbox = None

    def _end(self, session: Session) -> int:
        if self._owner.sessions.get(session.id) is not session:
            return 0
        freed = self._owner.store.dead(session.id, self._owner.now_ms())
        self._clear(session)
        self._owner.counters.add("sessions_dead_total")
        _LOG.info("session dead", session=session.id, name=session.name, freed=freed)
        return freed

    def _clear(self, session: Session) -> None:
        """Lets everything of a session go that the shell has."""
        self._owner.remove_session(session)
        for member in self.members(session.id):
            self._forget(member)
        self._owner.settle_soon()

    def _forget(self, member: Member) -> None:
        self._kept.remove(member_names(member.session, member.number))
        self._release(member)

    def _release(self, member: Member) -> None:
        """Lets a member go of which the keeper has nothing, or somebody else's by now."""
        self._on_member_gone(member)
        member.life.stop()
        member.connection.close()
        self._members.pop((member.session, member.number), None)
