"""The flight recorder: the last decisions of store and daemon, as fixed records in a ring that outlives the crash.

Owns the ring over memory that the caller gives (a memfd that the keeper holds). One writer; readers, in whatever
process, never block it: each record carries its number and a checksum of itself, so one that is being written, or was
when the writer died, is passed over. One record a call, with counts and the first block, never one a block. Pure: the
clock is an argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import xxhash

from kvstore.errors import Corruption, InvalidArgument
from kvstore.layout import Tier
from kvstore.moves import MissCause, MoveStatus

__all__ = [
    "RING_RECORDS",
    "Event",
    "NoRecorder",
    "Record",
    "Recorder",
    "RingRecorder",
    "describe",
    "read_ring",
    "ring_bytes",
]

RING_RECORDS = 10_240
"""More than the 10,000 that are promised, so that those being overwritten are not among them."""
_HEADER_BYTES = 4096
_MAGIC = b"KVBLKBX1"
_HEADER = struct.Struct("<8sII")  # magic, records, bytes of a record
_BODY = struct.Struct("<QQHHIII16sQ")  # number, µs, event, who, count, a, b, hash, c
_CHECK = struct.Struct("<Q")
_RECORD_BYTES = _BODY.size + _CHECK.size
assert _RECORD_BYTES == 64
_NO_HASH = bytes(16)
_NAMES: Mapping[str, type[IntEnum]] = {"tier": Tier, "cause": MissCause, "status": MoveStatus}
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


class Event(IntEnum):
    """What happened. Numbers are kept in files: none is used again for something else."""

    BOOT = 1
    RECOVERED = 2
    READY = 3
    DRAINING = 4
    STOPPED = 5
    FAULT = 6
    ATTACH = 10
    ACTIVATE = 11
    RESUME = 12
    LOST = 13
    DYING = 14
    DEAD = 15
    GRANT = 20
    SEAL = 21
    LOADED = 22
    STORED = 23
    PREFETCH = 24
    PLAN = 25
    TIER_USE = 26
    DROP = 30
    CLEAR = 31
    CONDEMN = 32
    WRONG = 33
    MOVES_BEGIN = 40
    MOVES_END = 41
    MOVES_FAILED = 42
    MOVER_START = 43
    MOVER_END = 44
    PATH_OPEN = 45
    PATH_PAUSED = 46
    PATH_RESUMED = 47
    EXTENT_ADDED = 50
    EXTENT_DROPPED = 51


_MEANING: Mapping[Event, tuple[str, str, str, str]] = {
    # who, a, b, c; an empty name is not shown
    Event.BOOT: ("", "pid", "", ""),
    Event.RECOVERED: ("", "", "", ""),
    Event.FAULT: ("", "pid", "", ""),
    Event.ATTACH: ("session", "members", "", "slot_bytes"),
    Event.ACTIVATE: ("session", "", "", ""),
    Event.RESUME: ("session", "", "", ""),
    Event.LOST: ("session", "", "", ""),
    Event.DYING: ("session", "", "", ""),
    Event.DEAD: ("session", "", "", ""),
    Event.GRANT: ("session", "hits", "fills", "lease"),
    Event.SEAL: ("session", "published", "", ""),
    Event.LOADED: ("session", "", "", ""),
    Event.STORED: ("session", "", "", ""),
    Event.PREFETCH: ("session", "", "", "lease"),
    Event.PLAN: ("session", "loaded", "tier", "bytes_per_s"),
    Event.TIER_USE: ("session", "tier", "", ""),
    Event.DROP: ("tier", "ended", "cause", ""),
    Event.CLEAR: ("", "kept", "", "namespace"),
    Event.CONDEMN: ("tier", "", "", ""),
    Event.WRONG: ("tier", "slot", "", ""),
    Event.MOVES_BEGIN: ("path", "reads", "writes", "first_id"),
    Event.MOVES_END: ("path", "ok", "", "first_id"),
    Event.MOVES_FAILED: ("path", "status", "", "first_id"),
    Event.MOVER_START: ("path", "pid", "", ""),
    Event.MOVER_END: ("path", "exit_or_signal", "", ""),
    Event.PATH_OPEN: ("path", "slabs", "", ""),
    Event.PATH_PAUSED: ("path", "", "", ""),
    Event.PATH_RESUMED: ("path", "", "", ""),
    Event.EXTENT_ADDED: ("tier", "extent", "device", "bytes"),
    Event.EXTENT_DROPPED: ("tier", "extent", "", ""),
}
_COUNTED = {
    Event.TIER_USE: "use",
    Event.RECOVERED: "rows",
    Event.READY: "rows",
    Event.STOPPED: "left",
    Event.DEAD: "held",
    Event.EXTENT_ADDED: "slots",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One decision."""

    number: int
    """Counts from 1 over all lives of the ring."""
    time_us: int
    """Wall clock, microseconds since 1970."""
    event: Event
    who: int
    count: int
    a: int
    b: int
    c: int
    hash: bytes
    """Of the first block, 16 bytes; zeros where there is none."""


class Recorder(Protocol):
    """What store and daemon tell their decisions to. Owner loop only."""

    def note(
        self,
        event: Event,
        who: int = 0,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        block: bytes = _NO_HASH,
    ) -> None:
        """Adds a record; numbers are cut to 16 (`who`), 32 and 64 bits (`c`)."""
        ...


class NoRecorder:
    """Forgets everything: for tests, and stores without a daemon."""

    __slots__ = ()

    def note(
        self,
        event: Event,
        who: int = 0,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        block: bytes = _NO_HASH,
    ) -> None:
        """Nothing."""


class RingRecorder:
    """The writer. A ring that an earlier writer left is gone on with; anything else is made an empty ring."""

    __slots__ = ("_at", "_clock_us", "_memory", "_number", "_records")

    def __init__(self, memory: memoryview, clock_us: Callable[[], int]) -> None:
        """`memory`: writable, of `ring_bytes(n)` bytes. Raises InvalidArgument where not one record fits."""
        self._records = (len(memory) - _HEADER_BYTES) // _RECORD_BYTES
        if self._records < 1:
            raise InvalidArgument(f"a ring needs at least {ring_bytes(1)} bytes, not {len(memory)}")
        self._memory = memory
        self._clock_us = clock_us
        header = _HEADER.pack(_MAGIC, self._records, _RECORD_BYTES)
        if bytes(memory[: len(header)]) != header:
            memory[:] = bytes(len(memory))
            memory[: len(header)] = header
        self._number = max((record.number for record in read_ring(memory)), default=0)
        self._at = _HEADER_BYTES + self._number % self._records * _RECORD_BYTES

    def note(
        self,
        event: Event,
        who: int = 0,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        block: bytes = _NO_HASH,
    ) -> None:
        """See Recorder. About a microsecond."""
        self._number = number = self._number + 1
        body = _BODY.pack(
            number,
            self._clock_us(),
            event,
            who & 0xFFFF,
            count & _MASK_32,
            a & _MASK_32,
            b & _MASK_32,
            block,
            c & _MASK_64,
        )
        at = self._at
        self._memory[at : at + _RECORD_BYTES] = body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))
        at += _RECORD_BYTES
        self._at = at if at < _HEADER_BYTES + self._records * _RECORD_BYTES else _HEADER_BYTES


def ring_bytes(records: int) -> int:
    """Bytes of a ring, a multiple of 4096."""
    return -(-(_HEADER_BYTES + records * _RECORD_BYTES) // 4096) * 4096


def read_ring(memory: memoryview | bytes) -> list[Record]:
    """The whole records of a ring, the oldest first; torn ones are passed over. The ring may be written meanwhile.

    Raises Corruption where this is no ring of this version.
    """
    if len(memory) < _HEADER_BYTES:
        raise Corruption(f"no flight recording: {len(memory)} bytes")
    magic, records, size = _HEADER.unpack_from(memory)
    if magic != _MAGIC or size != _RECORD_BYTES or _HEADER_BYTES + records * size > len(memory):
        raise Corruption("no flight recording of this version")
    copy = bytes(memory[_HEADER_BYTES : _HEADER_BYTES + records * size])
    found = [_record(copy[at : at + size]) for at in range(0, len(copy), size)]
    return sorted((record for record in found if record is not None), key=lambda record: record.number)


def _record(packed: bytes) -> Record | None:
    body = packed[: _BODY.size]
    number, time_us, event, who, count, a, b, block, c = _BODY.unpack(body)
    if not number or _CHECK.unpack_from(packed, _BODY.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    try:
        known = Event(event)
    except ValueError:  # of a newer version
        return None
    return Record(
        number=number, time_us=time_us, event=known, who=who, count=count, a=a, b=b, c=c, hash=block
    )


def describe(record: Record) -> Mapping[str, int | str]:
    """What a record says, by name; what means nothing for its event is left out."""
    names = _MEANING.get(record.event, ("", "", "", ""))
    values = (record.who, record.a, record.b, record.c)
    told: dict[str, int | str] = {}
    if names[0]:
        told[names[0]] = _named(names[0], values[0])
    told[_COUNTED.get(record.event, "count")] = record.count
    told |= {name: _named(name, value) for name, value in zip(names[1:], values[1:], strict=True) if name}
    if record.hash != _NO_HASH:
        told["block"] = record.hash.hex()
    return told


def _named(name: str, value: int) -> int | str:
    """Numbers of an enumeration by its words."""
    words = _NAMES.get(name)
    if words is None or value not in set(words):
        return value
    return words(value).name.lower().replace("_", " ")
