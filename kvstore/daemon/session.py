"""What the shell keeps of a session beside the store's tables: its stream, its members, its namespaces.

Owner loop only. Nothing here outlives the daemon: the tables and the keeper's descriptors do.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import KvstoreError, ResourceExhausted
from kvstore.moves import NamespaceId, SessionId
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["TOKEN_BYTES", "Outbox", "Session", "StreamOutbox", "token_digest"]

TOKEN_BYTES = 16


def token_digest(token: bytes) -> bytes:
    """16 bytes by which a session is found: the token itself is kept nowhere.

    Lookups by a digest leak no timing of the token.
    """
    return hashlib.blake2b(token, digest_size=16, person=b"kvstore.token").digest()


class StreamOutbox(Protocol):
    """Messages to one stream, in order and bounded: who reads no more loses the stream."""

    def put(self, message: pb.ServerMessage) -> None:
        """Sends a message, or fails the stream. Never waits."""
        ...

    def fail(self, error: KvstoreError) -> None:
        """Ends the stream; the first reason counts."""
        ...


class Outbox:
    """StreamOutbox of an RPC: a queue that its writer takes from, bounded in number and bytes."""

    __slots__ = ("_bytes", "_failed", "_max_bytes", "_max_messages", "_messages", "_wake", "failure")

    def __init__(self, *, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._bytes = 0
        self._messages: deque[pb.ServerMessage] = deque()
        self._wake = asyncio.Event()
        self._failed = asyncio.Event()
        self.failure: KvstoreError | None = None
        """What the stream ends with; None while it goes on."""

    def fail(self, error: KvstoreError) -> None:
        """Ends the stream; the first reason counts."""
        if self.failure is None:
            self.failure = error
            self._messages.clear()
            self._failed.set()

    async def failed(self) -> None:
        """Returns when the stream has to end: its writer may be stuck in a message that the client does not read."""
        await self._failed.wait()

    def put(self, message: pb.ServerMessage) -> None:
        """Appends a message, or fails the stream."""
        if len(self._messages) >= self._max_messages or self._bytes > self._max_bytes:
            self.fail(ResourceExhausted(f"{len(self._messages)} answers wait unread: the stream is closed"))
        elif self.failure is None:
            self._bytes += message.ByteSize()
            self._messages.append(message)
            self._wake.set()

    async def take(self) -> pb.ServerMessage:
        """The next message."""
        while not self._messages:
            self._wake.clear()
            await self._wake.wait()
        message = self._messages.popleft()
        self._bytes -= message.ByteSize()
        return message


@dataclass(slots=True, kw_only=True)
class Session:
    """One attached session."""

    id: SessionId
    digest: bytes
    name: str
    device: int | None
    slot_bytes: int
    hbm_bytes: int
    """Its budget of owned HBM; after a restart of the daemon, which does not know it, the configuration's bound."""
    members: int
    """Processes that were announced at Attach."""
    identity: int = 0
    """Digest of its device (`kvstore.daemon.identity`)."""
    presented: bool = False
    """Whether all of them have presented themselves."""
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `presented`."""
    lost: bool = False
    """Whether it has to resume first: its stream was lost, or it comes from before this boot."""
    namespaces: dict[int, NamespaceId] = field(default_factory=dict)
    outbox: StreamOutbox | None = None
    last_sent: int = 0
    """Id of the newest message to the client; grows over all its streams."""
    wants: bool = False
    """Whether its last step asked for slots in hand."""
    deadline: asyncio.TimerHandle | None = None
    """Runs at the time by which its members must have presented themselves; None once that is decided."""

    def next_id(self) -> int:
        """Id of the message that is sent next; `post` takes it."""
        return self.last_sent + 1

    def post(self, **body: object) -> None:
        """Queues one message under the next id; drops it where there is no stream (a resume states what is held)."""
        self.last_sent += 1
        if self.outbox is not None:
            self.outbox.put(pb.ServerMessage(id=self.last_sent, **body))  # type: ignore[arg-type]

    def cancel_deadline(self) -> None:
        """Its members are all there, or it is gone."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
