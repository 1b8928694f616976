"""What the namespaces are that the tables know by digests alone: their parts, and keys that came from other machines.

The parts are remembered when an engine opens a namespace, so that `kvstore namespaces` can say whose blocks there are
and an export can say what it holds. A key that an import brought stands in the place of the one that the tenant's
secret gives. Kept in a memfd that the keeper holds, and in the file `namespaces` beside the slabs (0600, as the secret
is): losing both costs imported blocks, which are then found no more, and names. Owner loop only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstore.daemon.log import Log
from kvstore.errors import KvstoreError, ResourceExhausted
from kvstore.identity import KEY_BYTES, namespace_digest, namespace_key
from tiers.memfd import create_memfd

__all__ = [
    "NAMESPACES",
    "KnownNamespace",
    "Namespaces",
    "known_namespaces",
    "read_beside_slabs",
    "write_beside_slabs",
]

NAMESPACES = "namespaces"
"""What the keeper calls its descriptor, and the name of the file."""
_MAX_BYTES = 1 << 20
_FRAME = struct.Struct("<8sIQ")  # magic, length, xxh3-64
_MAGIC = b"KVNAMES1"
_ROW = b"kvstore.row"
_OURS = "secret"  # beside the slabs of every path that has been claimed
_LOG = Log("namespaces")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNamespace:
    """One namespace whose parts are known."""

    parts: Mapping[str, bytes]
    key: bytes
    """Of its hash chain."""
    adopted: bool
    """Whether the key is another machine's."""

    @property
    def row_digest(self) -> bytes:
        """What the tables call it: two tenants that state equal parts never share a namespace."""
        return namespace_key(self.key, _ROW)


class Namespaces:
    """By the digest of their parts."""

    def __init__(self, secret: bytes, inherited: Mapping[str, int], on_disk: bytes | None) -> None:
        """`on_disk`: as `read_beside_slabs` gives it."""
        self._secret = secret
        self._known: dict[bytes, KnownNamespace] = {}
        self.fd = (
            inherited[NAMESPACES]
            if NAMESPACES in inherited
            else create_memfd("kvstore-namespaces", _MAX_BYTES)
        )
        self._memory = mmap.mmap(self.fd, _MAX_BYTES)
        for text in (on_disk, _unframed(bytes(self._memory))):  # memory is never older
            if text is not None:
                self._known |= known_namespaces(text, secret)
        self.unsaved = False
        """Whether the files beside the slabs lack something."""
        self._put(self._pack())

    def opened(self, parts: Mapping[str, bytes]) -> KnownNamespace:
        """The namespace of these parts, which is remembered. Raises InvalidArgument."""
        digest = namespace_digest(parts)
        found = self._known.get(digest)
        if found is None:
            found = KnownNamespace(parts=dict(parts), key=namespace_key(digest, self._secret), adopted=False)
            self._keep(digest, found)
        return found

    def adopt(self, parts: Mapping[str, bytes], key: bytes) -> KnownNamespace:
        """From now on the namespace goes by this key. Raises ResourceExhausted where no more can be remembered."""
        digest = namespace_digest(parts)
        own = namespace_key(digest, self._secret)
        new = KnownNamespace(parts=dict(parts), key=key, adopted=key != own)
        if not self._keep(digest, new):
            raise ResourceExhausted("too many namespaces are remembered: their parts take more than 1 MiB")
        return new

    def by_row_digest(self) -> dict[bytes, KnownNamespace]:
        """All that are known, by what the tables call them."""
        return {known.row_digest: known for known in self._known.values()}

    def _keep(self, digest: bytes, known: KnownNamespace) -> bool:
        """Remembers it where there is room; adopted ones are never dropped for others."""
        before = self._known.get(digest)
        self._known[digest] = known
        text = self._pack()
        if len(text) + _FRAME.size > _MAX_BYTES:
            del self._known[digest]
            if before is not None:
                self._known[digest] = before
            return False
        self._put(text)
        self.unsaved = True
        return True

    def _put(self, text: bytes) -> None:
        frame = _FRAME.pack(_MAGIC, len(text), xxhash.xxh3_64_intdigest(text)) + text
        self._memory[: len(frame)] = frame

    def _pack(self) -> bytes:
        return json.dumps(
            [
                {
                    "parts": {tag: value.hex() for tag, value in sorted(known.parts.items())},
                    **({"key": known.key.hex()} if known.adopted else {}),
                }
                for known in self._known.values()
            ]
        ).encode()

    def take_unsaved(self) -> bytes:
        """The text for the files, which counts as saved from now on."""
        self.unsaved = False
        return self._pack()


def known_namespaces(text: bytes, secret: bytes) -> dict[bytes, KnownNamespace]:
    """What a text says, by the digest of the parts; a damaged text is passed over from there on, with a line."""
    known: dict[bytes, KnownNamespace] = {}
    try:
        for told in json.loads(text):
            parts = {str(tag): bytes.fromhex(value) for tag, value in told["parts"].items()}
            digest = namespace_digest(parts)
            key = bytes.fromhex(told["key"]) if "key" in told else namespace_key(digest, secret)
            if len(key) == KEY_BYTES:
                known[digest] = KnownNamespace(parts=parts, key=key, adopted="key" in told)
    except (AttributeError, KeyError, KvstoreError, RecursionError, TypeError, ValueError) as error:
        _LOG.warning("names of namespaces not read", error=error)
    return known


def write_beside_slabs(folders: Sequence[str], text: bytes) -> None:
    """Writes the file of every path that is ours. Blocks: call it in a thread. Raises OSError."""
    for folder in map(Path, folders):
        if (folder / _OURS).exists():
            _write(folder / NAMESPACES, text)


def read_beside_slabs(folders: Sequence[str]) -> bytes | None:
    """The file of the first path that has one. Blocks. Unreadable ones are passed over."""
    for folder in folders:
        with contextlib.suppress(OSError):
            text = (Path(folder) / NAMESPACES).read_bytes()
            return text[:_MAX_BYTES]
    return None


def _unframed(memory: bytes) -> bytes | None:
    """The text in the memory; None where it is new, or a writer died in the middle."""
    magic, length, check = _FRAME.unpack_from(memory)
    text = memory[_FRAME.size : _FRAME.size + length]
    if magic != _MAGIC or len(text) != length or xxhash.xxh3_64_intdigest(text) != check:
        return None
    return text


def _write(file: Path, text: bytes) -> None:
    unfinished = file.with_name(f"{file.name}.new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, text)
        os.fsync(fd)
    finally:
        os.close(fd)
    unfinished.rename(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
