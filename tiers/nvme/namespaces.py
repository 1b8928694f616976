"""The namespaces that a path has blocks of: an append-only file of digests with their parts.

Apart from the index on purpose: a trailer carries half a digest, and an index rebuilt from trailers needs the rest.
A record is length u32, xxh3-64 u64, then the digest (32) and for each part two lengths u32, tag and value.
What follows the first damaged record is dropped.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import xxhash

from kvstore.errors import InvalidArgument
from tiers.nvme.slab import sync_directory

__all__ = ["NamespaceFile"]

_HEAD = struct.Struct("<IQ")
_PART = struct.Struct("<II")
_DIGEST_BYTES = 32
_MAX_RECORD_BYTES = 1 << 20


class NamespaceFile:
    """The file, read at opening and then only appended to. One owner thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "namespaces"
        new = not self._path.exists()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if new:
            sync_directory(directory)
        self._parts: dict[bytes, dict[str, bytes]] = {}
        self._end = self._read()
        os.ftruncate(self._fd, self._end)

    def load(self) -> dict[bytes, dict[str, bytes]]:
        """Parts of each namespace by its digest of 32 bytes, in the order in which they came."""
        return dict(self._parts)

    def add(self, digest: bytes, parts: Mapping[str, bytes]) -> None:
        """Remembers a namespace, durably; a known one is no work. Raises OSError, InvalidArgument."""
        if digest in self._parts:
            return
        body = _pack(digest, parts)
        record = _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body
        if os.pwrite(self._fd, record, self._end) != len(record):
            raise OSError(f"{self._path}: the record came short")
        os.fdatasync(self._fd)
        self._end += len(record)
        self._parts[digest] = dict(parts)

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> int:
        """Reads all whole records; where they end."""
        data = self._path.read_bytes()
        at = 0
        while at + _HEAD.size <= len(data):
            length, expected = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) != length or xxhash.xxh3_64_intdigest(body) != expected:
                break
            digest, parts = _unpack(body)
            self._parts[digest] = parts
            at += _HEAD.size + length
        return at


def _pack(digest: bytes, parts: Mapping[str, bytes]) -> bytes:
    if len(digest) != _DIGEST_BYTES:
        raise InvalidArgument(f"a namespace digest has {_DIGEST_BYTES} bytes, not {len(digest)}")
    body = bytearray(digest)
    for tag in sorted(parts):
        name = tag.encode()
        body += _PART.pack(len(name), len(parts[tag])) + name + parts[tag]
    if len(body) > _MAX_RECORD_BYTES:
        raise InvalidArgument(f"the parts of a namespace take {len(body)} bytes: at most {_MAX_RECORD_BYTES}")
    return bytes(body)


def _unpack(body: bytes) -> tuple[bytes, dict[str, bytes]]:
    parts = {}
    at = _DIGEST_BYTES
    while at < len(body):
        name_bytes, value_bytes = _PART.unpack_from(body, at)
        at += _PART.size
        parts[body[at : at + name_bytes].decode()] = body[at + name_bytes : at + name_bytes + value_bytes]
        at += name_bytes + value_bytes
    return body[:_DIGEST_BYTES], parts
