"""A daemon of our own: the real `kvstore serve`, in a temporary folder, for the length of a `with`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import kvstore
from kvstore.errors import ConfigError, KvstoreError, Unavailable
from kvstore.units import parse_size, write_size

__all__ = ["Service", "check_daemon", "disk_room", "serve", "serve_in"]

_READY_S = 60.0
_STOP_S = 60.0
_POLL_S = 0.02
_LEFT_FREE_BYTES = 2 << 30
_DAEMON_MODULES = ("grpc", "lmdb", "xxhash")


class Service:
    """A running daemon."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], socket: Path) -> None:
        self.folder = folder
        self.process = process
        self.socket = socket

    def counters(self) -> Counter[str]:
        """The daemon's counters; one that has not counted yet is 0."""
        with kvstore.connect(self.socket) as client:
            return Counter(client.stats().counters)

    def daemon_resident_bytes(self) -> int:
        """Resident memory of the daemon process, shared mappings not counted."""
        with kvstore.connect(self.socket) as client:
            pid = client.describe().pid
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def serve(settings: Mapping[str, str], parent: Path | None = None) -> Iterator[Service]:
    """A daemon in a new folder, which is removed at the end; `parent` is where it, and the storage in it, is made.

    Otherwise as `serve_in`.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    try:
        with serve_in(folder, settings) as service:
            yield service
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serve_in(folder: Path, settings: Mapping[str, str]) -> Iterator[Service]:
    """Starts `kvstore serve` with these settings (keys as in the configuration file) and stops it at the end.

    `{folder}` in a value is `folder`, which stays: what is on its disk is found by the next one. Raises: ConfigError
    where a package of the daemon is not installed, Unavailable with the end of its log when it is not ready in a
    minute.
    """
    check_daemon()
    variables = {
        f"KVSTORE_{key.upper()}": value.replace("{folder}", str(folder)) for key, value in settings.items()
    }
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")
    } | variables
    # Not in `folder`, which is the caller's and may be too long for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as short:
        socket, log = Path(short) / "kvstore.sock", folder / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli.main", "serve"],
                env=environ | {"KVSTORE_SOCKET": str(socket)},
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            )
        try:
            service = Service(folder, process, socket)
            _await_ready(service, log)
            yield service
        finally:
            _stop(process)


def disk_room(folder: Path, wanted: str) -> str:
    """A capacity for a disk tier in `folder`: `wanted`, or what its disk has room for and a little less."""
    free = shutil.disk_usage(folder).free - _LEFT_FREE_BYTES
    return wanted if parse_size(wanted) <= free else write_size(max(64 << 20, free >> 28 << 28))


def check_daemon() -> None:
    """Raises: ConfigError, in one line, where a package that the daemon needs is not installed."""
    missing = [name for name in _DAEMON_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this benchmark runs the daemon, which needs packages that are not installed: {', '.join(missing)}"
        )


def _await_ready(service: Service, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and service.process.poll() is None:
        if service.socket.exists():
            try:
                with kvstore.connect(service.socket) as client:
                    if client.stats().ready:
                        return
            except KvstoreError:
                pass  # it listens and is not ready to answer: ask again
        time.sleep(_POLL_S)
    tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
    raise Unavailable(f"the daemon did not become ready: {' | '.join(tail) or 'it said nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
