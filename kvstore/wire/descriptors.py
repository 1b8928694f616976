"""The messages of the descriptor socket (`<socket>.fd`), both sides: packing, parsing, sending with descriptors.

A member (a process of a session) connects, says HELLO with its own pidfd, and gets the shared tables and the extents
that it may map; then the same connection is its liveness socket and stays open for the life of the process.

    member → daemon   Hello {token, member} + pidfd        NewHbm {nbytes, slots, slot_bytes} + fd
                      Distrust {extent}                    NewPlainHbm, as NewHbm, + fd of a placeholder
    daemon → member   Tables {nbytes} + fd                 Extent {…} + fd            Ready {}
                      Accepted {extent, slot_base, slots}  Refused {text}             Dropped {tier, extent}
                      Wanted {nbytes, slots, slot_bytes}

The answer to NewHbm, NewPlainHbm and Distrust is Accepted or Refused, one for each, in order; Extent and Dropped may
come between at any time. Refused in place of the first Tables means that the Hello was not accepted; the daemon then
closes. A restarted daemon sends Tables, every Extent and Ready again: a member passes over what it has.

In a group of N processes an HBM extent has N shards, one a process, with the same slot numbers and an N-th of the
bytes each. Member 0 gives its own as any worker does (`slot_bytes` says that it is a shard); the daemon asks each other
member by Wanted, which answers with NewHbm (or NewPlainHbm), or with Refused. All of them are then Accepted or Refused
together, and each is sent its own shard of the extents that are there.

The socket is AF_UNIX SOCK_SEQPACKET, so one packet is one message. All numbers are little-endian; each packet starts
with a magic, the protocol version and its kind. Standard library only; calls block or not as the given socket does. Not
thread-safe per socket.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvstore.errors import InvalidArgument

__all__ = [
    "DESCRIPTOR_VERSION",
    "MAX_FDS",
    "MAX_PACKET_BYTES",
    "Accepted",
    "Distrust",
    "Dropped",
    "Extent",
    "Hello",
    "Kind",
    "Message",
    "NewHbm",
    "NewPlainHbm",
    "Ready",
    "Received",
    "Refused",
    "Tables",
    "Wanted",
    "descriptor_path",
    "pack",
    "parse",
    "receive",
    "send",
]

DESCRIPTOR_VERSION = 1
MAX_PACKET_BYTES = 512
MAX_FDS = 1
"""Descriptors in one packet, at most; more are closed and refused."""

_MAGIC = b"KVFD"
_HEADER = struct.Struct("<4sHH")  # magic, version, kind
_HELLO = struct.Struct("<16sI")  # token, member
_TABLES = struct.Struct("<Q")  # bytes
_EXTENT = struct.Struct("<BBHIIQQ")  # tier, device, extent, slot_base, slots, bytes, slot_bytes
_NEW_HBM = struct.Struct("<QIQ")  # bytes, slots, slot_bytes
_ACCEPTED = struct.Struct("<HII")  # extent, slot_base, slots
_DROPPED = struct.Struct("<BH")  # tier, extent
_DISTRUST = struct.Struct("<H")  # extent
_MAX_TEXT_BYTES = 400


class Kind(IntEnum):
    """What a packet is."""

    HELLO = 1
    TABLES = 2
    EXTENT = 3
    READY = 4
    NEW_HBM = 5
    ACCEPTED = 6
    REFUSED = 7
    DROPPED = 8
    NEW_PLAIN_HBM = 9
    DISTRUST = 10
    WANTED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A member presents itself; carries its own pidfd. `token` is of Attach (16 bytes, not shown)."""

    token: bytes = field(repr=False)
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The shared tables, `nbytes` long; carries their descriptor, to be mapped read-only."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One extent; carries its descriptor.

    `extent` is its line in the extents table, `tier` a `Tier`. A DRAM extent that no slot class owns yet has
    `slots == slot_bytes == 0`: the extents table says so later, when one does.
    """

    tier: int
    device: int
    extent: int
    nbytes: int
    slot_base: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The initial set is complete; extents that come later are pushed as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHbm:
    """A worker gives an HBM extent that it made: `slots` × `slot_bytes` = `nbytes`; carries its descriptor."""

    nbytes: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlainHbm:
    """As NewHbm, of memory that no other process can reach: it goes with the worker.

    Carries a sealed memfd that is shorter than `nbytes` and stands for it. Refused where another session maps HBM of
    this device and slot size.
    """

    nbytes: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Distrust:
    """An HBM extent that earlier processes left does not hold what it should: its blocks are to be forgotten.

    Accepted: they are, and the extent stays, empty. Refused: somebody holds a slot of it.
    """

    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Member 0 of a group has given its shard of an HBM extent: this member is to give its own, of this size."""

    nbytes: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The HBM extent is kept by the keeper and known to the store under these slots."""

    extent: int
    slot_base: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What was sent is not accepted; one line for people."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """An extent has left the store: unmap it."""

    tier: int
    extent: int


Message = (
    Hello | Tables | Extent | Ready | NewHbm | NewPlainHbm | Distrust | Wanted | Accepted | Refused | Dropped
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One message and the descriptors that came with it, which now belong to the caller."""

    message: Message
    fds: tuple[int, ...]

    def close(self) -> None:
        """Closes the descriptors that came along."""
        for fd in self.fds:
            os.close(fd)


def descriptor_path(socket_path: str | os.PathLike[str]) -> str:
    """Where the descriptor socket of a daemon stands, by the path of its RPC socket."""
    return f"{os.fspath(socket_path)}.fd"


def pack(message: Message) -> bytes:
    """The packet of `message`."""
    match message:
        case Hello():
            kind, body = Kind.HELLO, _HELLO.pack(message.token, message.member)
        case Tables():
            kind, body = Kind.TABLES, _TABLES.pack(message.nbytes)
        case Extent():
            kind, body = Kind.EXTENT, _pack_extent(message)
        case Ready():
            kind, body = Kind.READY, b""
        case NewHbm():
            kind, body = Kind.NEW_HBM, _NEW_HBM.pack(message.nbytes, message.slots, message.slot_bytes)
        case NewPlainHbm():
            kind, body = Kind.NEW_PLAIN_HBM, _NEW_HBM.pack(message.nbytes, message.slots, message.slot_bytes)
        case Distrust():
            kind, body = Kind.DISTRUST, _DISTRUST.pack(message.extent)
        case Wanted():
            kind, body = Kind.WANTED, _NEW_HBM.pack(message.nbytes, message.slots, message.slot_bytes)
        case Accepted():
            kind, body = Kind.ACCEPTED, _ACCEPTED.pack(message.extent, message.slot_base, message.slots)
        case Refused():
            text = message.text.encode()[:_MAX_TEXT_BYTES]
            kind, body = Kind.REFUSED, text
        case Dropped():
            kind, body = Kind.DROPPED, _DROPPED.pack(message.tier, message.extent)
    return _HEADER.pack(_MAGIC, DESCRIPTOR_VERSION, kind) + body


def _pack_extent(extent: Extent) -> bytes:
    return _EXTENT.pack(
        extent.tier,
        extent.device,
        extent.extent,
        extent.slot_base,
        extent.slots,
        extent.nbytes,
        extent.slot_bytes,
    )


def parse(packet: bytes) -> Message:
    """The message in `packet`. Raises InvalidArgument for anything that `pack` does not make."""
    if len(packet) < _HEADER.size:
        raise InvalidArgument(f"a descriptor packet of {len(packet)} bytes is shorter than its header")
    magic, version, kind = _HEADER.unpack_from(packet)
    if magic != _MAGIC:
        raise InvalidArgument("the peer on the descriptor socket does not speak this protocol")
    if version != DESCRIPTOR_VERSION:
        raise InvalidArgument(f"descriptor protocol version {version}, this side speaks {DESCRIPTOR_VERSION}")
    try:
        return _parse_body(kind, packet[_HEADER.size :])
    except struct.error as error:
        raise InvalidArgument(f"malformed descriptor packet of kind {kind}: {error}") from None


def _parse_body(kind: int, body: bytes) -> Message:
    match kind:
        case Kind.HELLO:
            token, member = _HELLO.unpack(body)
            return Hello(token=token, member=member)
        case Kind.TABLES:
            return Tables(nbytes=_TABLES.unpack(body)[0])
        case Kind.EXTENT:
            return _parse_extent(body)
        case Kind.READY:
            return Ready()
        case Kind.NEW_HBM:
            nbytes, slots, slot_bytes = _NEW_HBM.unpack(body)
            return NewHbm(nbytes=nbytes, slots=slots, slot_bytes=slot_bytes)
        case Kind.NEW_PLAIN_HBM:
            nbytes, slots, slot_bytes = _NEW_HBM.unpack(body)
            return NewPlainHbm(nbytes=nbytes, slots=slots, slot_bytes=slot_bytes)
        case Kind.WANTED:
            nbytes, slots, slot_bytes = _NEW_HBM.unpack(body)
            return Wanted(nbytes=nbytes, slots=slots, slot_bytes=slot_bytes)
        case Kind.DISTRUST:
            return Distrust(extent=_DISTRUST.unpack(body)[0])
        case Kind.ACCEPTED:
            extent, slot_base, slots = _ACCEPTED.unpack(body)
            return Accepted(extent=extent, slot_base=slot_base, slots=slots)
        case Kind.REFUSED:
            return Refused(text=body.decode(errors="replace"))
        case Kind.DROPPED:
            tier, extent = _DROPPED.unpack(body)
            return Dropped(tier=tier, extent=extent)
        case _:
            raise InvalidArgument(f"unknown descriptor packet kind {kind}")


def _parse_extent(body: bytes) -> Extent:
    tier, device, extent, slot_base, slots, nbytes, slot_bytes = _EXTENT.unpack(body)
    return Extent(
        tier=tier,
        device=device,
        extent=extent,
        nbytes=nbytes,
        slot_base=slot_base,
        slots=slots,
        slot_bytes=slot_bytes,
    )


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Sends `message`, with `fds` attached (they stay the caller's).

    Raises OSError as the socket does: BlockingIOError when a non-blocking one is full, BrokenPipeError at EOF.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
    sock.sendmsg([pack(message)], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> Received | None:
    """The next message, or None at the end of the connection.

    Raises InvalidArgument for a malformed packet (its descriptors are closed), OSError as the socket does.
    """
    space = socket.CMSG_SPACE(4 * MAX_FDS)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data and not fds:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise InvalidArgument("a descriptor packet or its descriptors are larger than allowed")
        message = parse(data)
    except InvalidArgument:
        for fd in fds:
            os.close(fd)
        raise
    return Received(message=message, fds=tuple(fds))
