"""Packed records that travel between processes: one fixed-size element a block, little-endian.

Owns the dtypes and the two-way conversion to `bytes` for gRPC fields. Parsing copies nothing; a length that is not a
whole number of elements is refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument

__all__ = [
    "COPY",
    "HASH_BYTES",
    "MOVE",
    "NVME_ENTRY",
    "REPLY",
    "SEAL",
    "hashes_of",
    "records_of",
    "u8_of",
    "u32_of",
    "u64_of",
]

HASH_BYTES = 16

SEAL = np.dtype(
    [
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("hash", "<u8", 2),
        ("parent", "<u8", 2),
    ]
)
"""48 bytes: an HBM slot whose block is complete (a DRAM slot where the session owns no HBM)."""

COPY = np.dtype(
    [("source", "<u4"), ("source_generation", "<u4"), ("target", "<u4"), ("target_generation", "<u4")]
)
"""16 bytes: a copy between tiers that has completed."""

MOVE = np.dtype(
    [
        ("id", "<u8"),
        ("kind", "u1"),
        ("unread", "u1"),
        ("dram_extent", "<u2"),
        ("dram_slot", "<u4"),
        ("dram_offset", "<u8"),
        ("nvme_offset", "<u8"),
        ("nvme_slot", "<u4"),
        ("nvme_extent", "<u2"),
        ("pad2", "<u2"),
        ("length", "<u4"),
        ("generation", "<u4"),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("hash", "<u8", 2),
        ("parent", "<u8", 2),
        ("ns_digest", "<u8", 2),
        ("checksum", "<u8", 2),
    ]
)
"""120 bytes: one block between a DRAM slot and a slot of storage. Offsets are bytes within their extent; `length` is
the slot's size in DRAM; `generation` that of the NVMe slot. `unread` 1: whoever moves it does not look at its bytes. A
write then puts `checksum` into the trailer, which is that of the payload by the word of who stored it; a read believes
the trailer's, and whoever loads the block compares. Else `checksum` means nothing."""

NVME_ENTRY = np.dtype(
    [
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("touch", "<u8"),
        ("hash", "<u8", 2),
        ("parent", "<u8", 2),
        ("ns_digest", "<u8", 2),
    ]
)
"""72 bytes: a block that storage holds, as the durable index keeps it. `slot` counts over the tier."""

REPLY = np.dtype([("id", "<u8"), ("status", "<u4"), ("pad", "<u4"), ("checksum", "<u8", 2)])
"""32 bytes: what became of a MOVE (`MoveStatus`) and the xxh3-128 of its payload: what it is, or, of an unread one,
what it should be."""


def hashes_of(packed: bytes) -> NDArray[np.uint64]:
    """[n, 2] from hash[].

    Raises: InvalidArgument when the length is not a multiple of 16.
    """
    if len(packed) % HASH_BYTES:
        raise InvalidArgument(f"hashes are {HASH_BYTES} bytes each; got {len(packed)} bytes")
    return np.frombuffer(packed, dtype="<u8").reshape(-1, 2)


def records_of(packed: bytes, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """[n] records of `dtype`.

    Raises: InvalidArgument when the length is not a multiple of the record's size.
    """
    if len(packed) % dtype.itemsize:
        raise InvalidArgument(f"records are {dtype.itemsize} bytes each; got {len(packed)} bytes")
    return np.frombuffer(packed, dtype=dtype)


def u8_of(packed: bytes) -> NDArray[np.uint8]:
    """[n] from u8[]."""
    return np.frombuffer(packed, dtype=np.uint8)


def u32_of(packed: bytes) -> NDArray[np.uint32]:
    """[n] from u32[].

    Raises: InvalidArgument when the length is not a multiple of 4.
    """
    if len(packed) % 4:
        raise InvalidArgument(f"slot arrays are 4 bytes an element; got {len(packed)} bytes")
    return np.frombuffer(packed, dtype="<u4")


def u64_of(packed: bytes) -> NDArray[np.uint64]:
    """[n] from u64[].

    Raises: InvalidArgument when the length is not a multiple of 8.
    """
    if len(packed) % 8:
        raise InvalidArgument(f"id arrays are 8 bytes an element; got {len(packed)} bytes")
    return np.frombuffer(packed, dtype="<u8")
