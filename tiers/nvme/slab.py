"""One slab: a preallocated file of equal slots, a slot being its payload and one trailer page.

The file's name carries its number and its slot size, so that the slots can be found without any index. O_DIRECT where
the file system allows; elsewhere buffered, with what was read dropped from the page cache. A new slab is made under
another name and renamed when it is allocated in full, so a crash leaves no half of one. `disk` is what it all lies on.
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
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.trailer import TRAILER_BYTES

__all__ = [
    "Slab",
    "SlabFile",
    "list_slabs",
    "open_slab",
    "remove_slab",
    "remove_slabs",
    "slab_file",
    "slab_name",
    "slots_in",
    "stride_bytes",
    "sync_directory",
    "sync_slabs",
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
        return slab_name(self.number, self.slot_bytes)

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

    __slots__ = ("_disk", "_fd", "direct", "dirty", "file")

    def __init__(self, fd: int, file: SlabFile, *, direct: bool, disk: Disk = SYSTEM_DISK) -> None:
        self._fd = fd
        self._disk = disk
        self.file = file
        self.direct = direct
        self.dirty = False
        """Written since the last `sync`."""

    @property
    def descriptor(self) -> int | None:
        """The file, for who makes the calls itself.

        None where reads and writes are `read` and `write` alone: on another disk than the system's, or with the page
        cache to be kept clean.
        """
        return self._fd if self.direct and self._disk is SYSTEM_DISK else None

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv: bytes read, which may be fewer than asked for. Raises OSError."""
        count = self._disk.preadv(self._fd, buffers, offset)
        if not self.direct:
            self._disk.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        """pwritev: bytes written, which may be fewer than asked for. Raises OSError."""
        count = self._disk.pwritev(self._fd, buffers, offset)
        self.dirty = True  # after it: a sync between would take the mark away and not have the bytes
        return count

    def sync(self) -> None:
        """fdatasync, where anything was written since the last. Raises OSError."""
        if not self.dirty:
            return
        self.dirty = False
        try:
            self._disk.fdatasync(self._fd)
        except OSError:
            self.dirty = True
            raise
        if not self.direct:
            self._disk.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def is_cut(self) -> bool:
        """Whether somebody has made the file shorter than it was. Raises OSError."""
        return self._disk.size(self._fd) < self.file.nbytes

    def is_deleted(self) -> bool:
        """Whether somebody has deleted the file: what is in it ends with this descriptor. Raises OSError."""
        return not self._disk.links(self._fd)

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1


def open_slab(
    directory: Path,
    number: int,
    nbytes: int,
    slot_bytes: int,
    *,
    direct: bool = True,
    disk: Disk = SYSTEM_DISK,
) -> Slab:
    """Opens the slab, creating it where it does not exist. `direct` is a wish: see `Slab.direct`.

    Raises InvalidArgument for a size no slab can have, ResourceExhausted where the disk has no room, KvstoreError.
    """
    file = SlabFile(number=number, slot_bytes=slot_bytes, nbytes=nbytes)
    if slot_bytes <= 0 or slot_bytes % PAGE_BYTES or nbytes % PAGE_BYTES or file.slots < 1:
        raise InvalidArgument(f"a slab of {nbytes} bytes cannot have slots of {slot_bytes} bytes")
    path = directory / file.name
    try:
        if not disk.exists(path):
            _create(disk, path, nbytes)
        fd, is_direct = _open(disk, path, direct=direct)
        try:
            if disk.size(fd) < nbytes:  # cut short by somebody: what is missing reads as no trailer
                disk.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            disk.close(fd)
            raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ResourceExhausted(
                f"no space for a slab of {format_size(nbytes)} in {directory}: {error.strerror}"
            ) from error
        raise KvstoreError(f"cannot open {path}: {error.strerror}") from error
    return Slab(fd, file, direct=is_direct, disk=disk)


def slab_name(number: int, slot_bytes: int) -> str:
    """The file name of a slab."""
    return f"slab-{number}-{slot_bytes}.kv"


def slab_file(name: str, nbytes: int) -> SlabFile | None:
    """The slab whose file has this name; None where that is no slab's."""
    found = _NAME.fullmatch(name)
    return (
        SlabFile(number=int(found[1]), slot_bytes=int(found[2]), nbytes=nbytes) if found is not None else None
    )


def list_slabs(directory: Path, disk: Disk = SYSTEM_DISK) -> list[SlabFile]:
    """The slabs of a directory by number; removes what a crash left unfinished."""
    files = []
    for name, nbytes in disk.files(directory):
        if (found := slab_file(name, nbytes)) is not None:
            files.append(found)
        elif name.endswith(_UNFINISHED) and _NAME.fullmatch(name.removesuffix(_UNFINISHED)):
            disk.unlink(directory / name)
    return sorted(files, key=lambda file: file.number)


def remove_slab(directory: Path, file: SlabFile, disk: Disk = SYSTEM_DISK) -> None:
    """Deletes a slab's file; none is no error. Until `sync_directory` a power cut may bring it back."""
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(directory / file.name)


def remove_slabs(directory: Path, files: Sequence[SlabFile], disk: Disk = SYSTEM_DISK) -> None:
    """Deletes the files of slabs for good: no power cut brings one back. None there is no error. Raises OSError."""
    for file in files:
        remove_slab(directory, file, disk)
    if files:
        sync_directory(directory, disk)


def sync_slabs(directory: Path, disk: Disk = SYSTEM_DISK) -> None:
    """fdatasync of every slab there is, whoever wrote to it. Raises OSError."""
    for name, _ in disk.files(directory):
        if _NAME.fullmatch(name) is None:
            continue
        try:
            fd = disk.open(directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # dropped since
            continue
        try:
            disk.fdatasync(fd)
        finally:
            disk.close(fd)


def sync_directory(directory: Path, disk: Disk = SYSTEM_DISK) -> None:
    """Makes created, renamed and deleted names durable."""
    fd = disk.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.fsync(fd)
    finally:
        disk.close(fd)


def _create(disk: Disk, path: Path, nbytes: int) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(unfinished)
    fd = disk.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        disk.posix_fallocate(fd, 0, nbytes)
        disk.fsync(fd)
        disk.rename(unfinished, path)
        sync_directory(path.parent, disk)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(unfinished)
        raise
    finally:
        disk.close(fd)


def _open(disk: Disk, path: Path, *, direct: bool) -> tuple[int, bool]:
    """Descriptor, and whether it is O_DIRECT: some file systems refuse at open, some only at the first read."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct:
        try:
            fd = disk.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            if _reads_direct(disk, fd):
                return fd, True
            disk.close(fd)
    return disk.open(path, flags), False


def _reads_direct(disk: Disk, fd: int) -> bool:
    with mmap.mmap(-1, PAGE_BYTES) as memory, memoryview(memory) as page:
        try:
            disk.preadv(fd, [page], 0)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
    return True
