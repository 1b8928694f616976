"""Processes that a command starts, kills on purpose and cleans up: nothing outlives it, nobody else's is touched.

While the command lives it cleans up itself; when it is killed, its watcher does (`engine_adapter.cli.watcher`).

`Household` makes this process the reaper of everything below it, so a daemon whose keeper was killed, or a mover whose
daemon was, is still found as a descendant. Only descendants are ever signalled, through pidfds, so that a pid that was
given to another process in between is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine_adapter.cli.watcher import MARK
from kvstore.errors import DeadlineExceeded, KvstoreError, Unavailable

__all__ = ["Child", "Household"]

_PR_SET_CHILD_SUBREAPER = 36
_TAIL_LINES = 15
_KILL_TIMEOUT_S = 20.0


class Child:
    """One process that we started; its errors go to a log, its output is read here line by line."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            # A session of its own: Ctrl-C reaches us alone, and we end it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still runs; reaps it if not."""
        return self._process.poll() is None

    def read_line(self, timeout_s: float) -> str:
        """The next line of its output. Raises Unavailable when it ends first, DeadlineExceeded at the deadline."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        stdout = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{self.name} said nothing for {timeout_s:g} s; {self.tail()}")
            if not select.select([stdout], [], [], left)[0]:
                continue
            data = os.read(stdout, 65_536)
            if not data:
                raise Unavailable(f"{self.name} ended before it was ready; {self.tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def tail(self) -> str:
        """The end of its log, for an error message."""
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        )
        return "the end of its log: " + " | ".join(lines[-_TAIL_LINES:]) if lines else "its log is empty"

    def close(self) -> None:
        """Reaps it after its end and closes its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Household:
    """Everything that descends from this process."""

    def __init__(self) -> None:
        """Raises KvstoreError where the kernel does not let us adopt orphans."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise KvstoreError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
        self._children: list[Child] = []
        self._mark = secrets.token_hex(8)
        self._watcher: subprocess.Popen[bytes] | None = None
        self._leash = -1
        """Our end of the watcher's pipe; no child has it, so it is closed when this process ends in whatever way."""

    def watch(self, folders: Sequence[Path]) -> None:
        """Has a watcher end our processes and remove these folders, should this process be killed. Call it first."""
        theirs, self._leash = os.pipe()
        command = [sys.executable, "-m", "engine_adapter.cli.watcher", str(theirs), self._mark]
        try:
            self._watcher = subprocess.Popen(
                [*command, *map(str, folders)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def dismiss(self) -> None:
        """Ends the watcher, which removes the folders that are still there."""
        if self._watcher is not None:
            os.close(self._leash)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watcher.wait(_KILL_TIMEOUT_S)
            self._watcher = None

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Child:
        """Starts a process."""
        child = Child(name, command, {**environ, MARK: self._mark}, log)
        self._children.append(child)
        return child

    def descendants(self) -> list[int]:
        """Pids of what is below this process but the watcher, parents before children. O(processes of the machine)."""
        below: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and (parent := _live_parent(int(entry))) is not None:
                below.setdefault(parent, []).append(int(entry))
        watcher = None if self._watcher is None else self._watcher.pid
        found = [pid for pid in below.get(os.getpid(), []) if pid != watcher]
        for pid in found:
            found += below.get(pid, [])
        return found

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL, and waits until they have ended. Those that are no descendants (any more) are left alone."""
        self._signal_and_wait(
            [pid for pid in pids if pid in self.descendants()], signal.SIGKILL, _KILL_TIMEOUT_S
        )
        self._reap()

    def kill_everything(self) -> None:
        """SIGKILL for all descendants, those included that are started in answer to it."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while pids := self.descendants():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"processes {pids} do not end")
            self._signal_and_wait(pids, signal.SIGKILL, deadline - time.monotonic())
            self._reap()

    def terminate(self, child: Child, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL for what has not ended in time."""
        if child.alive() and not self._signal_and_wait([child.pid], signal.SIGTERM, timeout_s):
            self.kill([child.pid])
        self._reap()

    def _signal_and_wait(self, pids: Sequence[int], number: signal.Signals, timeout_s: float) -> bool:
        """Whether all have ended by the deadline. All are signalled before any is waited for."""
        pidfds = [pidfd for pid in pids if (pidfd := _open(pid)) is not None]
        deadline = time.monotonic() + timeout_s
        try:
            for pidfd in pidfds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            return all(_ended(pidfd, deadline - time.monotonic()) for pidfd in pidfds)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)

    def _reap(self) -> None:
        """Collects what has ended: our own children by their handles, adopted orphans by their pids."""
        ended = [child for child in self._children if not child.alive()]
        for child in ended:
            child.close()
            self._children.remove(child)
        own = {child.pid for child in self._children}
        if self._watcher is not None:
            own.add(self._watcher.pid)
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in own and _parent(int(entry)) == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(entry), os.WNOHANG)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent; None when there is no such process (any more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _parent(pid: int) -> int | None:
    found = _stat(pid)
    return None if found is None else found[1]


def _live_parent(pid: int) -> int | None:
    """As `_parent`; None also for a process that has ended and is not reaped yet."""
    found = _stat(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _ended(pidfd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))
