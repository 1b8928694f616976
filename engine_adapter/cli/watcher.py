"""Cleans up after a command that was killed before it could: `python -m engine_adapter.cli.watcher FD MARK FOLDER …`.

Waits for the end of the pipe FD, whose other end the command alone has open: the kernel closes it however the command
ends. Then every process of this user with MARK in its environment is killed, those included that are started in answer
to it, and the folders are removed. Standard library only, so that it stands beside the command within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

__all__ = ["MARK", "main", "marked"]

MARK = "KVSTORE_HOUSEHOLD"
"""The environment variable that tells a command's processes from all others."""
_TIMEOUT_S = 20.0
_WAIT_MS = 1000.0


def marked(mark: str) -> list[int]:
    """Pids of the processes that were started with this mark."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _has(int(entry), mark)]


def _has(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    return f"{MARK}={mark}".encode() in environ.split(b"\0")


def _kill(pid: int, mark: str) -> None:
    """SIGKILL, and waits for its end. A pid that was given to another process in between is left alone."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if _has(pid, mark):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                poller.poll(_WAIT_MS)
        finally:
            os.close(pidfd)


def main(arguments: list[str]) -> int:
    """The program; see the module's docstring."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe, mark, folders = int(arguments[0]), arguments[1], arguments[2:]
    while os.read(pipe, 64):
        pass
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (pids := marked(mark)) and time.monotonic() < deadline_s:
        for pid in pids:
            _kill(pid, mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
