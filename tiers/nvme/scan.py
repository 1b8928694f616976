"""Rebuilds the index from the trailers of the slabs: for when LMDB is missing, damaged or of another version.

Reads 4 KiB a slot and no payload; whether the payload is whole is found when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import touch_key
from tiers.nvme.index import RECORD
from tiers.nvme.slab import SlabFile, stride_bytes
from tiers.nvme.trailer import TRAILER, TRAILER_BYTES, page_bytes, valid_trailers

__all__ = ["keep_known", "scan_slabs"]

_BATCH_SLOTS = 512
_THREADS = 8  # single pages from all over the disk: its latency is what costs


def scan_slabs(directory: Path, slabs: Sequence[SlabFile]) -> NDArray[np.void]:
    """RECORD[] of every slot with a whole trailer, by slab and slot. Of blocks found twice the newest is kept.

    A slab that cannot be read counts as empty. O(slots).
    """
    jobs = [(file, first) for file in slabs for first in range(0, file.slots, _BATCH_SLOTS)]
    if not jobs:
        return np.empty(0, dtype=RECORD)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda job: _scan_batch(directory, *job), jobs))
    return _newest(np.concatenate([records for records, _ in found]), np.concatenate([at for _, at in found]))


def keep_known(records: NDArray[np.void], slabs: Sequence[SlabFile]) -> NDArray[np.void]:
    """Those of RECORD[] whose slot exists, with the length its slab has. O(records × slabs)."""
    known = np.zeros(len(records), dtype=np.bool_)
    for file in slabs:
        known |= (
            (records["slab"] == file.number)
            & (records["slot"] < file.slots)
            & (records["length"] == file.slot_bytes)
        )
    return records[known]


def _scan_batch(directory: Path, file: SlabFile, first: int) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
    """RECORD[n] and the time each was written, of up to 512 slots from `first`."""
    count = min(_BATCH_SLOTS, file.slots - first)
    stride = stride_bytes(file.slot_bytes)
    pages = np.zeros(count, dtype=TRAILER)
    raw = page_bytes(pages)
    try:
        fd = os.open(directory / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return np.empty(0, dtype=RECORD), np.empty(0, dtype=np.uint64)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for i in range(count):
            page = raw[i * TRAILER_BYTES : (i + 1) * TRAILER_BYTES]
            _read_page(fd, page, (first + i) * stride + file.slot_bytes)
    finally:
        os.close(fd)
    offsets = (np.arange(first, first + count, dtype=np.uint64)) * np.uint64(stride)
    good = valid_trailers(pages) & (pages["offset"] == offsets) & (pages["length"] == file.slot_bytes)
    slots = np.flatnonzero(good)
    records = np.zeros(len(slots), dtype=RECORD)
    for name in ("generation", "length", "depth", "hash", "parent", "ns_digest"):
        records[name] = pages[name][slots]
    records["slab"] = file.number
    records["slot"] = first + slots
    written = pages["written_ms"][slots].astype(np.uint64)
    keys = touch_key(0, records["depth"])
    records["touch"] = keys | written << np.uint64(20)
    return records, written


def _read_page(fd: int, page: memoryview, offset: int) -> None:
    """Reads one trailer; one that cannot be read is left zero, which is no trailer."""
    try:
        os.preadv(fd, [page], offset)
    except OSError:
        page[:] = bytes(len(page))


def _newest(records: NDArray[np.void], written_ms: NDArray[np.uint64]) -> NDArray[np.void]:
    """One record a block, by slab and slot: the same block may lie in a slot that was freed and in its next one."""
    newest_first = np.lexsort((records["slot"], records["slab"], np.iinfo(np.uint64).max - written_ms))
    keys = records["hash"][newest_first]
    _, first = np.unique(keys, axis=0, return_index=True)
    kept = records[newest_first[first]]
    return kept[np.lexsort((kept["slot"], kept["slab"]))]
