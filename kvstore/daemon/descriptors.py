"""The daemon's end of the descriptor socket: hands out tables and extents, takes in the HBM that workers make.

A peer is of the daemon's own uid (SO_PEERCRED; memory is shared only inside one trust domain), shows the session's
token and its pidfd, and gets descriptors only after the keeper has that pidfd and our end of the connection: a later
daemon can then tell whether the process lives. A member's connection is never closed from this side while it lives,
because its end is how we learn that the process has gone. Sending never blocks: what a stopped process does not read
waits in its queue, bounded by the number of extents. Owner loop only.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvstore.daemon.gathering import Gatherings
from kvstore.daemon.log import Log, Rarely
from kvstore.daemon.memory import Memory
from kvstore.daemon.owner import Owner
from kvstore.daemon.session import Session, token_digest
from kvstore.daemon.sessions import Member, Sessions
from kvstore.errors import InvalidArgument, KvstoreError, PermissionDenied
from kvstore.layout import Tier
from kvstore.moves import ExtentInfo, SessionId
from kvstore.wire import descriptors as wire
from kvstore.wire.peer import check_peer
from tiers.base import Sharing

__all__ = ["DescriptorServer"]

_LOG = Log("descriptors")
_MAX_STRANGERS = 64
_BACKLOG = 512  # a full one refuses at once: processes that start together must all fit
_HELLO_TIMEOUT_S = 5.0
_MAX_REFUSALS = 64  # that wait for one connection unread; more are counted only
_STARVED = (
    errno.ETOOMANYREFS,
    errno.ENOBUFS,
    errno.ENOMEM,
)  # the kernel takes no descriptor now, and will later
_RETRY_S = 0.05


class _Connection:
    """One connection with its outgoing queue. Reads one message at a time: the next after the last is done."""

    def __init__(self, server: DescriptorServer, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.member: Member | None = None
        self.giving: int | None = None
        """Descriptor of the HBM extent that this peer is giving right now: it is told by Accepted, not by Extent."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[wire.Message, tuple[int, ...]]] = deque()
        self._closed = False
        self._behind = False
        """Whether a message with a descriptor could not even be queued: then the whole set is sent again."""
        self._retry: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._timeout: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Listens; whoever has not said HELLO in time is disconnected."""
        if self.member is None:
            self._timeout = self._loop.call_later(_HELLO_TIMEOUT_S, self._server.disconnect, self)
        self._loop.add_reader(self.socket, self._readable)

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queues a message; `fds` stay the caller's. Never raises: what cannot be queued or sent now is tried again."""
        if self._closed:
            return
        try:
            ours = tuple(os.dup(fd) for fd in fds)
        except OSError as error:
            _LOG.warning("message waits", kind=type(message).__name__, error=error)
            self._behind = True
            self._try_again_later()
            return
        self._queue.append((message, ours))
        if len(self._queue) == 1:
            self._flush()

    @property
    def unread(self) -> int:
        """Messages that wait for the peer to read."""
        return len(self._queue)

    def _flush(self) -> None:
        while self._queue:
            message, fds = self._queue[0]
            try:
                wire.send(self.socket, message, fds)
            except BlockingIOError:
                self._loop.add_writer(self.socket, self._flush)
                return
            except OSError as error:
                if error.errno in _STARVED:  # the socket is writable all the time: ask again by the clock
                    self._loop.remove_writer(self.socket)
                    self._try_again_later()
                    return
                # The peer has gone: reading says so.
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self.socket)

    def _try_again_later(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if self._behind:
            self._behind = False
            self._server.send_again(self)
        self._flush()

    def _readable(self) -> None:
        try:
            received = wire.receive(self.socket)
        except BlockingIOError:
            return
        except InvalidArgument as error:
            self._server.refuse(self, error)
            return
        except OSError:
            received = None
        if received is None:
            self._server.ended(self)
            return
        self._loop.remove_reader(self.socket)
        self._task = asyncio.create_task(self._handle(received))

    async def _handle(self, received: wire.Received) -> None:
        try:
            await self._server.handle(self, received)
        except KvstoreError as error:
            self._server.refuse(self, error)
        except Exception:  # noqa: BLE001 (a connection's boundary: a fault with one peer must not end the daemon)
            self._server.failed(self)
        if not self._closed:
            self._loop.add_reader(self.socket, self._readable)

    def said_hello(self) -> None:
        """The peer is known from now on."""
        if self._timeout is not None:
            self._timeout.cancel()

    def stop(self) -> None:
        """Ends all I/O on the socket and leaves closing it to its owner."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self.said_hello()
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()


class DescriptorServer:
    """Accepts members and keeps them told of extents."""

    def __init__(self, *, owner: Owner, sessions: Sessions, memory: Memory, tables_fd: int) -> None:
        self._owner = owner
        self._sessions = sessions
        self._memory = memory
        self._tables_fd = tables_fd
        self._gatherings = Gatherings(memory, self._tell)
        self._refused = Rarely(_LOG)
        self._listener: socket.socket | None = None
        self._strangers: set[_Connection] = set()
        self._members: dict[tuple[SessionId, int], _Connection] = {}
        memory.listen(self._extent_added, self._extent_dropped)
        sessions.on_member_gone(self._member_gone)

    def listen(self, listener: socket.socket) -> None:
        """Accepts on a bound socket from now on."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def adopt(self, member: Member) -> None:
        """A member of before a restart: its connection goes on, and it is sent the whole first set again.

        The daemon before may have died in the middle of it; a member passes over what it has.
        """
        connection = _Connection(self, member.connection)
        connection.member = member
        self._members[member.session, member.number] = connection
        connection.start()
        self._send_first_set(connection, self._owner.sessions[member.session])

    def close(self) -> None:
        """Accepts nobody any more and disconnects strangers. Members' connections stay as they are."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for connection in list(self._strangers):
            self.disconnect(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, *_STARVED):
                self._pause_accepting()  # whoever waits stays readable: asking at once would take all of the loop
            return  # else it has gone again
        connection = _Connection(self, sock)
        try:
            check_peer(sock)
        except PermissionDenied as error:
            self.refuse(connection, error)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self.disconnect(connection)
        else:
            self._strangers.add(connection)
            connection.start()

    def _pause_accepting(self) -> None:
        listener, loop = self._listener, asyncio.get_running_loop()
        assert listener is not None
        loop.remove_reader(listener)

        def resume() -> None:
            if listener.fileno() >= 0:
                loop.add_reader(listener, self._accept)

        loop.call_later(_RETRY_S, resume)

    async def handle(self, connection: _Connection, received: wire.Received) -> None:
        """One message of a peer. Its descriptors are ours."""
        message = received.message
        taken = False
        try:
            if isinstance(message, wire.Hello) and connection.member is None:
                if len(received.fds) != 1:
                    raise InvalidArgument(
                        "a HELLO carries one descriptor, the pidfd of the process that sends it"
                    )
                taken = True
                await self._hello(connection, message, received.fds[0])
            elif isinstance(message, wire.Distrust) and connection.member is not None:
                self._distrust(connection, connection.member, message)
            elif isinstance(message, wire.NewHbm | wire.NewPlainHbm) and connection.member is not None:
                if len(received.fds) != 1:
                    raise InvalidArgument("a new HBM extent carries one descriptor, its memory")
                taken = True
                await self._new_hbm(connection, connection.member, message, received.fds[0])
            elif isinstance(message, wire.Refused) and connection.member is not None:
                self._gatherings.fail(connection.member.session, connection.member.number, message.text)
            else:
                raise InvalidArgument(f"{type(message).__name__} is not expected here")
        finally:
            if not taken:
                received.close()

    async def _hello(self, connection: _Connection, message: wire.Hello, pidfd: int) -> None:
        try:
            session = self._owner.require_session(token_digest(message.token))
        except KvstoreError:
            os.close(pidfd)
            raise
        connection.said_hello()
        member = await self._sessions.present(session, message.member, connection.socket, pidfd)
        connection.member = member
        self._strangers.discard(connection)
        self._members[session.id, message.member] = connection
        self._send_first_set(connection, session)
        _LOG.info("member presented", session=session.id, member=message.member)

    def _send_first_set(self, connection: _Connection, session: Session) -> None:
        connection.send(wire.Tables(nbytes=os.fstat(self._tables_fd).st_size), [self._tables_fd])
        for tier in (Tier.DRAM, Tier.HBM):
            for info, _ in self._memory.extents(tier):
                if _concerns(info, session):
                    self._send_extent(connection, info)
        connection.send(wire.Ready())

    def _send_extent(self, connection: _Connection, info: ExtentInfo) -> None:
        """An extent, or that shard of it that is the member's."""
        fds = self._memory.shards(info.extent)
        number = 0 if connection.member is None or len(fds) == 1 else connection.member.number
        if number < len(fds):
            connection.send(_extent_message(info, len(fds)), [fds[number]])

    def _tell(self, session: SessionId, number: int, message: wire.Message) -> None:
        connection = self._members.get((session, number))
        if connection is None:
            self._gatherings.fail(session, number, "it is not there")
        else:
            connection.send(message)

    def send_again(self, connection: _Connection) -> None:
        """A member has missed something: it is sent everything, and passes over what it has."""
        member = connection.member
        session = None if member is None else self._owner.sessions.get(member.session)
        if session is not None:
            self._send_first_set(connection, session)

    def _distrust(self, connection: _Connection, member: Member, message: wire.Distrust) -> None:
        session = self._owner.sessions.get(member.session)
        if session is None:
            raise InvalidArgument("the session has ended")
        connection.send(_accepted(self._memory.distrust(message.extent, session)))

    async def _new_hbm(
        self,
        connection: _Connection,
        member: Member,
        message: wire.NewHbm | wire.NewPlainHbm,
        fd: int,
    ) -> None:
        session = self._owner.sessions.get(member.session)
        whole = session is not None and message.slot_bytes == session.slot_bytes
        shard = session is not None and message.slot_bytes * session.members == session.slot_bytes
        if session is None or session.device is None or not (whole or shard):
            os.close(fd)
            raise InvalidArgument("this session has no HBM of that slot size")
        connection.giving = fd
        try:
            if whole:
                info = await self._memory.add_hbm(
                    session,
                    slots=message.slots,
                    nbytes=message.nbytes,
                    sharing=Sharing.DESCRIPTORS if isinstance(message, wire.NewHbm) else Sharing.NONE,
                    fds=[fd],
                )
            else:
                info = await self._gatherings.give(session, member.number, message, fd)
        finally:
            connection.giving = None
        connection.send(_accepted(info))

    def _extent_added(self, info: ExtentInfo, _fd: int) -> None:
        for connection in self._told(info):
            if connection.giving not in self._memory.shards(info.extent):
                self._send_extent(connection, info)

    def _extent_dropped(self, info: ExtentInfo) -> None:
        for connection in self._told(info):
            connection.send(wire.Dropped(tier=int(info.tier), extent=info.extent))

    def _told(self, info: ExtentInfo) -> list[_Connection]:
        """Members that map this extent."""
        sessions = self._owner.sessions
        return [
            connection
            for (number, _), connection in self._members.items()
            if number in sessions and _concerns(info, sessions[number])
        ]

    # ------------------------------------------------------------ endings

    def refuse(self, connection: _Connection, error: KvstoreError) -> None:
        """Tells a peer; a stranger is then disconnected, a member is not: its end must stay visible."""
        self._owner.counters.add("descriptor_refusals_total")
        self._refused.warning("refused", member=connection.member is not None, error=error)
        if connection.unread < _MAX_REFUSALS:
            connection.send(wire.Refused(text=str(error)))
        if connection.member is None:
            self.disconnect(connection)

    def failed(self, connection: _Connection) -> None:
        """A fault of ours while handling a message."""
        self._owner.counters.add("internal_errors_total")
        _LOG.fault("message failed")
        self.refuse(connection, KvstoreError("the daemon failed at this message"))

    def ended(self, connection: _Connection) -> None:
        """The peer's end is closed: by its death, or on purpose."""
        member = connection.member
        if member is None:
            self.disconnect(connection)
        else:
            connection.stop()
            self._gatherings.fail(member.session, member.number, "it has gone")
            member.life.socket_closed()

    def disconnect(self, connection: _Connection) -> None:
        """Closes a stranger's connection."""
        self._strangers.discard(connection)
        connection.stop()
        connection.socket.close()

    def _member_gone(self, member: Member) -> None:
        connection = self._members.pop((member.session, member.number), None)
        if connection is not None:
            connection.stop()


def _concerns(info: ExtentInfo, session: Session) -> bool:
    """Whether a session maps this extent: all of DRAM, and HBM of its own device and slot size."""
    if info.tier is Tier.DRAM:
        return True
    return info.tier is Tier.HBM and info.device == session.device and info.slot_bytes == session.slot_bytes


def _accepted(info: ExtentInfo) -> wire.Accepted:
    return wire.Accepted(extent=info.extent, slot_base=info.slot_base, slots=info.slots)


def _extent_message(info: ExtentInfo, shards: int) -> wire.Extent:
    cut = info.slot_bytes > 0
    return wire.Extent(
        tier=int(info.tier),
        device=info.device,
        extent=info.extent,
        nbytes=info.nbytes // shards,
        slot_base=info.slot_base if cut else 0,
        slots=info.slots if cut else 0,
        slot_bytes=info.slot_bytes // shards,
    )
