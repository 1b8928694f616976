"""The directory of a path: who may use it, what is kept beside the slabs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import AlreadyExists, ConfigError
from kvstore.units import MIB
from tests.tiers.harness import SLOT_BYTES
from tiers.nvme.directory import NvmeDirectory, keep_secret, read_secret
from tiers.nvme.slab import open_slab


def test_a_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    directory = NvmeDirectory.open(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "lock").stat().st_mode & 0o777 == 0o600
    directory.close()
    path.chmod(0o755)
    NvmeDirectory.open(path).close()
    assert path.stat().st_mode & 0o777 == 0o700


def test_two_daemons_never_have_one_directory(tmp_path: Path) -> None:
    """Two daemons on one directory wrote over each other's blocks."""
    path = tmp_path / "d"
    first = NvmeDirectory.open(path)
    with pytest.raises(AlreadyExists, match=rf"{path} is in use .*pid {os.getpid()}"):
        NvmeDirectory.open(path)
    first.close()
    NvmeDirectory.open(path).close()


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    """A lock file left by a daemon that was killed kept the next one from starting."""
    script = (
        "import sys, os\nfrom tiers.nvme.directory import NvmeDirectory\n"
        "d = NvmeDirectory.open(sys.argv[1])\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "d")], timeout=30, check=False)
    NvmeDirectory.open(tmp_path / "d").close()


def test_somebodys_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        NvmeDirectory.open(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "thesis.txt"]


def _used(path: Path) -> None:
    """As a daemon leaves it."""
    NvmeDirectory.open(path).close()
    keep_secret(path, bytes(32))


def test_a_path_in_another_is_refused(tmp_path: Path) -> None:
    """Two daemons took /d and /d/x: each counted the other's room as its own, and emptying one emptied both."""
    outer = tmp_path / "d"
    _used(outer)
    (tmp_path / "link").symlink_to(outer)
    for inner in (outer / "x", outer / "x" / "y", outer / "index", tmp_path / "link" / "x"):
        with pytest.raises(ConfigError, match=r"lies in .*/d, which is itself a path"):
            NvmeDirectory.open(inner)
    assert sorted(entry.name for entry in outer.iterdir()) == ["lock", "secret"]
    _used(tmp_path / "e")
    NvmeDirectory.open(outer).close()


def test_a_path_that_has_another_in_it_is_refused(tmp_path: Path) -> None:
    """It was opened where an earlier daemon, or a move of folders, had put one into it."""
    _used(tmp_path / "d")
    _used(tmp_path / "x")
    (tmp_path / "d" / "z").mkdir()
    (tmp_path / "x").rename(tmp_path / "d" / "z" / "x")
    with pytest.raises(ConfigError, match=r"another path of kvstore in it, .*/d/z/x"):
        NvmeDirectory.open(tmp_path / "d")
    _used(tmp_path / "new" / "x")
    with pytest.raises(ConfigError, match="holds other files"):
        NvmeDirectory.open(tmp_path / "new")


def test_a_path_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot use"):
        NvmeDirectory.open(tmp_path / "file" / "d")


def test_slab_numbers_are_never_those_that_exist(tmp_path: Path) -> None:
    directory = NvmeDirectory.open(tmp_path / "d")
    assert directory.new_slab_number() == 1
    open_slab(directory.path, 41, MIB, SLOT_BYTES).close()
    directory.close()
    again = NvmeDirectory.open(tmp_path / "d")
    assert [again.new_slab_number(), again.new_slab_number()] == [42, 43]
    assert [file.number for file in again.slabs()] == [41]
    again.close()


def test_a_start_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    """A start that was refused for want of room left the folder, its lock and the secret in it."""
    place = tmp_path / "new" / "kvstore"
    directory = NvmeDirectory.open(place)
    keep_secret(place, b"s" * 32)
    (place / "index").mkdir()
    (place / "index" / "data.mdb").touch()
    directory.abandon()
    assert not (tmp_path / "new").exists()
    place.mkdir(parents=True)
    NvmeDirectory.open(place).abandon()
    assert list(place.iterdir()) == [], "the folder was there before"


def test_a_start_that_failed_leaves_what_was_there(tmp_path: Path) -> None:
    NvmeDirectory.open(tmp_path).close()
    keep_secret(tmp_path, b"s" * 32)
    NvmeDirectory.open(tmp_path).abandon()
    assert read_secret(tmp_path) == b"s" * 32
    with pytest.raises(AlreadyExists), contextlib.closing(NvmeDirectory.open(tmp_path)):
        NvmeDirectory.open(tmp_path)
    assert (tmp_path / "lock").exists()


def test_a_lock_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two daemons would have had a directory, one with the lock of a name that was another file's by then."""
    real, removed = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            (tmp_path / "lock").unlink()
            removed.append(fd)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with contextlib.closing(NvmeDirectory.open(tmp_path)) as first:
        assert os.path.samestat(os.fstat(first.lock_fd), (tmp_path / "lock").stat())


@pytest.mark.parametrize("damaged", [b"", b"s" * 31, b"s" * 33])
def test_a_damaged_secret_is_never_replaced(tmp_path: Path, damaged: bytes) -> None:
    """A secret of the wrong length was taken for none, a new one was drawn, and every block was lost without a word."""
    (tmp_path / "secret").write_bytes(damaged)
    for use in (lambda: read_secret(tmp_path), lambda: keep_secret(tmp_path, b"t" * 32)):
        with pytest.raises(ConfigError, match=f"is damaged \\({len(damaged)} bytes, not 32\\)"):
            use()
    assert (tmp_path / "secret").read_bytes() == damaged


def test_a_secret_stays_with_its_blocks(tmp_path: Path) -> None:
    """Of two paths with secrets of their own, one was found empty without a word."""
    assert read_secret(tmp_path) is None
    keep_secret(tmp_path, b"s" * 32)
    keep_secret(tmp_path, b"s" * 32)
    with pytest.raises(ConfigError, match="another secret"):
        keep_secret(tmp_path, b"t" * 32)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
