"""The server of framed session streams (`kvstore.wire.frames`): a message is answered in the turn that read it.

A peer is of the daemon's own uid, and names its session by the token; whoever has not done so in time is disconnected.
Answers are written at once; a peer that does not read fills a bounded buffer, and loses its stream when that is full.
Owner loop only.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.daemon.rpc import stream_error
from kvstore.daemon.session import Session
from kvstore.daemon.stream import QUEUED_MESSAGES, SessionStreams
from kvstore.errors import InvalidArgument, KvstoreError, ResourceExhausted
from kvstore.wire.frames import HELLO_BYTES, FrameReader, frame, parse_hello
from kvstore.wire.peer import check_peer
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["FrameServer"]

_LOG = Log("frames")
_HELLO_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64
_BACKLOG = 512


class _Stream(asyncio.Protocol):
    """One connection; it is the StreamOutbox of its session too."""

    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._hello = bytearray()
        self._reader = FrameReader(server.message_bytes)
        self._newest = 0
        self.failure: KvstoreError | None = None

    # ------------------------------------------------------------ of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admits the peer, or says why not."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._server.queue_bytes)
        try:
            self._server.admit(self, self._transport.get_extra_info("socket"))
        except KvstoreError as error:
            self.fail(error)
            return
        self._timeout = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, self._too_late)

    def data_received(self, data: bytes) -> None:
        """Takes what came: the hello first, then frames."""
        if self.failure is not None:
            return
        try:
            if self._session is None:
                self._take_hello(data)
                return
            for packed in self._reader.feed(data):
                self._take(packed)
        except KvstoreError as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (how it broke does not matter)
        """The stream is over."""
        self._transport = None
        if self._timeout is not None:
            self._timeout.cancel()
        if self._opening is not None:
            self._opening.cancel()
        self._server.ended(self, self._session)

    # ------------------------------------------------------------ of the session

    def put(self, message: pb.ServerMessage) -> None:
        """See StreamOutbox."""
        transport = self._transport
        if transport is None or self.failure is not None:
            return
        if transport.get_write_buffer_size() > self._server.queue_bytes:
            self.fail(ResourceExhausted("too many answers wait unread: the stream is closed"))
        else:
            transport.write(frame(message.SerializeToString()))

    def fail(self, error: KvstoreError) -> None:
        """See StreamOutbox. What is buffered is still sent, unless the peer reads nothing any more."""
        if self.failure is not None:
            return
        self.failure = error
        if self._session is not None:
            self._server.streams.count_failure(error)
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() > self._server.queue_bytes:
            self._transport.abort()
        else:
            answer = pb.ServerMessage(error=stream_error(0, error))
            self._transport.write(frame(answer.SerializeToString()))
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ of its own

    def _take_hello(self, data: bytes) -> None:
        """What comes behind the hello waits here, and in the socket, until the session is open."""
        self._hello += data  # while that is awaited too: the loop may still deliver what it had read
        if self._opening is None and len(self._hello) >= HELLO_BYTES:
            token = parse_hello(bytes(self._hello[:HELLO_BYTES]))
            del self._hello[:HELLO_BYTES]
            assert self._transport is not None
            self._transport.pause_reading()
            self._opening = asyncio.create_task(self._open(token))

    async def _open(self, token: bytes) -> None:
        try:
            session = await self._server.streams.open(token, self)
        except KvstoreError as error:
            self.fail(error)
            return
        except Exception:  # noqa: BLE001 (a task's boundary: one peer must not end the daemon)
            _LOG.fault("a stream failed to open")
            self.abort()
            return
        if self._timeout is not None:
            self._timeout.cancel()
        if self._transport is None:  # it has gone meanwhile
            self._server.streams.close(session, self)
            return
        self._session = session
        self._server.opened(self)
        self._transport.resume_reading()
        waiting, self._hello = bytes(self._hello), bytearray()
        if waiting:
            self.data_received(waiting)

    def _take(self, packed: bytes) -> None:
        session = self._session
        if session is None or session.outbox is not self:
            return  # resumed elsewhere, or ended: what was sent here must not undo what was granted since
        try:
            message = pb.ClientMessage.FromString(packed)
        except Exception:  # noqa: BLE001 (protobuf's DecodeError has no one home over its versions)
            raise InvalidArgument("a frame is no ClientMessage") from None
        self._newest = self._server.streams.take(session, message, self._newest)

    def _too_late(self) -> None:
        if self._session is None and self._opening is None:
            self.abort()


class FrameServer:
    """Listens on `<socket>.stream`."""

    def __init__(self, owner: Owner, streams: SessionStreams) -> None:
        self.streams = streams
        self.message_bytes = owner.config.limits.message_bytes
        self.queue_bytes = QUEUED_MESSAGES * self.message_bytes
        self._server: asyncio.AbstractServer | None = None
        self._strangers: set[_Stream] = set()
        self._known: set[_Stream] = set()

    async def listen(self, listener: socket.socket) -> None:
        """Accepts on a bound socket from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Stream(self), sock=listener, backlog=_BACKLOG)

    def close(self) -> None:
        """Accepts nobody any more and ends every stream."""
        if self._server is not None:
            self._server.close()
        for stream in (*self._strangers, *self._known):
            stream.abort()

    def admit(self, stream: _Stream, sock: socket.socket) -> None:
        """A peer has connected. Raises: PermissionDenied, ResourceExhausted."""
        check_peer(sock)
        if len(self._strangers) >= _MAX_STRANGERS:
            raise ResourceExhausted("too many streams are being opened", retry_after_s=0.1)
        self._strangers.add(stream)

    def opened(self, stream: _Stream) -> None:
        """A peer has named its session."""
        self._strangers.discard(stream)
        self._known.add(stream)

    def ended(self, stream: _Stream, session: Session | None) -> None:
        """A connection is gone."""
        self._strangers.discard(stream)
        self._known.discard(stream)
        if session is not None:
            self.streams.close(session, stream)
