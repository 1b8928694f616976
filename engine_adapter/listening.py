"""The socket that a worker listens on: this user's alone, and never taken from a worker that lives."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

from kvstore.errors import AlreadyExists, InvalidArgument, NotFound

__all__ = ["bind_socket"]


def bind_socket(path: Path) -> socket.socket:
    """A listening socket at `path` that only this user may connect to. A socket that nobody serves is replaced.

    Raises NotFound where the folder is missing, AlreadyExists where somebody listens, or the file is no socket.
    """
    if not path.parent.is_dir():
        raise NotFound(f"the folder {path.parent} for the worker's socket does not exist")
    if path.exists() or path.is_symlink():
        _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before listen
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise InvalidArgument(f"cannot listen on {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise AlreadyExists(f"{path} exists and is no socket: remove it or choose another --listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise AlreadyExists(f"{path} is in use ({error})") from error
    raise AlreadyExists(f"a worker listens on {path} already: stop it or choose another --listen")
