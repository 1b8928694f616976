"""A sharded HBM extent on its way in: each process of a group gives its shard, and all of them enter or none does.

Process 0 gives the first shard, which asks the others for theirs. Owner loop only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kvstore.daemon.memory import Memory
from kvstore.daemon.session import Session
from kvstore.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, KvstoreError
from kvstore.moves import ExtentInfo, SessionId
from kvstore.wire import descriptors as wire
from tiers.base import Sharing

__all__ = ["Gatherings"]

_PRESENT_S = 10.0
"""Within which all processes of a group present themselves: each has opened its device before that."""
_TIMEOUT_S = 30.0
"""Within which each gives its shard: memory has to be made for it."""


class _Gathering:
    """One extent."""

    def __init__(self, asked: wire.NewHbm | wire.NewPlainHbm, members: int) -> None:
        self._asked = asked
        self._fds: list[int | None] = [None] * members
        self._changed = asyncio.Event()  # all are there, or it has failed
        self._ended = asyncio.Event()
        self._info: ExtentInfo | None = None
        self._error: KvstoreError | None = None

    def put(self, member: int, message: wire.NewHbm | wire.NewPlainHbm, fd: int) -> None:
        """A process's shard. `fd` becomes ours. Raises InvalidArgument where it is not what was asked for."""
        if self._error is not None or self._fds[member] is not None or message != self._asked:
            os.close(fd)
            raise InvalidArgument(f"nobody has asked process {member} for this shard")
        self._fds[member] = fd
        if None not in self._fds:
            self._changed.set()

    def fail(self, error: KvstoreError) -> None:
        """It cannot become complete; the first reason counts."""
        self._error = self._error or error
        self._changed.set()

    async def all_shards(self) -> list[int]:
        """Their descriptors, the caller's now. Raises what it failed with."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        fds = [fd for fd in self._fds if fd is not None]
        self._fds = [None] * len(fds)
        return fds

    def end(self, outcome: ExtentInfo | KvstoreError) -> None:
        """Whoever waits for it goes on; what was not taken is closed."""
        if isinstance(outcome, KvstoreError):
            self._error = self._error or outcome
        else:
            self._info = outcome
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds = [None] * len(self._fds)
        self._ended.set()

    async def outcome(self) -> ExtentInfo:
        """The extent once it is in the store. Raises why it is not."""
        await self._ended.wait()
        if self._info is None:
            assert self._error is not None
            raise self._error
        return self._info


class Gatherings:
    """At most one extent a session."""

    def __init__(self, memory: Memory, tell: Callable[[SessionId, int, wire.Message], None]) -> None:
        """`tell` sends a message to a member of a session."""
        self._memory = memory
        self._tell = tell
        self._open: dict[SessionId, _Gathering] = {}

    async def give(
        self, session: Session, member: int, message: wire.NewHbm | wire.NewPlainHbm, fd: int
    ) -> ExtentInfo:
        """One process's shard; returns when the whole extent is in the store. `fd` becomes ours, also on failure.

        Raises why it is not: as Memory.add_hbm, FailedPrecondition where a process has gone or has no memory,
        DeadlineExceeded where one does not answer.
        """
        if member == 0:
            return await self._lead(session, message, fd)
        gathering = self._open.get(session.id)
        if gathering is None:
            os.close(fd)
            raise FailedPrecondition("process 0 of a group gives the first shard of an extent")
        gathering.put(member, message, fd)
        return await gathering.outcome()

    def fail(self, session: SessionId, member: int, why: str) -> None:
        """A process cannot give its shard, or is gone."""
        gathering = self._open.get(session)
        if gathering is not None:
            gathering.fail(FailedPrecondition(f"process {member} of the group: {why}"))

    async def _lead(self, session: Session, message: wire.NewHbm | wire.NewPlainHbm, fd: int) -> ExtentInfo:
        if session.id in self._open:
            os.close(fd)
            raise FailedPrecondition("another extent of this group is on its way")
        gathering = self._open[session.id] = _Gathering(message, session.members)
        gathering.put(0, message, fd)
        try:
            info = await self._enter(session, message, gathering)
        except KvstoreError as error:
            gathering.end(error)
            raise
        except BaseException:
            gathering.end(KvstoreError("the daemon failed at this extent"))
            raise
        else:
            gathering.end(info)
            return info
        finally:
            del self._open[session.id]

    async def _enter(
        self, session: Session, message: wire.NewHbm | wire.NewPlainHbm, gathering: _Gathering
    ) -> ExtentInfo:
        try:
            async with asyncio.timeout(_PRESENT_S):
                await session.all_here.wait()
        except TimeoutError:
            raise FailedPrecondition(
                f"not all {session.members} processes of the group have presented themselves"
            ) from None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                asked = wire.Wanted(nbytes=message.nbytes, slots=message.slots, slot_bytes=message.slot_bytes)
                for member in range(1, session.members):
                    self._tell(session.id, member, asked)
                fds = await gathering.all_shards()
        except TimeoutError:
            raise DeadlineExceeded(f"a process of the group gave no shard within {_TIMEOUT_S:g} s") from None
        return await self._memory.add_hbm(
            session,
            slots=message.slots,
            nbytes=message.nbytes * len(fds),
            sharing=Sharing.DESCRIPTORS if isinstance(message, wire.NewHbm) else Sharing.NONE,
            fds=fds,
        )
