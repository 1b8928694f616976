"""Sealed memfds and where they are mapped: what every memory tier on the host is made of.

A memfd is allocated in full and sealed against resizing before anybody else gets its descriptor, so that touching it
can never raise SIGBUS: neither because memory ran out nor because another process cut it short.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from kvstore.units import format_size
from tiers.base import PAGE_BYTES, Spans
from tiers.cgroups import CGROUPS, LIMITS, PROC, own_cgroups

__all__ = [
    "MemfdTier",
    "available_memory_bytes",
    "check_sealed",
    "create_extent",
    "create_memfd",
    "give_back",
    "map_memory",
    "populate",
    "reserve",
    "unmap",
]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_BYTES = 2 << 20
_COLLAPSE_BYTES = 64 << 20
"""Of one call. Where it fails the rest is left: a kernel whose memory is in pieces looks long for each huge page."""
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_USED = ("memory.current", "memory.usage_in_bytes")  # beside each of LIMITS
_SPARE_BYTES = 64 << 20
"""Left over by every extent, for the processes themselves: the last free page would be the kernel's reason to kill."""
_SHORT_OF_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EFAULT)

_libc = ctypes.CDLL(None, use_errno=True)  # calls release the GIL: populating takes seconds
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def available_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Memory that can still be taken: the host's, or that of a cgroup above us where it is less.

    Very much where unknown.
    """
    available = sys.maxsize
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (proc / "meminfo").read_text(encoding="ascii")
        available = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    for folder in own_cgroups(proc, cgroups):
        for limit, used in zip(LIMITS, _USED, strict=True):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                most = int((folder / limit).read_text(encoding="ascii"))
                now = int((folder / used).read_text(encoding="ascii"))
                available = min(available, max(0, most - now + _page_cache_bytes(folder / "memory.stat")))
    return available


def _page_cache_bytes(stat: Path) -> int:
    """File pages of a cgroup, which it counts as used and gives back when memory is short."""
    fields = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
    # Version 1 counts those of the cgroups below apart.
    return sum(
        int(fields.get(f"total_{name}", fields.get(name, 0))) for name in ("inactive_file", "active_file")
    )


def create_memfd(name: str, nbytes: int) -> int:
    """A sealed memfd of `nbytes` zeros, all of it allocated; the caller's. About 0.3 s a GiB, without the GIL.

    Raises InvalidArgument for a size that is not a positive multiple of 4096, ResourceExhausted where memory is short.
    """
    return _create(name, nbytes, _allocate)


def create_extent(name: str, nbytes: int) -> int:
    """As `create_memfd`, for blocks: in pages of 2 MiB where the host gives them. From 0.1 s a GiB, without the GIL.

    With pages of 4 KiB a disk gave less than half of its rate, for several times the processor time (ext4 on a virtual
    disk, two cores), as the kernel handles each page of a direct call. A virtual machine whose host has no memory ready
    takes up to 2 s a GiB, which small pages would take when they are first used.
    """
    return _create(name, nbytes, _allocate_huge)


def _create(name: str, nbytes: int, allocate: Callable[[int, int], None]) -> int:
    if nbytes <= 0 or nbytes % PAGE_BYTES:
        raise InvalidArgument(f"an extent is a positive multiple of {PAGE_BYTES} bytes, not {nbytes}")
    available = available_memory_bytes()
    if nbytes + _SPARE_BYTES > available:
        raise ResourceExhausted(
            f"not enough memory for {format_size(nbytes)}: {format_size(available)} is available, "
            f"and {format_size(_SPARE_BYTES)} of it stays free"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        allocate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        if error.errno in _SHORT_OF_MEMORY:
            raise ResourceExhausted(
                f"not enough memory for {format_size(nbytes)}: {error.strerror}"
            ) from error
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def give_back(fd: int, nbytes: int) -> None:
    """Lets the pages of a memfd go, whoever maps it: from now on it reads as zeros. Raises OSError.

    Pages that a device has pinned stay until they are unpinned.
    """
    with mmap.mmap(fd, nbytes) as whole:
        whole.madvise(mmap.MADV_REMOVE)


def check_sealed(fd: int, nbytes: int) -> None:
    """Raises InvalidArgument unless `fd` is a memfd of at least `nbytes` that nobody can resize any more."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidArgument("the descriptor of an extent is not a memfd") from None
    if seals & _NEEDED_SEALS != _NEEDED_SEALS:
        raise InvalidArgument("the memfd of an extent is not sealed against resizing")
    status = os.fstat(fd)
    if status.st_size < nbytes:
        raise InvalidArgument(f"the memfd of an extent has {status.st_size} bytes, {nbytes} were promised")
    # A sparse memfd allocates at first touch, and that raises SIGBUS when memory is short.
    if status.st_blocks * 512 < nbytes:
        raise InvalidArgument("the memfd of an extent is not allocated in full")


def map_memory(fd: int, nbytes: int, address: int = 0) -> int:
    """Maps a memfd shared and writable; at exactly `address`, over what was there, if that is given.

    Else where huge pages of it are huge ones of the mapping, too.
    """
    if address or nbytes < _HUGE_BYTES:
        return _map_shared(fd, nbytes, address)
    around = reserve(nbytes + _HUGE_BYTES)
    begin = -(-around // _HUGE_BYTES) * _HUGE_BYTES
    try:
        _map_shared(fd, nbytes, begin)
    except OSError:
        unmap(around, nbytes + _HUGE_BYTES)
        raise
    # What is left of the reserve. The kernel counts in pages, and so does everybody who asks for memory here.
    end = begin + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    for left, right in ((around, begin), (end, around + nbytes + _HUGE_BYTES)):
        if left < right:
            unmap(left, right - left)
    return begin


def reserve(nbytes: int, address: int = 0) -> int:
    """Takes address space and no memory; touching it is a SIGSEGV. At `address`, over what was there, if given."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if address else 0)
    return _mmap(address, nbytes, 0, flags, -1)


def unmap(address: int, nbytes: int) -> None:
    """Gives a mapping's address range back."""
    if _libc.munmap(address, nbytes) != 0:
        raise _os_error("munmap")


def populate(address: int, nbytes: int) -> None:
    """Fills this process's page tables for mapped memory ahead of use, without the GIL.

    Where the kernel has no call for it, pages are read, and some kernels map them for writing only later.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0 and ctypes.get_errno() == errno.EINVAL:
        np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))[::PAGE_BYTES].max()


def _allocate(fd: int, nbytes: int) -> None:
    """What is not allocated yet. Raises OSError."""
    os.posix_fallocate(fd, 0, nbytes)


def _allocate_huge(fd: int, nbytes: int) -> None:
    """In pages of 2 MiB what is to be had, whatever the host's `shmem_enabled` says but "deny". Raises OSError."""
    whole = nbytes - nbytes % _HUGE_BYTES
    if whole:
        address = map_memory(fd, whole)
        try:
            _collapse(fd, address, whole)
        finally:
            unmap(address, whole)
    _allocate(fd, nbytes)


def _collapse(fd: int, address: int, nbytes: int) -> None:
    for begin in range(0, nbytes, _COLLAPSE_BYTES):
        end = min(begin + _COLLAPSE_BYTES, nbytes)
        for at in range(begin, end, _HUGE_BYTES):
            os.posix_fallocate(fd, at, PAGE_BYTES)  # out of nothing the kernel makes no huge page
        if _libc.madvise(address + begin, end - begin, _MADV_COLLAPSE) != 0:
            return


def _map_shared(fd: int, nbytes: int, address: int) -> int:
    flags = mmap.MAP_SHARED | (_MAP_FIXED if address else 0)
    return _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address or None, nbytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _os_error("mmap")
    return int(result)


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


class MemfdTier(ABC):
    """MemoryTier of memfds; where an extent is mapped is the subclass's. `tiers.base.MemoryTier` is the contract."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fds: dict[
            int, int
        ] = {}  # of those created here: a thousand adopted ones would use up the limit
        self._bytes: dict[int, int] = {}
        self._views: dict[int, memoryview] = {}
        self._spans = Spans(np.zeros(64, dtype=np.uint64), np.zeros(64, dtype=np.uint64))

    @abstractmethod
    def _map(self, extent: int, fd: int, nbytes: int) -> int:
        """Maps the memfd; its address. Raises KvstoreError or OSError with nothing mapped."""

    @abstractmethod
    def _unmap(self, extent: int, address: int, nbytes: int) -> None:
        """Undoes `_map`."""

    def create(self, extent: int, nbytes: int) -> int:
        """See MemoryTier."""
        self._require_new(extent)
        fd = create_extent(f"{self._name}-{extent}", nbytes)
        try:
            self._enter(extent, fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._fds[extent] = fd
        return fd

    def adopt(self, extent: int, fd: int, nbytes: int) -> None:
        """See MemoryTier."""
        try:
            self._require_new(extent)
            check_sealed(fd, nbytes)
            self._enter(extent, fd, nbytes)
        finally:
            os.close(fd)

    def descriptor(self, extent: int) -> int:
        """See MemoryTier."""
        if extent not in self._fds:
            raise NotFound(f"{self._name} extent {extent} was not created here")
        return self._fds[extent]

    def view(self, extent: int) -> memoryview:
        """See MemoryTier."""
        self._require(extent)
        return self._views[extent]

    def addresses(self, extents: NDArray[np.uint16], offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """See MemoryTier."""
        if len(extents) and int(extents.max()) >= len(self._spans.bases):
            raise NotFound(f"{self._name} extent {int(extents.max())} is not mapped")
        bases = self._spans.bases[extents]
        if not bases.all():
            raise NotFound(f"{self._name} extent {int(extents[bases == 0][0])} is not mapped")
        return bases + offsets

    def spans(self) -> Spans:
        """See MemoryTier."""
        return self._spans

    def address(self, extent: int) -> int:
        """Where the extent begins in this process. Raises NotFound."""
        self._require(extent)
        return int(self._spans.bases[extent])

    def extents(self) -> dict[int, int]:
        """Bytes of each mapped extent."""
        return dict(self._bytes)

    def populate(self, extent: int) -> None:
        """Fills page tables ahead of use; may take a second a GiB, without the GIL."""
        populate(self.address(extent), self._bytes[extent])

    def drop(self, extent: int) -> None:
        """See MemoryTier."""
        self._require(extent)
        self._views.pop(extent)
        address, nbytes = self.address(extent), self._bytes.pop(extent)
        self._spans.bases[extent] = self._spans.sizes[extent] = 0
        self._unmap(extent, address, nbytes)
        if extent in self._fds:
            os.close(self._fds.pop(extent))

    def close(self) -> None:
        """See MemoryTier."""
        for extent in tuple(self._bytes):
            self.drop(extent)

    def _enter(self, extent: int, fd: int, nbytes: int) -> None:
        address = self._map(extent, fd, nbytes)
        if extent >= len(self._spans.bases):
            more = np.zeros(
                max(extent + 1, 2 * len(self._spans.bases)) - len(self._spans.bases), dtype=np.uint64
            )
            self._spans = Spans(
                np.concatenate((self._spans.bases, more)), np.concatenate((self._spans.sizes, more))
            )
        self._bytes[extent] = nbytes
        self._views[extent] = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        self._spans.sizes[extent] = nbytes
        self._spans.bases[extent] = address

    def _require(self, extent: int) -> None:
        if extent not in self._bytes:
            raise NotFound(f"{self._name} extent {extent} is not mapped")

    def _require_new(self, extent: int) -> None:
        if extent in self._bytes:
            raise AlreadyExists(f"{self._name} extent {extent} is mapped already")
