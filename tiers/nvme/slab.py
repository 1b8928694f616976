"""One slab: a preallocated file of equal slots, a slot being its payload and one trailer page.

The file's name carries its number and its slot size, so that the slots can be found without any index. O_DIRECT where
the file system allows; elsewhere buffered, with what was read dropped from the page cache. A new slab is made under
another name and renamed when it is allocated in full, so a crash leaves no half of one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InvalidArgument, KvstoreError, ResourceExhausted
from kvstore.units import format_size
from tiers.base import PAGE_BYTES
from tiers.nvme.trailer import TRAILER_BYTES

__all__ = [
    "Slab",
    "SlabFile",
    "list_slabs",
    "open_slab",
    "remove_slab",
    "slots_in",
    "stride_bytes",
    "sync_directory",
]

_NAME = re.compile(r"slab-(\d{1,10})-(\d{1,10})\.kv")
_UNFINISHED = ".new"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabFile:
    """A slab as it lies in its directory."""

    number: int
    slot_bytes: int
    nbytes: int

    @property
    def name(self) -> str:
        """Its file name."""
        return f"slab-{self.number}-{self.slot_bytes}.kv"

    @property
    def slots(self) -> int:
        """Slots that fit."""
        return slots_in(self.nbytes, self.slot_bytes)


def stride_bytes(slot_bytes: int) -> int:
    """From one slot of a slab to the next."""
    return slot_bytes + TRAILER_BYTES


def slots_in(nbytes: int, slot_bytes: int) -> int:
    """Slots of a slab of `nbytes`."""
    return nbytes // stride_bytes(slot_bytes)


class Slab:
    """An open slab. Reads and writes are safe from several threads; `close` is not."""

    __slots__ = ("_fd", "direct", "dirty", "file")

    def __init__(self, fd: int, file: SlabFile, *, direct: bool) -> None:
        self._fd = fd
        self.file = file
        self.direct = direct
        self.dirty = False
        """Written since the last `sync`."""

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv: bytes read, which may be fewer than asked for. Raises OSError."""
        count = os.preadv(self._fd, buffers, offset)
        if not self.direct:
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        """pwritev: bytes written, which may be fewer than asked for. Raises OSError."""
        count = os.pwritev(self._fd, buffers, offset)
        self.dirty = True  # after it: a sync between would take the mark away and not have the bytes
        return count

    def sync(self) -> None:
        """fdatasync, where anything was written since the last. Raises OSError."""
        if not self.dirty:
            return
        self.dirty = False
        try:
            os.fdatasync(self._fd)
        except OSError:
            self.dirty = True
            raise
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_slab(directory: Path, number: int, nbytes: int, slot_bytes: int, *, direct: bool = True) -> Slab:
    """Opens the slab, creating it where it does not exist. `direct` is a wish: see `Slab.direct`.

    Raises InvalidArgument for a size no slab can have, ResourceExhausted where the disk has no room, KvstoreError.
    """
    file = SlabFile(number=number, slot_bytes=slot_bytes, nbytes=nbytes)
    if slot_bytes <= 0 or slot_bytes % PAGE_BYTES or nbytes % PAGE_BYTES or file.slots < 1:
        raise InvalidArgument(f"a slab of {nbytes} bytes cannot have slots of {slot_bytes} bytes")
    path = directory / file.name
    try:
        if not path.exists():
            _create(path, nbytes)
        fd, is_direct = _open(path, direct=direct)
        try:
            if os.fstat(fd).st_size < nbytes:  # cut short by somebody: what is missing reads as no trailer
                os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ResourceExhausted(
                f"no space for a slab of {format_size(nbytes)} in {directory}: {error.strerror}"
            ) from error
        raise KvstoreError(f"cannot open {path}: {error.strerror}") from error
    return Slab(fd, file, direct=is_direct)


def list_slabs(directory: Path) -> list[SlabFile]:
    """The slabs of a directory by number; removes what a crash left unfinished."""
    files = []
    for entry in os.scandir(directory):
        found = _NAME.fullmatch(entry.name)
        if found:
            files.append(
                SlabFile(number=int(found[1]), slot_bytes=int(found[2]), nbytes=entry.stat().st_size)
            )
        elif entry.name.endswith(_UNFINISHED) and _NAME.fullmatch(entry.name.removesuffix(_UNFINISHED)):
            Path(entry.path).unlink()
    return sorted(files, key=lambda file: file.number)


def remove_slab(directory: Path, file: SlabFile) -> None:
    """Deletes a slab's file; none is no error."""
    (directory / file.name).unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Makes created, renamed and deleted names durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(path: Path, nbytes: int) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.unlink(missing_ok=True)
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
        unfinished.rename(path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(fd)


def _open(path: Path, *, direct: bool) -> tuple[int, bool]:
    """Descriptor, and whether it is O_DIRECT: some file systems refuse at open, some only at the first read."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct:
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            if _reads_direct(fd):
                return fd, True
            os.close(fd)
    return os.open(path, flags), False


def _reads_direct(fd: int) -> bool:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
    return True
