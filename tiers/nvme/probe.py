"""How many I/O threads a disk wants: a virtual disk is full with a few, a real NVMe only with eight or more.

Twice as many as fill the disk: while half of them wait for it, the others compute checksums. With as many as fill it,
writes of 1.4 MiB blocks came to 0.7 of a plain O_DIRECT loop, with twice as many to 1.0. Fewer than eight are never
worth it: of a virtual disk on two busy cores that reads of 1 MiB fill with two, movers with four came to 0.8 to 0.9 of
what one with eight did with scattered blocks of 256 KiB, and were its equal with 2 MiB; sixteen gained nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.units import MIB

__all__ = ["DEFAULT_THREADS", "probe_threads"]

DEFAULT_THREADS = 4
_CHOICES = (4, 8)
_FILE_BYTES = 32 * MIB
_CALL_BYTES = MIB
_BUDGET_S = 1.0
_WORTH_IT = 0.9  # more threads are taken only where fewer give less than this part of the best rate
_RESULT = "threads"
_MOST_THREADS = 2 * _CHOICES[-1]


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


def _measure(directory: Path) -> int:
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
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
    finally:
        os.close(fd)
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
