"""The disk that fails on purpose does so as its file says, and as the system's does otherwise."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from tiers.nvme.faulty import FaultyDisk, parse_disk_faults

PAGES = 4


class Rig:
    """A file of 16 KiB on a faulty disk."""

    def __init__(self, folder: Path) -> None:
        self.faults = folder / "faults"
        self.disk = FaultyDisk(folder / "path", self.faults)
        self.fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
        self.buffer = memoryview(mmap.mmap(-1, PAGES * 4096))

    def say(self, *lines: str) -> None:
        unfinished = self.faults.with_suffix(".new")
        unfinished.write_text("\n".join(lines))
        unfinished.rename(self.faults)

    def write(self, byte: bytes) -> int:
        self.buffer[:] = byte * len(self.buffer)
        return self.disk.pwritev(self.fd, [self.buffer], 0)

    def read(self) -> bytes:
        self.buffer[:] = bytes(len(self.buffer))
        count = self.disk.preadv(self.fd, [self.buffer], 0)
        return bytes(self.buffer[:count])


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_without_a_file_nothing_fails(rig: Rig) -> None:
    assert rig.write(b"a") == 4096 * PAGES
    assert rig.read() == b"a" * 4096 * PAGES
    rig.disk.fdatasync(rig.fd)
    rig.disk.posix_fallocate(rig.fd, 0, 4096)


def test_errors_begin_and_end_with_their_line(rig: Rig) -> None:
    rig.say("path write ENOSPC", "* read EIO", "* sync EIO", "* make EROFS", "other write EIO")
    with pytest.raises(OSError, match="No space left"):
        rig.write(b"a")
    for call in (rig.read, lambda: rig.disk.fdatasync(rig.fd)):
        with pytest.raises(OSError, match="Input/output") as caught:
            call()
        assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="Read-only"):
        rig.disk.posix_fallocate(rig.fd, 0, 4096)
    rig.say("")
    assert rig.write(b"b") == 4096 * PAGES


def test_what_the_disk_does_not_say(rig: Rig) -> None:
    rig.write(b"a")
    rig.say("* write torn")
    assert rig.write(b"b") == 4096 * PAGES, "it says that all went well"
    rig.say("* read flip")
    found = rig.read()
    assert found[0] == ord("b") ^ 0x10
    assert found[1:] == b"b" * (2 * 4096 - 1) + b"a" * 2 * 4096
    rig.say("* read short", "* write short")
    assert len(rig.read()) == rig.write(b"c") == 2 * 4096


def test_a_hang_ends_with_its_line(rig: Rig) -> None:
    rig.say("* read hang", "* write slow=0.1")
    thread = threading.Thread(target=rig.read)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    rig.say("")
    thread.join(10)
    assert not thread.is_alive()
    rig.say("* write slow=0.1")
    began_s = time.monotonic()
    rig.write(b"a")
    assert time.monotonic() - began_s >= 0.1


@pytest.mark.parametrize(
    "line", ["* read", "* erase EIO", "* read EWHAT", "* read slow", "* read hang=1", "* read errorcode"]
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="FOLDER OPERATION FAULT"):
        parse_disk_faults(line)
