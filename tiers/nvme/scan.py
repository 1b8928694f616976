"""Rebuilds the index from the trailers of the slabs: for when LMDB is missing, damaged or of another version.

Reads 4 KiB a slot and no payload; whether the payload is whole is found when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import touch_key
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.index import RECORD
from tiers.nvme.slab import SlabFile, stride_bytes
from tiers.nvme.trailer import TRAILER_BYTES, Trailer, read_trailer

__all__ = ["differing", "keep_known", "scan_slabs", "unopenable"]

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_BATCH_SLOTS = 512
_THREADS = 8  # single pages from all over the disk: its latency is what costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    records: NDArray[np.void]  # RECORD[n]
    written_ms: NDArray[np.uint64]  # [n]


def scan_slabs(directory: Path, slabs: Sequence[SlabFile], disk: Disk = SYSTEM_DISK) -> NDArray[np.void]:
    """RECORD[] of every slot with a whole trailer, by slab and slot. Of blocks found twice the newest is kept.

    A slab that cannot be read counts as empty. O(slots).
    """
    jobs = [(file, first) for file in slabs for first in range(0, file.slots, _BATCH_SLOTS)]
    if not jobs:
        return np.empty(0, dtype=RECORD)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda job: _scan_batch(disk, directory, *job), jobs))
    records = np.concatenate([part.records for part in found])
    return _newest(records, np.concatenate([part.written_ms for part in found]))


def unopenable(directory: Path, slabs: Sequence[SlabFile], disk: Disk = SYSTEM_DISK) -> list[str]:
    """Of slabs that a scan counts as empty because they cannot be opened: which, and why."""
    found = []
    for file in slabs:
        try:
            disk.close(disk.open(directory / file.name, _FLAGS))
        except OSError as error:
            found.append(f"{directory / file.name}: {error.strerror}")
    return found


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


def differing(directory: Path, slabs: Sequence[SlabFile], records: NDArray[np.void]) -> NDArray[np.bool_]:
    """[n] which RECORD[] are of another block, or of an older one, than the trailer of their slot. O(n) reads."""
    files = {file.number: file for file in slabs}
    jobs = [
        (files[number], np.flatnonzero(records["slab"] == number))
        for number in np.unique(records["slab"]).tolist()
    ]
    wrong = np.zeros(len(records), dtype=np.bool_)
    with ThreadPoolExecutor(_THREADS) as pool:
        for at, found in pool.map(lambda job: (job[1], _differ(directory, job[0], records[job[1]])), jobs):
            wrong[at] = found
    return wrong


def _differ(directory: Path, file: SlabFile, records: NDArray[np.void]) -> list[bool]:
    try:
        fd = os.open(directory / file.name, _FLAGS)
    except OSError:
        return [True] * len(records)
    stride = stride_bytes(file.slot_bytes)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        found = []
        for record in records:
            trailer = _read(SYSTEM_DISK, fd, int(record["slot"]) * stride + file.slot_bytes)
            same = trailer is not None and trailer.hash == record["hash"].tobytes()
            found.append(not (same and trailer is not None and trailer.generation == record["generation"]))
        return found
    finally:
        os.close(fd)


def _scan_batch(disk: Disk, directory: Path, file: SlabFile, first: int) -> _Found:
    """The blocks of up to 512 slots from `first`."""
    slots: list[int] = []
    trailers: list[Trailer] = []
    try:
        fd = disk.open(directory / file.name, _FLAGS)
    except OSError:
        return _found(file, slots, trailers)
    stride = stride_bytes(file.slot_bytes)
    try:
        disk.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for slot in range(first, min(first + _BATCH_SLOTS, file.slots)):
            trailer = _read(disk, fd, slot * stride + file.slot_bytes)
            if trailer is not None and trailer.offset == slot * stride and trailer.length == file.slot_bytes:
                slots.append(slot)
                trailers.append(trailer)
    finally:
        disk.close(fd)
    return _found(file, slots, trailers)


def _read(disk: Disk, fd: int, offset: int) -> Trailer | None:
    """The trailer at `offset`; one that cannot be read is none."""
    page = memoryview(bytearray(TRAILER_BYTES))
    try:
        count = disk.preadv(fd, [page], offset)
    except OSError:
        return None
    return read_trailer(page) if count == TRAILER_BYTES else None


def _found(file: SlabFile, slots: list[int], trailers: list[Trailer]) -> _Found:
    records = np.zeros(len(slots), dtype=RECORD)
    records["slab"], records["slot"], records["length"] = file.number, slots, file.slot_bytes
    records["generation"] = [trailer.generation for trailer in trailers]
    records["depth"] = [trailer.depth for trailer in trailers]
    for name in ("hash", "parent", "ns_digest"):
        packed = b"".join(getattr(trailer, name) for trailer in trailers)
        records[name] = np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    written_ms = np.array([trailer.written_ms for trailer in trailers], dtype=np.uint64)
    records["touch"] = touch_key(0, records["depth"]) | written_ms << np.uint64(20)
    return _Found(records=records, written_ms=written_ms)


def _newest(records: NDArray[np.void], written_ms: NDArray[np.uint64]) -> NDArray[np.void]:
    """One record a block, by slab and slot: the same block may lie in a slot that was freed and in its next one."""
    newest_first = np.lexsort((records["slot"], records["slab"], np.iinfo(np.uint64).max - written_ms))
    keys = records["hash"][newest_first]
    _, first = np.unique(keys, axis=0, return_index=True)
    kept = records[newest_first[first]]
    return kept[np.lexsort((kept["slot"], kept["slab"]))]
