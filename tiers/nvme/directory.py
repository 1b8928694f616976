"""The directory of one NVMe path: ownership, lock and secret.

    lock              flock held by the daemon and, inherited, by its mover: free only when both are gone
    secret            the tenant's, written by the daemon; a file of its own: without it no block can be found again
    cleared           what administrators have cleared, and when (tiers.nvme.cleared)
    threads           I/O threads that suit the disk (tiers.nvme.probe)
    slab-<n>-<s>.kv   slabs (tiers.nvme.slab)
    index/            LMDB (tiers.nvme.index)

Directory 0700, files 0600: blocks are plaintext prompts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import AlreadyExists, ConfigError, KvstoreError
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.slab import SlabFile, list_slabs, sync_directory

__all__ = [
    "SECRET_BYTES",
    "NvmeDirectory",
    "keep_secret",
    "lock_existing",
    "read_secret",
]

SECRET_BYTES = 32
_LOCK = "lock"
_SECRET = "secret"  # noqa: S105 (a file's name)


class NvmeDirectory:
    """An open, locked directory. One owner thread."""

    def __init__(
        self, path: Path, lock_fd: int, made: tuple[Path, ...] = (), disk: Disk = SYSTEM_DISK
    ) -> None:
        """`made`: what `open` had to make, in that order: folders, then the lock."""
        self.path = path
        self.disk = disk
        self._lock_fd = lock_fd
        self._made = made
        numbers = [file.number for file in list_slabs(path, disk)]
        self._next_slab = max(numbers, default=0) + 1

    @classmethod
    def open(cls, path: str | Path) -> NvmeDirectory:
        """Makes the directory where it does not exist, and locks it.

        Raises ConfigError where it cannot be ours, AlreadyExists while another daemon or its mover has it.
        """
        directory = Path(path)
        _refuse_nested(directory)
        made = [folder for folder in (directory, *directory.parents) if not folder.exists()][::-1]
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _claim(directory)
            lock = [] if (directory / _LOCK).exists() else [directory / _LOCK]
            return cls(directory, _lock(directory), (*made, *lock))
        except OSError as error:
            _remove(made)
            raise ConfigError(f"nvme: cannot use {directory}: {error.strerror}") from error
        except KvstoreError:
            _remove(made)
            raise

    @property
    def lock_fd(self) -> int:
        """The lock's descriptor, for a mover to inherit: the lock lasts as long as anybody has it open."""
        return self._lock_fd

    def slabs(self) -> list[SlabFile]:
        """The slabs that exist, by number."""
        return list_slabs(self.path, self.disk)

    def new_slab_number(self) -> int:
        """A number that no slab of this directory has."""
        number = self._next_slab
        self._next_slab += 1
        return number

    def abandon(self) -> None:
        """Closes it after a start that failed: a directory that `open` has made or found empty is left as it was."""
        if (
            self.path / _LOCK in self._made and not self.slabs()
        ):  # `_claim`: else it would not have been empty
            shutil.rmtree(self.path / "index", ignore_errors=True)
            _remove([self.path / name for name in (_SECRET, f"{_SECRET}.new", "threads")])
            _remove(self._made)
        self.close()

    def close(self) -> None:
        """Lets go of the lock (a mover may still have it)."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def lock_existing(directory: Path) -> int:
    """Locks a path that is there and changes nothing else in it; the lock is the caller's, until it closes it.

    Raises ConfigError where there is no path of kvstore, AlreadyExists while a daemon or its mover has it.
    """
    if not (directory / _LOCK).is_file():
        raise ConfigError(f"nvme: {directory} is no path of kvstore: it has no file {_LOCK}")
    try:
        return _lock(directory)
    except OSError as error:
        raise ConfigError(f"nvme: cannot use {directory}: {error.strerror}") from error


def read_secret(directory: Path) -> bytes | None:
    """The tenant's secret that is kept beside the slabs; None where there is none yet.

    Raises ConfigError where it cannot be read or is no secret: another in its place would lose every block for good.
    """
    file = directory / _SECRET
    try:
        secret = file.read_bytes()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ConfigError(f"nvme: {directory} is no folder") from None
    except OSError as error:
        raise ConfigError(f"nvme: cannot read {file}: {error.strerror}") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"nvme: {file} is damaged ({len(secret)} bytes, not {SECRET_BYTES}): put the right file back, or empty "
            f"{directory} to start without the blocks in it"
        )
    return secret


def keep_secret(directory: Path, secret: bytes) -> None:
    """Writes the tenant's secret beside the slabs, where it is not there yet.

    Raises ConfigError where another is there; OSError.
    """
    kept = read_secret(directory)
    if kept is not None:
        if not secrets.compare_digest(kept, secret):
            raise ConfigError(
                f"nvme: {directory} has blocks of another secret than the other paths or the running service: use it "
                "alone, or empty it"
            )
        return
    file = directory / _SECRET
    unfinished = file.with_suffix(".new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secret)
        os.fsync(fd)
    finally:
        os.close(fd)
    unfinished.rename(file)
    sync_directory(directory)


def _remove(made: Sequence[Path]) -> None:
    """Files and empty folders, the last made first."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def _refuse_nested(directory: Path) -> None:
    """Raises ConfigError where a path lies in another, or has one in it: each would find files that are not its own."""
    real = Path(os.path.realpath(directory))
    outer = next((folder for folder in real.parents if _is_path(folder)), None)
    if outer is not None:
        raise ConfigError(
            f"nvme: {directory} lies in {outer}, which is itself a path of kvstore; give a folder beside it"
        )
    if not _is_path(real):
        return  # a folder with anything else in it is refused by `_claim`
    for folder, names, _ in os.walk(real):
        for name in names:
            if _is_path(Path(folder, name)):
                raise ConfigError(
                    f"nvme: {directory} has another path of kvstore in it, {folder}/{name}; move that one out"
                )


def _is_path(folder: Path) -> bool:
    """Whether a folder is, or was, a path of some kvstore."""
    return all(os.path.isfile(folder / name) for name in (_LOCK, _SECRET))


def _claim(directory: Path) -> None:
    """Makes the directory private; refuses one that has somebody's files or another owner."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"nvme: {directory} belongs to another user (uid {status.st_uid})")
    if not (directory / _LOCK).exists() and set(os.listdir(directory)) - {"lost+found"}:
        raise ConfigError(
            f"nvme: {directory} holds other files; give a directory of its own, for example {directory}/kvstore"
        )
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def _lock(directory: Path) -> int:
    file = directory / _LOCK
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise AlreadyExists(
                f"nvme: {directory} is in use by another kvstore daemon or its mover (pid {owner})",
                retry_after_s=0.1,
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), file.stat()):
                break
        os.close(
            fd
        )  # a start that failed has removed it between open and lock: the name is another file's by now
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd
