"""The simulated disk does what it is there for: what was synced stays, and all else may go any way."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from tests.simulation.disk import PAGE, SimDisk

FOLDER, FILE = Path("/d"), Path("/d/file")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


def page(letter: str) -> memoryview:
    return memoryview(letter.encode() * PAGE)


def made(disk: SimDisk, pages: int = 4) -> int:
    """A file with room for some pages, durable with its name."""
    fd = disk.open(FILE, _NEW)
    disk.posix_fallocate(fd, 0, pages * PAGE)
    disk.fsync(fd)
    sync_names(disk)
    return fd


def sync_names(disk: SimDisk) -> None:
    fd = disk.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    disk.fsync(fd)
    disk.close(fd)


def letters(disk: SimDisk) -> str:
    """The first byte of each page, `.` where it is zero."""
    data = disk.read_file(FILE)
    return "".join(chr(data[at]) if data[at] else "." for at in range(0, len(data), PAGE))


def after_cuts(cuts: int = 300, **writes: str) -> set[str]:
    """What a power cut leaves of `synced`, then `unsynced`, one letter a page."""
    seen = set()
    for seed in range(cuts):
        disk = SimDisk(random.Random(seed))
        fd = made(disk)
        disk.pwritev(fd, [page(letter) for letter in writes.get("synced", "")], 0)
        disk.fdatasync(fd)
        for letter in writes.get("unsynced", ""):
            disk.pwritev(fd, [page(letter), page(letter.upper())], 0)
        disk.power_cut()
        seen.add(letters(disk))
    return seen


def test_what_was_synced_survives() -> None:
    assert after_cuts(synced="abcd") == {"abcd"}


def test_what_was_not_is_lost_reordered_or_torn_page_by_page() -> None:
    """Each page is what was synced, or any version since, whatever its neighbour is."""
    assert after_cuts(synced="xx", unsynced="ab") == {f"{one}{two}.." for one in "xab" for two in "xAB"}


def test_what_is_read_before_a_cut_is_what_was_written_last() -> None:
    disk = SimDisk(random.Random(1))
    fd = made(disk)
    disk.pwritev(fd, [page("a"), page("b")], PAGE)
    disk.pwritev(fd, [page("c")], 2 * PAGE)
    read = memoryview(bytearray(2 * PAGE))
    assert disk.preadv(fd, [read[:PAGE], read[PAGE:]], PAGE) == 2 * PAGE
    assert (read[0], read[PAGE]) == (ord("a"), ord("c"))


def test_a_failed_sync_is_never_made_good_by_the_next() -> None:
    seen = set()
    for seed in range(50):
        disk = SimDisk(random.Random(seed))
        fd = made(disk, 1)
        disk.pwritev(fd, [page("a")], 0)
        disk.odds.sync_error = 1.0
        with pytest.raises(OSError, match="Input/output"):
            disk.fdatasync(fd)
        disk.odds.sync_error = 0.0
        disk.fdatasync(fd)
        disk.power_cut()
        seen.add(letters(disk))
    assert seen == {"a", "."}


def test_of_names_a_prefix_is_left() -> None:
    seen = set()
    for seed in range(100):
        disk = SimDisk(random.Random(seed))
        made(disk)
        disk.close(disk.open(Path("/d/one"), _NEW))
        disk.rename(Path("/d/one"), Path("/d/two"))
        disk.unlink(FILE)
        disk.power_cut()
        seen.add(tuple(sorted(name for name, _ in disk.files(FOLDER))))
    assert seen == {("file",), ("file", "one"), ("file", "two"), ("two",)}


def test_names_that_were_synced_stay() -> None:
    disk = SimDisk(random.Random(3))
    made(disk)
    disk.rename(FILE, Path("/d/two"))
    sync_names(disk)
    disk.power_cut()
    assert disk.files(FOLDER) == [("two", 4 * PAGE)]


def test_a_copy_goes_its_own_way() -> None:
    disk = SimDisk(random.Random(4))
    fd = made(disk)
    disk.pwritev(fd, [page("a")], 0)
    twin = disk.copy(random.Random(5))
    disk.fdatasync(fd)
    disk.pwritev(fd, [page("b")], 0)
    twin.power_cut()
    assert letters(twin) in ("a...", "....")
    assert letters(disk) == "b..."


def test_it_dies_before_an_operation_changes_anything() -> None:
    disk = SimDisk(random.Random(6))
    fd = made(disk)

    def die(operation: str) -> None:
        raise KeyboardInterrupt(operation)

    disk.before = die
    with pytest.raises(KeyboardInterrupt, match="pwritev"):
        disk.pwritev(fd, [page("a")], 0)
    assert letters(disk) == "...."


def test_what_is_not_there_is_said_as_the_system_says_it() -> None:
    disk = SimDisk(random.Random(7))
    for call in (lambda: disk.open(FILE, os.O_RDWR), lambda: disk.unlink(FILE), lambda: disk.read_file(FILE)):
        with pytest.raises(FileNotFoundError):
            call()
    made(disk)
    with pytest.raises(FileExistsError) as raised:
        disk.open(FILE, _NEW)
    assert raised.value.errno == errno.EEXIST
