"""The 4 KiB behind each slot of a slab: what the block is, and a checksum that proves it is whole.

Written in one call with the payload and checked on every read, so a torn write, a flipped bit, a misplaced write and a
slot that was given to another block since are all seen. Enough is in it to rebuild the index without LMDB.

Little-endian, 112 bytes, the rest of the page is not used:
magic u64, version u32, generation of the slot u32, offset of the slot in its slab u64, payload bytes u32, depth u32,
wall clock of the write in ms u64, hash 16, parent 16, first half of the namespace's digest 16, xxh3-128 of the payload
16, xxh3-64 of all before it u64.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from tiers.base import PAGE_BYTES

__all__ = ["TRAILER_BYTES", "Trailer", "checksum", "checksum_in", "read_trailer", "write_trailer"]

TRAILER_BYTES = PAGE_BYTES
_MAGIC = int.from_bytes(b"KVSTRAIL", "little")
_VERSION = 1
_FIELDS = struct.Struct("<QIIQIIQ16s16s16s16s")
_SELF = struct.Struct("<Q")
_CHECKSUM = slice(_FIELDS.size - 16, _FIELDS.size)


class Trailer(NamedTuple):
    """What one trailer says. A tuple, as one is made for each block that moves."""

    generation: int
    offset: int
    length: int
    depth: int
    written_ms: int
    hash: bytes
    parent: bytes
    ns_digest: bytes
    checksum: bytes


def checksum(payload: memoryview) -> bytes:
    """xxh3-128 of the payload, 16 bytes little-endian. Without the GIL; as fast as memory is read."""
    return xxhash.xxh3_128_intdigest(payload).to_bytes(16, "little")


def write_trailer(page: memoryview, trailer: Trailer) -> None:
    """Puts the trailer at the start of `page` and leaves the rest as it is."""
    _FIELDS.pack_into(page, 0, _MAGIC, _VERSION, *trailer)
    _SELF.pack_into(page, _FIELDS.size, xxhash.xxh3_64_intdigest(page[: _FIELDS.size]))


def checksum_in(page: memoryview) -> bytes:
    """What the page says of the payload before it, if it is a trailer at all."""
    return bytes(page[_CHECKSUM])


def read_trailer(page: memoryview) -> Trailer | None:
    """The trailer in `page`; None where there is none of this version, or not a whole one."""
    magic, version, *fields = _FIELDS.unpack_from(page)
    if magic != _MAGIC or version != _VERSION:
        return None
    if _SELF.unpack_from(page, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(page[: _FIELDS.size]):
        return None
    return Trailer(*fields)
