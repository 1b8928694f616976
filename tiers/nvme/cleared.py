"""What administrators have cleared, and when: so that neither a rebuilt index nor an old one brings it back.

A clear takes blocks out of the index one by one, but leaves their trailers in the slabs, and the index itself is
written a moment later. The file `cleared` beside it says since when a namespace is cleared; at a start every block of
it that is no younger is passed over, wherever it was found. One line a namespace, written anew under another name
and renamed: `<32 hex digits, or *> <ms>`. Single blocks that were taken back because they were wrong stand in it
likewise, `b<32 hex digits of the hash> <ms>`: what they hold has a checksum that is right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Corruption
from kvstore.moves import U64
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.slab import sync_directory

__all__ = [
    "EVERY_NAMESPACE",
    "MAX_CLEARED",
    "block_key",
    "hash_of",
    "is_cleared",
    "note_cleared",
    "read_cleared",
    "without_cleared",
]

EVERY_NAMESPACE = b""
MAX_CLEARED = 16_384
"""Lines of the file, of at most 49 bytes."""
_FILE = "cleared"
_EVERY = "*"
_BLOCK = b"b"
_LINE = re.compile(r"(\*|b?[0-9a-f]{32}) ([0-9]{1,15})")
_TOUCH_SHIFT = np.uint64(20)  # below it a touch key has the depth: kvstore.layout.touch_key


def block_key(block: bytes) -> bytes:
    """How a single block stands among namespaces. `block`: its hash, 16 bytes."""
    return _BLOCK + block


def hash_of(key: bytes) -> bytes | None:
    """The hash, where a key is a block's."""
    return key[1:] if len(key) == 17 else None


def read_cleared(directory: Path, disk: Disk = SYSTEM_DISK) -> dict[bytes, int]:
    """Wall clock of the last clear in ms, by first half of the namespace's digest, EVERY_NAMESPACE or `block_key`.

    Raises Corruption where the file is damaged.
    """
    file = directory / _FILE
    try:
        text = disk.read_file(file).decode("ascii")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise Corruption(f"{file} cannot be read: {error}") from error
    found: dict[bytes, int] = {}
    for line in text.splitlines():
        whole = _LINE.fullmatch(line)
        if whole is None:
            raise Corruption(f"{file} is damaged: delete it, and blocks that were cleared may come back")
        found[_key(whole[1])] = int(whole[2])
    return found


def _key(text: str) -> bytes:
    if text == _EVERY:
        return EVERY_NAMESPACE
    return block_key(bytes.fromhex(text[1:])) if len(text) == 33 else bytes.fromhex(text)


def _text(key: bytes) -> str:
    block = hash_of(key)
    return f"b{block.hex()}" if block is not None else key.hex() or _EVERY


def note_cleared(directory: Path, news: Mapping[bytes, int], disk: Disk = SYSTEM_DISK) -> None:
    """Adds to what `read_cleared` gives; durable when it returns. Raises OSError, Corruption. One caller at a time.

    Beyond a bound the oldest clears become one of everything that old: the file counts against the path's size.
    """
    entries = read_cleared(directory, disk)
    for digest, now_ms in news.items():
        entries[digest] = max(now_ms, entries.get(digest, 0))
    if len(entries) > MAX_CLEARED:
        oldest_ms = sorted(entries.values())[len(entries) // 2]
        entries[EVERY_NAMESPACE] = max(entries.get(EVERY_NAMESPACE, 0), oldest_ms)
    every_ms = entries.get(EVERY_NAMESPACE, 0)
    lines = [
        f"{_text(digest)} {ms}\n"
        for digest, ms in entries.items()
        if digest == EVERY_NAMESPACE or ms > every_ms
    ]
    unfinished = directory / f"{_FILE}.new"
    fd = disk.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        disk.write(fd, "".join(lines).encode("ascii"))
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(unfinished, directory / _FILE)
    sync_directory(directory, disk)


def is_cleared(digests: U64, hashes: U64, touches: U64, cleared: Mapping[bytes, int]) -> NDArray[np.bool_]:
    """[n] which blocks were last touched, or as a scan found them written, before they or their namespace were cleared.

    `digests`, `hashes` [n, 2]. A block that somebody held through a clear goes too, unless it was written down since.
    O(n × namespaces).
    """
    gone = np.zeros(len(touches), dtype=np.bool_)
    written_ms = touches >> _TOUCH_SHIFT
    blocks = {block: ms for key, ms in cleared.items() if (block := hash_of(key)) is not None}
    if blocks:
        firsts = np.frombuffer(b"".join(blocks), dtype="<u8")[::2]
        for at in np.flatnonzero(np.isin(hashes[:, 0], firsts)).tolist():
            gone[at] = int(written_ms[at]) <= blocks.get(hashes[at].tobytes(), -1)
    for digest, ms in cleared.items():
        if hash_of(digest) is not None:
            continue
        before = written_ms <= np.uint64(ms)
        if digest != EVERY_NAMESPACE:
            before &= (digests == np.frombuffer(digest, dtype="<u8")).all(axis=1)
        gone |= before
    return gone


def without_cleared(records: NDArray[np.void], cleared: Mapping[bytes, int]) -> NDArray[np.void]:
    """Those of RECORD[] that `is_cleared` does not name."""
    return records[~is_cleared(records["ns_digest"], records["hash"], records["touch"], cleared)]
