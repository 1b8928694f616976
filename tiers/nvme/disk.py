"""The calls of the operating system that the files of a path are made with, so that another disk can stand below them.

`Disk` is what slabs, scans and the file of clears do to a directory; names and errors are those of `os`. `SYSTEM_DISK`
is the real one. The simulation (`tests/simulation`) puts one below the same code that loses and tears on purpose.
Safe for several threads as the calls themselves are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

__all__ = ["SYSTEM_DISK", "Disk", "SystemDisk"]


class Disk(Protocol):
    """Files of one machine. Every call raises OSError as the call of that name in `os` does."""

    def open(self, path: Path, flags: int, mode: int = 0o600, /) -> int:
        """A descriptor, the caller's."""
        ...

    def close(self, fd: int, /) -> None:
        """Gives a descriptor back."""
        ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Bytes read, which may be fewer than asked for."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Bytes written, which may be fewer than given."""
        ...

    def write(self, fd: int, data: bytes, /) -> int:
        """Bytes written where the descriptor stands."""
        ...

    def fsync(self, fd: int, /) -> None:
        """Returns when the file, or the names in the directory, is on the medium."""
        ...

    def fdatasync(self, fd: int, /) -> None:
        """Returns when the file's bytes are on the medium."""
        ...

    def posix_fallocate(self, fd: int, offset: int, nbytes: int, /) -> None:
        """Gives the range room on the medium; what was not written reads as zeros."""
        ...

    def posix_fadvise(self, fd: int, offset: int, nbytes: int, advice: int, /) -> None:
        """A hint to the page cache."""
        ...

    def size(self, fd: int, /) -> int:
        """Bytes of the file."""
        ...

    def links(self, fd: int, /) -> int:
        """Names that the file has; 0: it was deleted, and ends with whoever has it open."""
        ...

    def exists(self, path: Path, /) -> bool:
        """Whether there is such a name."""
        ...

    def files(self, directory: Path, /) -> list[tuple[str, int]]:
        """Name and bytes of each entry, in no order."""
        ...

    def read_file(self, path: Path, /) -> bytes:
        """All of a small file."""
        ...

    def rename(self, old: Path, new: Path, /) -> None:
        """Replaces what has the new name."""
        ...

    def unlink(self, path: Path, /) -> None:
        """Removes a name."""
        ...


class SystemDisk:
    """The real one."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)
    posix_fallocate = staticmethod(os.posix_fallocate)
    posix_fadvise = staticmethod(os.posix_fadvise)
    exists = staticmethod(Path.exists)
    read_file = staticmethod(Path.read_bytes)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)

    @staticmethod
    def size(fd: int) -> int:
        """See Disk."""
        return os.fstat(fd).st_size

    @staticmethod
    def links(fd: int) -> int:
        """See Disk."""
        return os.fstat(fd).st_nlink

    @staticmethod
    def files(directory: Path) -> list[tuple[str, int]]:
        """See Disk."""
        with os.scandir(directory) as entries:
            return [(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries]


SYSTEM_DISK: Final[Disk] = SystemDisk()
