"""The 4 KiB behind each slot of a slab: what the block is, and a checksum that proves it is whole.

Written in one call with the payload and checked on every read, so a torn write, a flipped bit, a misplaced write and a
slot that was given to another block since are all seen. Enough is in it to rebuild the index without LMDB.
Numbers are little-endian; the rest of the page is zeros.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiers.base import PAGE_BYTES, Moves

__all__ = [
    "TRAILER",
    "TRAILER_BYTES",
    "checksum",
    "checksums_of",
    "fill_trailers",
    "matches",
    "page_bytes",
    "valid_trailers",
]

TRAILER_BYTES = PAGE_BYTES
_MAGIC = 0x3152544B5653564B  # "KVSVKTR1"
_VERSION = 1

_FIELDS: tuple[tuple[str, str | tuple[str, int]], ...] = (
    ("magic", "<u8"),
    ("version", "<u4"),
    ("generation", "<u4"),  # of the slot when it was written
    ("offset", "<u8"),  # of the slot in its slab
    ("length", "<u4"),  # payload bytes: the slot's size
    ("depth", "<u4"),  # blocks before it
    ("written_ms", "<u8"),  # wall clock, for the recency of a rebuilt index
    ("hash", ("<u8", 2)),
    ("parent", ("<u8", 2)),
    ("ns_digest", ("<u8", 2)),  # first half of the namespace's digest
    ("checksum", ("<u8", 2)),  # xxh3-128 of the payload
    ("self_checksum", "<u8"),  # xxh3-64 of all before it
)
_PACKED = np.dtype([(name, *((kind,) if isinstance(kind, str) else kind)) for name, kind in _FIELDS])
_COVERED = _PACKED.itemsize - 8

TRAILER = np.dtype(
    {
        "names": list(_PACKED.names or ()),
        "formats": [_PACKED[name] for name in _PACKED.names or ()],
        "offsets": [_PACKED.fields[name][1] for name in _PACKED.names or ()] if _PACKED.fields else [],
        "itemsize": TRAILER_BYTES,
    }
)
"""One page; 120 bytes of it are used."""


def checksum(payload: memoryview) -> bytes:
    """xxh3-128 of the payload, 16 bytes little-endian; without the GIL. 51 GB/s a core."""
    return xxhash.xxh3_128_intdigest(payload).to_bytes(16, "little")


def checksums_of(digests: list[bytes]) -> NDArray[np.uint64]:
    """[n, 2] from 16-byte digests."""
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def fill_trailers(pages: NDArray[np.void], moves: Moves, checksums: NDArray[np.uint64], now_ms: int) -> None:
    """Makes `pages` (TRAILER[n], zeros or older trailers) the trailers of `moves`, whose payloads have `checksums`."""
    pages["magic"] = _MAGIC
    pages["version"] = _VERSION
    pages["written_ms"] = now_ms
    pages["offset"] = moves["nvme_offset"]
    for name in ("generation", "length", "depth", "hash", "parent", "ns_digest"):
        pages[name] = moves[name]
    pages["checksum"] = checksums
    pages["self_checksum"] = _self_checksums(pages)


def matches(pages: NDArray[np.void], moves: Moves, checksums: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of `pages` are the trailers of exactly these blocks, whose payloads have `checksums`: [n]."""
    equal = valid_trailers(pages) & (pages["offset"] == moves["nvme_offset"])
    for name in ("generation", "length"):
        equal &= pages[name] == moves[name]
    for name in ("hash", "ns_digest"):
        equal &= (pages[name] == moves[name]).all(axis=1)
    result: NDArray[np.bool_] = equal & (pages["checksum"] == checksums).all(axis=1)
    return result


def valid_trailers(pages: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of `pages` are trailers of this version, whole by their own checksum: [n]. Says nothing of the payload."""
    plausible: NDArray[np.bool_] = (pages["magic"] == _MAGIC) & (pages["version"] == _VERSION)
    if plausible.any():  # a slab that was never written costs no hashing
        plausible &= pages["self_checksum"] == _self_checksums(pages)
    return plausible


def page_bytes(pages: NDArray[np.void]) -> memoryview:
    """The bytes of contiguous pages."""
    return pages.view(np.uint8).data


def _self_checksums(pages: NDArray[np.void]) -> NDArray[np.uint64]:
    raw = page_bytes(pages)
    return np.array(
        [xxhash.xxh3_64_intdigest(raw[at : at + _COVERED]) for at in range(0, len(raw), TRAILER_BYTES)],
        dtype=np.uint64,
    )
