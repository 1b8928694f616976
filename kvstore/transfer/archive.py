"""The file that a namespace travels in. Pure: bytes in, bytes out.

    header    "KVEXPORT", version u32, bytes of the JSON u32, JSON (UTF-8), xxh3-128 of all of that
    record *  magic "KVBK", depth u32, touch u64, hash 16, parent 16, xxh3-128 of the payload, xxh3-64 of all before it,
              payload: `slot_bytes` bytes
    end       magic "KVEN", zero u32, records u64, xxh3-128 over the heads of all records, xxh3-64 of all before it

Little-endian. Records have one size, so that one whose head is damaged costs no other. Each block is proved by its own
checksum, and its head by another; the end says how many there are and that none was exchanged. A file without an end
was cut short: what is whole in it is good. The JSON carries the namespace's parts and the key of its hash chain, since
token ids are not stored and hashes cannot be made anew: whoever has the file can tell which prompts are in it, as he
could from the KV itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from kvstore.errors import Corruption, InvalidArgument
from kvstore.geometry import SLOT_ALIGN_BYTES
from kvstore.identity import KEY_BYTES, namespace_digest

__all__ = [
    "END_BYTES",
    "HEAD_BYTES",
    "PREFIX_BYTES",
    "VERSION",
    "BlockHead",
    "End",
    "Header",
    "RunningDigest",
    "pack_end",
    "pack_head",
    "pack_header",
    "payload_checksum",
    "read_end",
    "read_head",
    "read_header",
    "rest_of_header",
]

VERSION = 1
_MAGIC = b"KVEXPORT"
_PREFIX = struct.Struct("<8sII")
PREFIX_BYTES = _PREFIX.size
"""What is read first: it says how much of the header follows."""
_DIGEST_BYTES = 16
_MAX_JSON_BYTES = 1 << 20
_HEAD = struct.Struct("<4sIQ16s16s16s")
_CHECK = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _CHECK.size
"""Of a record before its payload."""
_END = struct.Struct("<4sIQ16s")
END_BYTES = _END.size + _CHECK.size
_BLOCK, _LAST = b"KVBK", b"KVEN"
_MAX_SLOT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is in the file."""

    parts: Mapping[str, bytes]
    """Of the namespace (kvstore.identity)."""
    key: bytes
    """Of its hash chain."""
    slot_bytes: int
    """Of every block."""
    planned_blocks: int
    """How many there were when the export began; some may have gone before they were read."""
    created_ms: int
    """Wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHead:
    """What a block is."""

    hash: bytes
    parent: bytes  # zeros at the root, and where the parent was not known any more
    depth: int
    touch: int  # kvstore.layout.touch_key
    checksum: bytes  # xxh3-128 of the payload


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What the file says of itself when it is complete."""

    blocks: int
    digest: bytes


class RunningDigest:
    """Count and digest over the heads of the records so far; the heads carry their payloads' checksums."""

    __slots__ = ("_state", "blocks")

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.blocks = 0

    def add(self, head: bytes) -> None:
        """The next record's head."""
        self._state.update(head)
        self.blocks += 1

    def end(self) -> End:
        """What the end of the file says."""
        return End(blocks=self.blocks, digest=self._state.digest())


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """xxh3-128, 16 bytes little-endian, as on disk."""
    return xxhash.xxh3_128_intdigest(payload).to_bytes(_DIGEST_BYTES, "little")


def pack_header(header: Header) -> bytes:
    """The whole header."""
    text = json.dumps(
        {
            "parts": {tag: value.hex() for tag, value in sorted(header.parts.items())},
            "key": header.key.hex(),
            "slot_bytes": header.slot_bytes,
            "planned_blocks": header.planned_blocks,
            "created_ms": header.created_ms,
        }
    ).encode()
    whole = _PREFIX.pack(_MAGIC, VERSION, len(text)) + text
    return whole + xxhash.xxh3_128_digest(whole)


def rest_of_header(prefix: bytes) -> int:
    """Bytes of the header behind its first PREFIX_BYTES. Raises Corruption where this is no export of this version."""
    if len(prefix) < PREFIX_BYTES or prefix[:8] != _MAGIC:
        raise Corruption("this is no export of kvstore")
    _, version, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise Corruption(f"this is an export of format {version}; this kvstore reads format {VERSION}")
    if length > _MAX_JSON_BYTES:
        raise Corruption("the header of this export is damaged")
    return int(length) + _DIGEST_BYTES


def read_header(whole: bytes) -> Header:
    """The header from all of its bytes. Raises Corruption."""
    content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(content) != digest:
        raise Corruption("the header of this export is damaged, or the file ends in it")
    try:
        told = json.loads(content[PREFIX_BYTES:])
        header = Header(
            parts={str(tag): bytes.fromhex(value) for tag, value in told["parts"].items()},
            key=bytes.fromhex(told["key"]),
            slot_bytes=int(told["slot_bytes"]),
            planned_blocks=int(told["planned_blocks"]),
            created_ms=int(told["created_ms"]),
        )
        namespace_digest(header.parts)
    except (
        AttributeError,
        InvalidArgument,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise Corruption(f"the header of this export makes no sense: {error}") from None
    if len(header.key) != KEY_BYTES or not _is_slot_size(header.slot_bytes) or header.planned_blocks < 0:
        raise Corruption("the header of this export makes no sense: key or sizes")
    return header


def _is_slot_size(nbytes: int) -> bool:
    return 0 < nbytes <= _MAX_SLOT_BYTES and nbytes % SLOT_ALIGN_BYTES == 0


def pack_head(head: BlockHead) -> bytes:
    """A record's head, HEAD_BYTES; its payload follows."""
    packed = _HEAD.pack(_BLOCK, head.depth, head.touch, head.hash, head.parent, head.checksum)
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def read_head(packed: bytes | memoryview) -> BlockHead | None:
    """The head in HEAD_BYTES; None where it is not whole."""
    magic, depth, touch, block, parent, checksum = _HEAD.unpack_from(packed)
    if magic != _BLOCK or not _checked(packed, _HEAD.size):
        return None
    return BlockHead(hash=block, parent=parent, depth=depth, touch=touch, checksum=checksum)


def pack_end(end: End) -> bytes:
    """The last END_BYTES of a complete file."""
    packed = _END.pack(_LAST, 0, end.blocks, end.digest)
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def read_end(packed: bytes | memoryview) -> End | None:
    """The end in END_BYTES; None where there is none, or not a whole one."""
    if len(packed) != END_BYTES:
        return None
    magic, _, blocks, digest = _END.unpack_from(packed)
    if magic != _LAST or not _checked(packed, _END.size):
        return None
    return End(blocks=blocks, digest=digest)


def _checked(packed: bytes | memoryview, size: int) -> bool:
    """Whether the first `size` bytes are followed by their checksum."""
    return bool(_CHECK.unpack_from(packed, size)[0] == xxhash.xxh3_64_intdigest(packed[:size]))
