"""How a disk is worked: by few threads that have several calls under way, or by many with one each.

Where the kernel takes calls into a queue and goes on (io_submit(2), on most file systems), two threads fill any disk:
each has 48 MiB under way, waits for several calls at once and computes checksums meanwhile.

Elsewhere a virtual disk is full with a few, a real NVMe only with eight or more. Twice as many as fill the disk: while
half of them wait for it, the others compute checksums. With as many as fill it, writes of 1.4 MiB blocks came to 0.7 of
a plain O_DIRECT loop, with twice as many to 1.0. Fewer than eight are never worth it: of a virtual disk on two busy
cores that reads of 1 MiB fill with two, movers with four came to 0.8 to 0.9 of what one with eight did with scattered
blocks of 256 KiB, and were its equal with 2 MiB; sixteen gained nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore.units import MIB
from tiers.nvme.carry import Carry, carry, carry_in_turn, is_queued
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.pieces import PIECE_BYTES, QUEUED_PIECE_BYTES

__all__ = ["DEFAULT_THREADS", "QUEUED_THREADS", "IoPlan", "plan_io", "probe_queue", "probe_threads"]

DEFAULT_THREADS = 4
QUEUED_THREADS = 3
_QUEUED_SHARES = 2
"""A piece costs 0.3 ms beside its bytes, in mover and daemon together: one that is not cut saves it."""
_QUEUE_BYTES = 4 * MIB
_QUEUE_TRIES = 3
_CHOICES = (4, 8)
_FILE_BYTES = 32 * MIB
_CALL_BYTES = MIB
_BUDGET_S = 1.0
_WORTH_IT = 0.9  # more threads are taken only where fewer give less than this part of the best rate
_RESULT = "threads"
_MOST_THREADS = 2 * _CHOICES[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class IoPlan:
    """How pieces are carried out, by how many threads, and how batches are cut into them (`tiers.nvme.pieces`)."""

    carry: Carry
    threads: int
    shares: int
    piece_bytes: int


def plan_io(directory: Path, threads: int = 0, disk: Disk = SYSTEM_DISK) -> IoPlan:
    """What suits the disk of a directory, found out by some MiB of calls; `threads` that are not 0 are the caller's.

    Only the system's own disk has queues.
    """
    if disk is SYSTEM_DISK and probe_queue(directory):
        return IoPlan(
            carry=carry,
            threads=threads or QUEUED_THREADS,
            shares=_QUEUED_SHARES,
            piece_bytes=QUEUED_PIECE_BYTES,
        )
    threads = threads or probe_threads(directory)
    return IoPlan(carry=carry_in_turn, threads=threads, shares=threads, piece_bytes=PIECE_BYTES)


def probe_queue(directory: Path) -> bool:
    """Whether calls to files of the directory are under way when the kernel has taken them."""
    try:
        with _scratch_file(directory) as fd, mmap.mmap(-1, _QUEUE_BYTES) as data:
            os.pwrite(fd, data, 0)
            with memoryview(data) as view:
                return any(is_queued(fd, view) for _ in range(_QUEUE_TRIES))
    except OSError:
        return False


def probe_threads(directory: Path) -> int:
    """Measured at the first call for a directory and remembered in it; 4 where it cannot be measured.

    Reads 32 MiB with 4 and with 8 threads; the file has no name and is gone afterwards. At most about a second.
    """
    result = directory / _RESULT
    with contextlib.suppress(OSError, ValueError):
        remembered = int(result.read_text(encoding="ascii"))
        if 1 <= remembered <= _MOST_THREADS:
            return remembered
    try:
        threads = _measure(directory)
        fd = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{threads}\n".encode("ascii"))
        finally:
            os.close(fd)
    except OSError:  # no O_TMPFILE or O_DIRECT here, no room: the default serves
        return DEFAULT_THREADS
    return threads


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    """An O_DIRECT file without a name."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _measure(directory: Path) -> int:
    with _scratch_file(directory) as fd:
        with mmap.mmap(-1, _CALL_BYTES) as page:
            page[:] = os.urandom(4096) * (_CALL_BYTES // 4096)
            for offset in range(0, _FILE_BYTES, _CALL_BYTES):
                os.pwrite(fd, page, offset)
        rates: dict[int, float] = {}
        begin = time.monotonic()
        for threads in _CHOICES:
            rates[threads] = _rate(fd, threads)
            if time.monotonic() - begin > _BUDGET_S:
                break
    best = max(rates.values())
    return 2 * next(threads for threads in _CHOICES if rates[threads] >= _WORTH_IT * best)


def _rate(fd: int, threads: int) -> float:
    """Bytes a second with `threads` threads."""

    def read(first: int) -> None:
        with mmap.mmap(-1, _CALL_BYTES) as page:
            for offset in range(first * _CALL_BYTES, _FILE_BYTES, threads * _CALL_BYTES):
                os.preadv(fd, [page], offset)

    with ThreadPoolExecutor(threads) as pool:
        begin = time.monotonic()
        list(pool.map(read, range(threads)))
        return _FILE_BYTES / max(time.monotonic() - begin, 1e-9)
