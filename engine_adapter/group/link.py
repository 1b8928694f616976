"""What the processes of a group say to each other about the store: join a session, map, copy. Both ends.

    scheduling process → member     Join {path, token, slot_bytes, device}    Map {pages}
                                   Copy {number, direction, slots}           Computing {steps}
    member → scheduling process     Opened {uuid, identity}           Mapped {}      Copied {number}    Failed {text}

Opened comes once, Mapped for each Map, Copied for each Copy, in whatever order copies complete. The socket is AF_UNIX
SOCK_SEQPACKET, one packet a message; the end of it is the end of the other process. Texts are JSON, numbers packed
little-endian. Sends may come from several threads, one thread receives.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction
from kvstore.errors import InvalidArgument

__all__ = [
    "MAX_COPY_BLOCKS",
    "Computing",
    "Copied",
    "Copy",
    "Failed",
    "Join",
    "LinkMessage",
    "Map",
    "Mapped",
    "Opened",
    "receive",
    "send",
]

MAX_COPY_BLOCKS = 8192
"""Most blocks of one Copy: a packet must fit the socket's buffer (208 KiB by default)."""

_KIND = struct.Struct("<I")
_PAGES = struct.Struct("<I")
_STEPS = struct.Struct("<I")
_COPY = struct.Struct("<QII")  # number, direction, blocks; then HBM slots, then DRAM slots
_COPIED = struct.Struct("<Q")
_MAX_PACKET_BYTES = 64 + 8 * MAX_COPY_BLOCKS

U32 = NDArray[np.uint32]


class _Kind(IntEnum):
    JOIN = 1
    MAP = 2
    COPY = 3
    OPENED = 4
    MAPPED = 5
    COPIED = 6
    FAILED = 7
    COMPUTING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Present yourself as a member of the session of `token` (hexadecimal, not shown)."""

    path: str
    token: str = field(repr=False)
    slot_bytes: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """Say when so many pages are mapped."""

    pages: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """Copy your part of these blocks, `[n]` each, and say when it is done."""

    number: int
    direction: Direction
    hbm_slots: U32
    dram_slots: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """See Copier.computing: your part of so many steps is under way, too. Said where it begins or ends to be any."""

    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The member has opened its device (`tiers.base.Device`)."""

    uuid: str
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """As many pages as were asked for are mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A copy is complete."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The member cannot go on, and ends; one line."""

    text: str


LinkMessage = Join | Map | Copy | Computing | Opened | Mapped | Copied | Failed


def send(link: socket.socket, message: LinkMessage) -> None:
    """Sends a message. OSError where the other process has gone."""
    match message:
        case Join():
            kind, body = _Kind.JOIN, _text(asdict(message))
        case Map():
            kind, body = _Kind.MAP, _PAGES.pack(message.pages)
        case Copy():
            kind, body = _Kind.COPY, _pack_copy(message)
        case Computing():
            kind, body = _Kind.COMPUTING, _STEPS.pack(message.steps)
        case Opened():
            kind, body = _Kind.OPENED, _text(asdict(message))
        case Mapped():
            kind, body = _Kind.MAPPED, b""
        case Copied():
            kind, body = _Kind.COPIED, _COPIED.pack(message.number)
        case Failed():
            kind, body = _Kind.FAILED, _text(asdict(message))
    link.sendall(_KIND.pack(kind) + body)


def receive(link: socket.socket) -> LinkMessage | None:
    """The next message; None where the other process has gone. Raises InvalidArgument for what `send` does not make."""
    try:
        packet = link.recv(_MAX_PACKET_BYTES)
    except ConnectionError:
        return None
    if not packet:
        return None
    try:
        return _parse(_Kind(_KIND.unpack_from(packet)[0]), packet[_KIND.size :])
    except (struct.error, ValueError, TypeError) as error:
        raise InvalidArgument(f"malformed message between the processes of a group: {error}") from None


def _text(value: dict[str, object]) -> bytes:
    return json.dumps(value).encode()


def _pack_copy(copy: Copy) -> bytes:
    head = _COPY.pack(copy.number, copy.direction, len(copy.hbm_slots))
    return head + copy.hbm_slots.astype("<u4").tobytes() + copy.dram_slots.astype("<u4").tobytes()


def _parse(kind: _Kind, body: bytes) -> LinkMessage:
    match kind:
        case _Kind.JOIN:
            return Join(**json.loads(body))
        case _Kind.MAP:
            return Map(pages=_PAGES.unpack(body)[0])
        case _Kind.COPY:
            number, direction, count = _COPY.unpack_from(body)
            slots = np.frombuffer(body, dtype="<u4", offset=_COPY.size).reshape(2, count)
            return Copy(
                number=number, direction=Direction(direction), hbm_slots=slots[0], dram_slots=slots[1]
            )
        case _Kind.COMPUTING:
            return Computing(steps=_STEPS.unpack(body)[0])
        case _Kind.OPENED:
            return Opened(**json.loads(body))
        case _Kind.MAPPED:
            return Mapped()
        case _Kind.COPIED:
            return Copied(number=_COPIED.unpack(body)[0])
        case _Kind.FAILED:
            return Failed(**json.loads(body))
