"""Where the file of an open index lies, so that it is noticed when somebody deletes it.

LMDB goes on in a file that no name leads to, and every commit there ends with the last process that has it open.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.config import Durability
from kvstore.errors import KvstoreError, Unavailable
from tiers.nvme.directory import keep_secret, lock_existing, read_secret
from tiers.nvme.index import DurableIndex

__all__ = ["IndexPlace"]


class IndexPlace:
    """The index of one directory. Every call blocks on the disk."""

    def __init__(self, directory: Path) -> None:
        """The index is open. Where it has no file (none is kept, or another disk is below), none can be deleted."""
        self._directory = directory
        self.file = directory / "index" / "data.mdb"
        self._identity = self._found()
        self._lock_fd = -1
        """The lock of a folder that was made anew, held until the daemon ends."""
        self._secret = read_secret(directory) if self._identity is not None else None

    def stands(self) -> bool:
        """Whether the file is still the one that was opened. Raises OSError."""
        return self._identity is None or self._found() == self._identity

    def renew(self, *, map_bytes: int, durability: Durability) -> DurableIndex:
        """An empty index in the place of the one that was deleted, which is closed by now.

        Raises Unavailable while the directory is gone as well, KvstoreError.
        """
        if not self._directory.is_dir():
            raise Unavailable(f"{self._directory} is gone")
        try:
            self._claim()
            index = DurableIndex.anew(self._directory, map_bytes=map_bytes, durability=durability)
            self._identity = self._found()
        except OSError as error:
            raise KvstoreError(
                f"{self.file} was deleted and cannot be made anew: {error.strerror}"
            ) from error
        return index

    def _claim(self) -> None:
        """A folder that was made anew is ours: it has our lock, and the secret without which no block is found."""
        lock = self._directory / "lock"
        if not lock.exists():
            lock.touch(mode=0o600)
            self._lock_fd = lock_existing(self._directory)
        if self._secret is not None:
            keep_secret(self._directory, self._secret)

    def _found(self) -> tuple[int, int] | None:
        try:
            status = self.file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino
