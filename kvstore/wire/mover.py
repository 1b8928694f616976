"""The messages between the daemon and a mover: packing and parsing, both sides.

    daemon → mover   Config {…}   Extent {extent, nbytes} + fd   Slab {extent, number, nbytes, slot_bytes}
                     Drop {tier, extent}   Limit {slabs_bytes}   Moves {MOVE[n]}   Sync {id}
    mover → daemon   Ready {threads}   SlabOpened {extent, number, direct}   SlabFailed {extent, number, text}
                     SlabLost {extent, number}   Replies {REPLY[n]}   Synced {id, text}   Notice {text}   Counts {…}

One packet of an AF_UNIX SOCK_SEQPACKET pair is one message. The mover is always started by the daemon of the same
installation, so there is no version. Numbers are little-endian. Order: an Extent and a Slab come before the first move
that names them; messages are taken in order, moves end in any order. What is said of a slab names its number too: by
then its extent may be another slab's, or nobody's.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from dataclasses import asdict, dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument
from kvstore.layout import Tier
from kvstore.wire.packed import MOVE, REPLY, records_of

__all__ = [
    "MAX_BATCH_MOVES",
    "MAX_PACKET_BYTES",
    "Config",
    "Counts",
    "Drop",
    "Extent",
    "Limit",
    "Message",
    "Moves",
    "Notice",
    "Ready",
    "Replies",
    "Slab",
    "SlabFailed",
    "SlabLost",
    "SlabOpened",
    "Sync",
    "Synced",
    "pack",
    "parse",
    "receive_packet",
    "send_packet",
]

MAX_BATCH_MOVES = 512
"""Moves, or replies, in one packet."""
MAX_PACKET_BYTES = 4 + MAX_BATCH_MOVES * MOVE.itemsize
_MAX_TEXT_BYTES = 1024

_KIND = struct.Struct("<I")
_EXTENT = struct.Struct("<HxxxxxxQ")
_SLAB = struct.Struct("<HBxIQQ")
_DROP = struct.Struct("<BxH")
_ID = struct.Struct("<Q")
_OPENED = struct.Struct("<HBxI")
_FAILED = struct.Struct("<HBxI")
_LOST = struct.Struct("<HxxI")
_SHORT = struct.Struct("<H")
_COUNTS = struct.Struct("<7Qd")


class Kind(IntEnum):
    """What a packet is."""

    CONFIG = 1
    EXTENT = 2
    SLAB = 3
    DROP = 4
    MOVES = 5
    SYNC = 6
    LIMIT = 7
    READY = 16
    SLAB_OPENED = 17
    SLAB_FAILED = 18
    REPLIES = 19
    SYNCED = 20
    NOTICE = 21
    COUNTS = 22
    SLAB_LOST = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The first message: what this mover is. The directory is locked by the daemon."""

    directory: str
    threads: int = 0
    """I/O threads; 0: probe the disk."""
    direct: bool = True
    """O_DIRECT where the file system allows it."""
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    read_operations_per_s: int = 0
    write_operations_per_s: int = 0
    """Most of each in a second; 0: no bound."""
    nice: int = 5
    """Added to the niceness of the daemon."""
    slabs_bytes: int = 0
    """Most that slabs may take on the disk, as `tiers.nvme.capacity` counts; 0: no bound."""
    ahead_ms: int = 0
    """By so much at least the daemon's time, and so that of trailers, is ahead of the steady clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A DRAM extent that moves may name; carries its memfd."""

    extent: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A slab that moves may name as `extent`; made where the directory does not have it. Answered.

    `filled`: there are blocks in it. Where the directory does not have it then, somebody has deleted it: it is lost.
    """

    extent: int
    number: int
    nbytes: int
    slot_bytes: int
    filled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Unmap a DRAM extent; delete an NVMe extent's slab. No move that names it may be under way."""

    tier: Tier
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """From now on slabs may take so much on the disk; as in Config."""

    slabs_bytes: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves to carry out, each answered once."""

    moves: NDArray[np.void]  # MOVE[1..512]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Make every write that was answered before durable; answered by the same id."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The configuration is taken."""

    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabOpened:
    """The slab is there; `direct`: past the page cache."""

    extent: int
    number: int
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabFailed:
    """The slab is not to be had; one line for people. `exists`: there is a file of it, which could not be opened."""

    extent: int
    number: int
    text: str
    exists: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLost:
    """Somebody has deleted the slab's file. The mover ends after it, so that no move is under way in the slab."""

    extent: int
    number: int


@dataclass(frozen=True, slots=True)
class Replies:
    """How moves ended."""

    replies: NDArray[np.void]  # REPLY[1..512]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """A Sync ended; `text` is empty where it went well. After a failure nothing written since the last is durable."""

    id: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that the daemon should log; one line."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What went through since the mover started; sent at most once a second, when it has changed."""

    read_blocks: int
    read_bytes: int
    written_blocks: int
    written_bytes: int
    corrupt_blocks: int
    failed_blocks: int
    syncs: int
    busy_s: float


Message = (
    Config
    | Extent
    | Slab
    | Drop
    | Limit
    | Moves
    | Sync
    | Ready
    | SlabOpened
    | SlabFailed
    | SlabLost
    | Replies
    | Synced
    | Notice
    | Counts
)


def pack(message: Message) -> bytes:
    """The packet of `message`; text is cut to 1024 bytes. Raises InvalidArgument for a batch of more than 512."""
    match message:
        case Config():
            return _KIND.pack(Kind.CONFIG) + json.dumps(asdict(message)).encode()
        case Extent():
            return _KIND.pack(Kind.EXTENT) + _EXTENT.pack(message.extent, message.nbytes)
        case Slab():
            return _KIND.pack(Kind.SLAB) + _SLAB.pack(
                message.extent, message.filled, message.number, message.nbytes, message.slot_bytes
            )
        case Drop():
            return _KIND.pack(Kind.DROP) + _DROP.pack(message.tier, message.extent)
        case Moves():
            return _KIND.pack(Kind.MOVES) + _batch(message.moves)
        case Sync():
            return _KIND.pack(Kind.SYNC) + _ID.pack(message.id)
        case Limit():
            return _KIND.pack(Kind.LIMIT) + _ID.pack(message.slabs_bytes)
        case Replies():
            return _KIND.pack(Kind.REPLIES) + _batch(message.replies)
        case _:
            return _pack_report(message)


def _pack_report(message: Ready | SlabOpened | SlabFailed | SlabLost | Synced | Notice | Counts) -> bytes:
    match message:
        case Ready():
            return _KIND.pack(Kind.READY) + _SHORT.pack(message.threads)
        case SlabOpened():
            return _KIND.pack(Kind.SLAB_OPENED) + _OPENED.pack(message.extent, message.direct, message.number)
        case SlabFailed():
            head = _FAILED.pack(message.extent, message.exists, message.number)
            return _KIND.pack(Kind.SLAB_FAILED) + head + _text(message.text)
        case SlabLost():
            return _KIND.pack(Kind.SLAB_LOST) + _LOST.pack(message.extent, message.number)
        case Synced():
            return _KIND.pack(Kind.SYNCED) + _ID.pack(message.id) + _text(message.text)
        case Notice():
            return _KIND.pack(Kind.NOTICE) + _text(message.text)
        case Counts():
            values = (getattr(message, field.name) for field in fields(Counts))
            return _KIND.pack(Kind.COUNTS) + _COUNTS.pack(*values)


def parse(packet: bytes) -> Message:
    """The message in `packet`. Raises InvalidArgument for anything that `pack` does not make."""
    if len(packet) < _KIND.size:
        raise InvalidArgument(f"a mover packet of {len(packet)} bytes is shorter than its header")
    kind, body = _KIND.unpack_from(packet)[0], packet[_KIND.size :]
    try:
        return _parse_request(kind, body) if kind < Kind.READY else _parse_report(kind, body)
    except (struct.error, RecursionError, TypeError, ValueError) as error:
        raise InvalidArgument(f"malformed mover packet of kind {kind}: {error}") from None


def _parse_request(kind: int, body: bytes) -> Message:
    match kind:
        case Kind.CONFIG:
            return Config(**json.loads(body))
        case Kind.EXTENT:
            extent, nbytes = _EXTENT.unpack(body)
            return Extent(extent=extent, nbytes=nbytes)
        case Kind.SLAB:
            extent, filled, number, nbytes, slot_bytes = _SLAB.unpack(body)
            return Slab(
                extent=extent, number=number, nbytes=nbytes, slot_bytes=slot_bytes, filled=bool(filled)
            )
        case Kind.DROP:
            tier, extent = _DROP.unpack(body)
            return Drop(tier=Tier(tier), extent=extent)
        case Kind.MOVES:
            return Moves(records_of(body, MOVE))
        case Kind.SYNC:
            return Sync(id=_ID.unpack(body)[0])
        case Kind.LIMIT:
            return Limit(slabs_bytes=_ID.unpack(body)[0])
        case _:
            raise InvalidArgument(f"unknown mover packet kind {kind}")


def _parse_report(kind: int, body: bytes) -> Message:
    match kind:
        case Kind.READY:
            return Ready(threads=_SHORT.unpack(body)[0])
        case Kind.SLAB_OPENED:
            extent, direct, number = _OPENED.unpack(body)
            return SlabOpened(extent=extent, number=number, direct=bool(direct))
        case Kind.SLAB_FAILED:
            extent, exists, number = _FAILED.unpack_from(body)
            text = _text_of(body[_FAILED.size :])
            return SlabFailed(extent=extent, number=number, text=text, exists=bool(exists))
        case Kind.SLAB_LOST:
            extent, number = _LOST.unpack(body)
            return SlabLost(extent=extent, number=number)
        case Kind.REPLIES:
            return Replies(records_of(body, REPLY))
        case Kind.SYNCED:
            (number,) = _ID.unpack_from(body)
            return Synced(id=number, text=_text_of(body[_ID.size :]))
        case Kind.NOTICE:
            return Notice(text=_text_of(body))
        case Kind.COUNTS:
            names = (field.name for field in fields(Counts))
            return Counts(**dict(zip(names, _COUNTS.unpack(body), strict=True)))
        case _:
            raise InvalidArgument(f"unknown mover packet kind {kind}")


def send_packet(sock: socket.socket, packet: bytes, fd: int | None = None) -> None:
    """Sends one packet, with a descriptor that stays the caller's. Raises OSError as the socket does."""
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]).tobytes())] if fd is not None else []
    )
    sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket) -> tuple[bytes, int | None]:
    """The next packet and its descriptor, the caller's from now on; empty at the end of the connection.

    Raises InvalidArgument for a packet that is too long, OSError as the socket does.
    """
    space = socket.CMSG_SPACE(4)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
        for fd in fds:
            os.close(fd)
        raise InvalidArgument("a mover packet or its descriptors are larger than allowed")
    return data, fds[0] if fds else None


def _batch(records: NDArray[np.void]) -> bytes:
    if not 1 <= len(records) <= MAX_BATCH_MOVES:
        raise InvalidArgument(f"a packet carries 1 to {MAX_BATCH_MOVES} records, not {len(records)}")
    return records.tobytes()


def _text(text: str) -> bytes:
    return text.encode()[:_MAX_TEXT_BYTES]


def _text_of(body: bytes) -> str:
    return body.decode(errors="replace")
