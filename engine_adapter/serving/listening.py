"""The socket that a worker listens on: this user's alone, and never taken from a worker that lives."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import AlreadyExists, InvalidArgument

__all__ = ["listening", "make_own_folder"]

_BACKLOG = 64
_PROBE_TIMEOUT_S = 1.0


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path`, 0600; its file goes at the end. One that nobody serves any more is replaced.

    Raises InvalidArgument where the folder is missing, AlreadyExists where somebody listens, or the file is no socket.
    """
    if not path.parent.is_dir():
        raise InvalidArgument(f"the folder {path.parent} for the worker's socket does not exist")
    if path.exists() or path.is_symlink():
        _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before listen
        listener.listen(_BACKLOG)
        inode = path.stat().st_ino
    except OSError as error:
        listener.close()
        raise InvalidArgument(f"cannot listen on {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if (
                path.stat().st_ino == inode
            ):  # not that of a worker which came while this one finished its requests
                path.unlink()


def make_own_folder(folder: Path) -> None:
    """Makes the folder that sockets lie in by default, 0700. Raises InvalidArgument where it is another user's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise InvalidArgument(f"cannot make the folder {folder}: {error.strerror}") from error
    if owner != os.geteuid():
        raise InvalidArgument(f"the folder {folder} belongs to another user: choose a place with --listen")


def _remove_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise AlreadyExists(f"{path} exists and is no socket: remove it or choose another --listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise AlreadyExists(f"{path} is in use ({error.strerror or error})") from error
    raise AlreadyExists(f"a worker listens on {path} already: stop it or choose another --listen")
