"""The daemon's places in the file system: the socket's directory, its lock, and who may connect."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from kvstore.config import ServeConfig
from kvstore.errors import AlreadyExists, ConfigError
from kvstore.wire.descriptors import descriptor_path
from kvstore.wire.frames import stream_path

__all__ = ["Sockets", "admin_path"]


def admin_path(socket_path: str) -> str:
    """Where the Admin service listens, when others than the owner may reach the main socket."""
    return f"{socket_path}.admin"


class Sockets:
    """Holds the lock that makes one daemon the owner of a socket path, and removes what it made.

    The lock file holds the pid of the daemon that has the lock, so that the next one can say whom to stop: a keeper
    that somebody killed leaves a daemon that no terminal shows any more.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Makes the directory (0700) where it is missing and takes the lock.

        Raises AlreadyExists while another daemon listens there, ConfigError where the path cannot be used.
        """
        self._path = Path(config.socket)
        self._group = _group_id(config.socket_group)
        try:
            self._make_directory()
            self._lock = os.open(
                f"{config.socket}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyExists(_in_use(config.socket, _holder(self._lock))) from None
        except OSError as error:
            raise ConfigError(f"socket: cannot use {config.socket}: {error.strerror}") from None
        _write_pid(self._lock)
        for path in self._all():
            _remove_stale(path)

    def _all(self) -> tuple[Path, ...]:
        """Every socket that a daemon may have made."""
        main = str(self._path)
        return self._path, *(Path(name(main)) for name in (descriptor_path, stream_path, admin_path))

    def _make_directory(self) -> None:
        folder = self._path.parent
        if not folder.exists():
            folder.mkdir(mode=0o750 if self._group is not None else 0o700, parents=True)
            if self._group is not None:
                os.chown(folder, -1, self._group)
        status = folder.stat()
        if status.st_uid not in (
            os.geteuid(),
            0,
        ):  # its owner could put a socket of his own there, sticky bit or not
            raise ConfigError(f"socket: {folder} belongs to another user (uid {status.st_uid})")
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"socket: everybody may write to {folder}: chmod it, or choose another --socket"
            )

    def bind_descriptors(self) -> socket.socket:
        """The descriptor socket, bound, 0600: memory is shared with the daemon's own user alone."""
        return _bind(descriptor_path(str(self._path)), socket.SOCK_SEQPACKET)

    def bind_streams(self) -> socket.socket:
        """The socket of framed session streams, bound, 0600: a session needs the descriptors as well."""
        return _bind(stream_path(str(self._path)), socket.SOCK_STREAM)

    def open_to_group(self) -> None:
        """After the RPC socket exists: 0600, or 0660 with the configured group."""
        if self._group is None:
            self._path.chmod(0o600)
        else:
            os.chown(self._path, -1, self._group)
            self._path.chmod(0o660)

    def close(self) -> None:
        """Removes the sockets. The lock file stays: removing it would let two daemons lock two files of one name."""
        for path in self._all():
            path.unlink(missing_ok=True)
        os.ftruncate(self._lock, 0)
        os.close(self._lock)


def _write_pid(lock: int) -> None:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except OSError:  # a full disk: the lock itself holds, only the pid cannot be named
        pass


def _holder(lock: int) -> int | None:
    """The daemon that has the lock, as far as the file says; a pid of nobody is one that could not be replaced."""
    try:
        pid = int(os.pread(lock, 32, 0))
        if pid > 1:
            os.kill(pid, 0)
            return pid
    except (OSError, OverflowError, ValueError):
        pass
    return None


def _in_use(path: str, pid: int | None) -> str:
    if pid is None:
        return f"socket in use: another daemon listens on {path}; stop it, or choose another --socket"
    return f"socket in use: daemon {pid} listens on {path}; stop it with `kill {pid}`, or choose another --socket"


def _group_id(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: there is no group {name!r}") from None


def _bind(path: str, kind: socket.SocketKind) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, kind)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket: cannot listen on {path}: {error.strerror}") from None
    finally:
        os.umask(mask)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"socket: {path} exists and is no socket; choose another --socket")
        path.unlink()
    except FileNotFoundError:
        pass
