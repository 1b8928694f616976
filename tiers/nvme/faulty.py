"""A disk that fails on purpose, below the tier's own code: what tests put in the place of the system's.

Faults stand in a file that may change at any time, one a line: `FOLDER OPERATION FAULT`. FOLDER is the name of a path's
folder, or `*`. OPERATION is `read`, `write`, `sync` or `make` (of a slab). FAULT is the name of an errno (`EIO`,
`ENOSPC`, `EROFS`, …), `hang` until the line is gone, `slow=SECONDS`, `short` (half of it, said so), and for what the
disk does not say: `torn` (half of a write), `flip` (one bit of a read). Reads and writes of every thread are struck.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from tiers.nvme.disk import SystemDisk

__all__ = ["DiskFault", "FaultyDisk", "parse_disk_faults"]

_OPERATIONS = ("read", "write", "sync", "make")
_KINDS = ("hang", "slow", "short", "torn", "flip")
_HANG_POLL_S = 0.01
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFault:
    """One line of the file."""

    folder: str
    operation: str
    kind: str
    """One of the words above, or the name of an errno."""
    seconds: float = 0.0


def parse_disk_faults(text: str) -> tuple[DiskFault, ...]:
    """Raises ConfigError for a line that is none."""
    found = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        folder, operation, fault = (*line.split(), "", "")[:3]
        kind, _, seconds = fault.partition("=")
        known = kind in _KINDS or isinstance(getattr(errno, kind, None), int)
        if operation not in _OPERATIONS or not known or (kind == "slow") != bool(seconds):
            raise ConfigError(f"disk faults: {line!r} is not FOLDER OPERATION FAULT")
        found.append(DiskFault(folder=folder, operation=operation, kind=kind, seconds=float(seconds or 0)))
    return tuple(found)


class FaultyDisk(SystemDisk):
    """The disk of one path, named by its folder, with the faults that `file` asks for now."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder.name
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._faults: tuple[DiskFault, ...] = ()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:  # type: ignore[override]
        """See Disk."""
        kind = self._strike("read")
        if kind == "short":
            buffers = _half(buffers)
        count = os.preadv(fd, buffers, offset)
        if kind == "flip" and count:
            buffers[0][0] ^= 0x10
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:  # type: ignore[override]
        """See Disk."""
        kind = self._strike("write")
        if kind == "torn":
            os.pwritev(fd, _half(buffers), offset)
            return sum(len(buffer) for buffer in buffers)
        return os.pwritev(fd, _half(buffers) if kind == "short" else buffers, offset)

    def fdatasync(self, fd: int, /) -> None:  # type: ignore[override]
        """See Disk."""
        self._strike("sync")
        os.fdatasync(fd)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int, /) -> None:
        """See Disk."""
        self._strike("make")
        os.posix_fallocate(fd, offset, nbytes)

    def _strike(self, operation: str) -> str:
        """Raises, sleeps or hangs as a fault says; the kind of one that the caller has to carry out."""
        for fault in self._now(operation):
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            elif fault.kind == "hang":
                while fault in self._now(operation):
                    time.sleep(_HANG_POLL_S)
            elif fault.kind in _KINDS:
                return fault.kind
            else:
                number: int = getattr(errno, fault.kind)
                raise OSError(number, os.strerror(number))
        return ""

    def _now(self, operation: str) -> list[DiskFault]:
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._faults = parse_disk_faults(self._file.read_text(encoding="utf-8"))
                self._stamp = stamp
        except FileNotFoundError:
            self._faults, self._stamp = (), None
        return [
            fault
            for fault in self._faults
            if fault.operation == operation and fault.folder in ("*", self._folder)
        ]


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The first half of the first buffer, in whole pages."""
    return [buffers[0][: max(1, len(buffers[0]) // _PAGE // 2) * _PAGE]]
