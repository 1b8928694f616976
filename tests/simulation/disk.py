"""A disk for the simulation: files in pages, a cache that a power cut loses, and faults on purpose.

Behind the contract of `tiers.nvme.disk`, so the real slabs, scans and recovery stand on it. Bytes count as on the
medium after fsync or fdatasync of their file, names after fsync of their folder. `power_cut` makes of every page
that was written since any one of its versions, independently of its neighbours (lost, reordered, torn in 4 KiB),
and of the names a prefix of what was done to them, as a journal does. `before(operation)` runs before each
operation that changes anything and may raise: there the machine, or the process that called, dies.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096
_ZEROS = bytes(PAGE)


@dataclass
class File:
    """One file."""

    size: int = 0
    synced_size: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)  # as it is read now
    synced: dict[int, bytes] = field(default_factory=dict)
    unsynced: dict[int, list[bytes]] = field(default_factory=dict)  # versions since the last sync
    adrift: dict[int, list[bytes]] = field(default_factory=dict)
    """Pages whose sync failed: the kernel takes them for written, and no later sync brings them to the medium."""


@dataclass
class Odds:
    """How often an operation fails, each from 0 to 1."""

    read_error: float = 0.0
    write_error: float = 0.0
    short: float = 0.0
    sync_error: float = 0.0
    no_space: float = 0.0


class SimDisk:
    """See the module. All paths are names in one flat space; a folder is whatever a path has in front."""

    def __init__(self, rng: random.Random, before: Callable[[str], None] = lambda operation: None) -> None:
        self.rng = rng
        self.before = before
        self.odds = Odds()
        self.names: dict[str, File] = {}
        self.synced_names: dict[str, File] = {}
        self.journal: list[tuple[str, File | None]] = []  # name → file, or its end; since the last sync
        self.operations = 0
        self.most_bytes = 0
        self.torn_write: int | None = None
        """The next write ends after so many pages, as if its process had been killed in it."""
        self._open: dict[int, File | str] = {}
        self._next_fd = 1 << 24  # no descriptor of this process

    # ------------------------------------------------------------ the contract

    def open(self, path: Path, flags: int, mode: int = 0o600, /) -> int:
        name = str(path)
        opened: File | str
        if flags & os.O_DIRECTORY:
            opened = name
        else:
            file = self.names.get(name)
            if file is None:
                if not flags & os.O_CREAT:
                    raise OSError(errno.ENOENT, "No such file or directory")
                self._changes("open")
                file = File()
                self._name(name, file)
            elif flags & os.O_EXCL and flags & os.O_CREAT:
                raise OSError(errno.EEXIST, "File exists")
            elif flags & os.O_TRUNC:
                self._changes("open")
                file.pages, file.size = {}, 0
            opened = file
        self._next_fd += 1
        self._open[self._next_fd] = opened
        return self._next_fd

    def close(self, fd: int, /) -> None:
        del self._open[fd]

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        file = self._file(fd)
        if self._odd(self.odds.read_error):
            raise OSError(errno.EIO, "Input/output error")
        wanted = sum(len(buffer) for buffer in buffers)
        count = max(0, min(wanted, file.size - offset))
        if self._odd(self.odds.short):
            count = self.rng.randrange(0, count + 1, PAGE) if count else 0
        left, page = count, offset // PAGE
        for buffer in buffers:
            for at in range(0, min(len(buffer), left), PAGE):
                buffer[at : at + PAGE] = file.pages.get(page, _ZEROS)
                page += 1
            left -= min(len(buffer), left)
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._changes("pwritev")
        file = self._file(fd)
        if self._odd(self.odds.write_error):
            raise OSError(errno.EIO, "Input/output error")
        pages = [buffer[at : at + PAGE] for buffer in buffers for at in range(0, len(buffer), PAGE)]
        if self._odd(self.odds.short):
            pages = pages[: self.rng.randrange(len(pages) + 1)]
        if self.torn_write is not None:
            pages, self.torn_write = pages[: self.torn_write], None
        first = offset // PAGE
        for number, page in enumerate(pages, first):
            self._write_page(file, number, bytes(page))
        file.size = max(file.size, offset + PAGE * len(pages))
        return PAGE * len(pages)

    def write(self, fd: int, data: bytes, /) -> int:
        self._changes("write")
        file = self._file(fd)
        padded = data + bytes(-len(data) % PAGE)
        for number in range(len(padded) // PAGE):
            self._write_page(file, number, padded[number * PAGE : (number + 1) * PAGE])
        file.size = len(data)
        return len(data)

    def fsync(self, fd: int, /) -> None:
        self._changes("fsync")
        opened = self._open[fd]
        if isinstance(opened, str):
            self.synced_names = dict(self.names)
            self.journal.clear()
        else:
            self._sync(opened)
            opened.synced_size = opened.size

    def fdatasync(self, fd: int, /) -> None:
        self._changes("fdatasync")
        file = self._file(fd)
        if self._odd(self.odds.sync_error):
            for number, versions in file.unsynced.items():
                file.adrift.setdefault(number, []).extend(versions)
            file.unsynced.clear()
            raise OSError(errno.EIO, "Input/output error")
        self._sync(file)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int, /) -> None:
        self._changes("fallocate")
        if self._odd(self.odds.no_space):
            raise OSError(errno.ENOSPC, "No space left on device")
        file = self._file(fd)
        file.size = max(file.size, offset + nbytes)
        self._count()

    def posix_fadvise(self, fd: int, offset: int, nbytes: int, advice: int, /) -> None:
        pass

    def size(self, fd: int, /) -> int:
        return self._file(fd).size

    def links(self, fd: int, /) -> int:
        file = self._file(fd)
        return sum(named is file for named in self.names.values())

    def exists(self, path: Path, /) -> bool:
        return str(path) in self.names

    def files(self, directory: Path, /) -> list[tuple[str, int]]:
        front = f"{directory}/"
        found = [
            (name[len(front) :], file.size) for name, file in self.names.items() if name.startswith(front)
        ]
        self.rng.shuffle(found)
        return found

    def read_file(self, path: Path, /) -> bytes:
        file = self.names.get(str(path))
        if file is None:
            raise OSError(errno.ENOENT, "No such file or directory")
        pages = (file.pages.get(number, _ZEROS) for number in range(-(-file.size // PAGE)))
        return b"".join(pages)[: file.size]

    def rename(self, old: Path, new: Path, /) -> None:
        if str(old) not in self.names:
            raise OSError(errno.ENOENT, "No such file or directory")
        self._changes("rename")
        file = self.names.pop(str(old))
        self.names[str(new)] = file
        self.journal.append((f"{old}\0{new}", file))

    def unlink(self, path: Path, /) -> None:
        if str(path) not in self.names:
            raise OSError(errno.ENOENT, "No such file or directory")
        self._changes("unlink")
        del self.names[str(path)]
        self.journal.append((str(path), None))

    # ------------------------------------------------------------ what happens to it

    def power_cut(self) -> None:
        """The machine is off and on again."""
        names = dict(self.synced_names)
        for name, file in self.journal[: self.rng.randrange(len(self.journal) + 1)]:
            old, _, new = name.partition("\0")
            if file is None:
                names.pop(old, None)
            elif new:
                names.pop(old, None)
                names[new] = file
            else:
                names[old] = file
        for file in names.values():
            self._settle(file)
        self.names, self.synced_names = names, dict(names)
        self.journal.clear()
        self._open.clear()

    def _settle(self, file: File) -> None:
        """Each page becomes what was synced, or any version since."""
        for pending in (file.adrift, file.unsynced):
            for number, versions in pending.items():
                if (pick := self.rng.randrange(len(versions) + 1)) < len(versions):
                    file.synced[number] = versions[pick]
            pending.clear()
        if file.size != file.synced_size and self.rng.random() < 0.5:
            file.synced_size = file.size
        file.size = file.synced_size
        last = -(-file.size // PAGE)
        file.pages = {number: page for number, page in file.synced.items() if number < last}
        file.synced = dict(file.pages)

    def flip_bit(self) -> bool:
        """One bit of a page that was written, on the medium."""
        files = [file for file in self.names.values() if file.pages]
        if not files:
            return False
        file = self.rng.choice(files)
        number = self.rng.choice(sorted(file.pages))
        page = bytearray(file.pages[number])
        page[self.rng.randrange(PAGE)] ^= 1 << self.rng.randrange(8)
        file.pages[number] = bytes(page)
        if number in file.synced:
            file.synced[number] = file.pages[number]
        return True

    def copy(self, rng: random.Random) -> SimDisk:
        """The same disk once more, with nothing open."""
        twin = SimDisk(rng)
        memo: dict[int, File] = {}

        def cloned(file: File) -> File:
            if id(file) not in memo:
                memo[id(file)] = File(
                    size=file.size,
                    synced_size=file.synced_size,
                    pages=dict(file.pages),
                    synced=dict(file.synced),
                    unsynced={at: list(versions) for at, versions in file.unsynced.items()},
                    adrift={at: list(versions) for at, versions in file.adrift.items()},
                )
            return memo[id(file)]

        twin.names = {name: cloned(file) for name, file in self.names.items()}
        twin.synced_names = {name: cloned(file) for name, file in self.synced_names.items()}
        twin.journal = [(name, None if file is None else cloned(file)) for name, file in self.journal]
        return twin

    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(-(-file.size // PAGE) * PAGE for file in self.names.values())

    # ------------------------------------------------------------ inside

    def _changes(self, operation: str) -> None:
        self.operations += 1
        self.before(operation)

    def _count(self) -> None:
        self.most_bytes = max(self.most_bytes, self.used_bytes())

    def _odd(self, chance: float) -> bool:
        return bool(chance) and self.rng.random() < chance

    def _file(self, fd: int) -> File:
        file = self._open[fd]
        assert isinstance(file, File)
        return file

    def _name(self, name: str, file: File) -> None:
        self.names[name] = file
        self.journal.append((name, file))

    def _write_page(self, file: File, number: int, page: bytes) -> None:
        file.pages[number] = page
        file.unsynced.setdefault(number, []).append(page)

    def _sync(self, file: File) -> None:
        for number, versions in file.unsynced.items():
            file.synced[number] = versions[-1]
            file.adrift.pop(number, None)
        file.unsynced.clear()
