"""The keeper: holds the daemon's file descriptors, starts the daemon, and starts it again when it dies.

    python -m kvstore.keeper -- COMMAND …                        starts COMMAND, restarts it, ends when it exits with 0
    python -m kvstore.keeper --adopt PID --notify-fd N -- COMMAND …   takes over a daemon whose keeper has died

With `--blackbox FILE` in front it copies what is stored as `blackbox` into FILE when it ends, and into FILE.crash each
time that the daemon dies.

It speaks systemd's protocol and nothing else (sd_notify(3), sd_listen_fds(3)): FDSTORE=1 / FDSTOREREMOVE=1 / FDNAME=,
BARRIER=1, READY=1, STOPPING=1 as datagrams on $NOTIFY_SOCKET from the daemon's pid alone; what is stored is handed to
the next daemon as descriptors 3, 4, … with $LISTEN_FDS, $LISTEN_FDNAMES and $LISTEN_PID. So a daemon under systemd
needs no keeper. It allocates nothing large, reads no file, and uses the standard library only, so that nothing but
SIGKILL ends it: memory that must outlive the daemon lives as long as this process.

One thread, one poll loop. SIGTERM and SIGINT are passed on; SIGHUP is ignored. Exit codes: 0 when the daemon ended
with 0 or was told to stop and did; 2 when it refused its configuration (exit 78), 1 when it cannot start as things are
(exit 69: a path or socket in use); it has said why.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "CONFIG_EXIT",
    "KEEPER_PID",
    "MAX_DESCRIPTORS",
    "REFUSED_EXIT",
    "Keeper",
    "bind_notify_socket",
    "main",
]

CONFIG_EXIT = 78
"""Exit code of a daemon that must not be started again as it is configured (EX_CONFIG)."""
REFUSED_EXIT = 69
"""Exit code of one whose configuration is right and that cannot start as things are (EX_UNAVAILABLE)."""
KEEPER_PID = "KVSTORE_KEEPER_PID"
"""Environment variable that tells the daemon which process to watch."""
MAX_DESCRIPTORS = 8192
_MAX_PACKET_BYTES = 4096
_MAX_BLACKBOX_BYTES = 4 << 20
_FIRST_FD = 3
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 5.0
_STEADY_S = 10.0  # a daemon that ran this long was no crash at start
_START_CRASHES = 5  # before READY, in a row, with descriptors: then they are what kills it
_STOP_GRACE_S = 120.0  # after SIGTERM; the daemon's own drain deadline is shorter
_BLACKBOX = "blackbox"
# A mover of the old daemon may still write to its disk: the next one must wait for it. The recording kills nobody.
_KEPT_AT_RESET = ("mover-", _BLACKBOX)
_FAULT = "KVSTORE_FAULT"
_REFUSALS = {CONFIG_EXIT: 2, REFUSED_EXIT: 1}  # what we exit with, as `kvstore` does
_CREDENTIALS_BYTES = 12  # struct ucred: pid, uid, gid


@dataclass(slots=True, kw_only=True)
class _Run:
    """One life of the daemon."""

    pid: int
    pidfd: int
    started_s: float
    child: bool
    ready: bool = False
    stopping: bool = False


@dataclass(slots=True, kw_only=True)
class Keeper:
    """The descriptors by name, the running daemon, and what to do when it ends."""

    command: Sequence[str]
    notify: socket.socket
    blackbox: str = ""
    """File that what is stored as `blackbox` is copied to; empty: none."""
    served: bool = False
    """Whether any daemon was ready: a start that is refused leaves nothing behind."""
    fds: dict[str, int] = field(default_factory=dict)
    run: _Run | None = None
    backoff_s: float = _FIRST_BACKOFF_S
    start_crashes: int = 0
    stop_by_s: float | None = None

    def serve(self, wake: int) -> int:
        """Runs until the daemon ends for good; returns the exit code. `wake` is the signal wake-up pipe's read end."""
        poller = select.poll()
        poller.register(self.notify, select.POLLIN)
        poller.register(wake, select.POLLIN)
        while True:
            if self.run is None:
                self.start()
            assert self.run is not None
            poller.register(self.run.pidfd, select.POLLIN)
            for fd, _ in poller.poll(self._timeout_ms()):
                if fd == self.notify.fileno():
                    self.receive()
                elif fd == wake:
                    self._pass_on(os.read(wake, 64))
            if self.stop_by_s is not None and time.monotonic() > self.stop_by_s:
                self._signal(signal.SIGKILL)
            if _has_ended(self.run.pidfd):
                poller.unregister(self.run.pidfd)
                while self.receive():  # what the daemon said before it died comes first
                    pass
                code = self.ended()
                if code is not None:
                    return code
                self._back_off(poller, wake)
                if self.stop_by_s is not None:
                    return 0

    def start(self) -> None:
        """Starts the daemon with all descriptors."""
        pid = os.fork()
        if pid == 0:
            _exec_daemon(self.command, self.fds, self.notify)
        self.run = _Run(pid=pid, pidfd=os.pidfd_open(pid), started_s=time.monotonic(), child=True)

    def adopt(self, pid: int) -> None:
        """Takes over a running daemon, which stores its descriptors again."""
        self.served = True
        self.run = _Run(
            pid=pid, pidfd=os.pidfd_open(pid), started_s=time.monotonic(), child=False, ready=True
        )

    def receive(self) -> bool:
        """Takes one datagram if there is one. Descriptors that are not stored are closed, which answers BARRIER."""
        space = socket.CMSG_SPACE(_CREDENTIALS_BYTES) + socket.CMSG_SPACE(4 * 8)
        try:
            data, ancillary, _, _ = self.notify.recvmsg(
                _MAX_PACKET_BYTES, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        fds, sender = _ancillary(ancillary)
        taken = None
        if self.run is not None and sender == self.run.pid:
            lines = dict(line.partition("=")[::2] for line in data.decode(errors="replace").splitlines())
            taken = self._apply(lines, fds)
        for fd in fds:
            if fd != taken:
                os.close(fd)
        return True

    def _apply(self, lines: dict[str, str], fds: Sequence[int]) -> int | None:
        """Does what a datagram says; returns the descriptor that is stored now, if any."""
        assert self.run is not None
        name = lines.get("FDNAME", "stored")
        if lines.get("READY") == "1":
            self.run.ready = self.served = True
            self.start_crashes = 0
            _tell_our_own_manager("READY=1")
        if lines.get("STOPPING") == "1":
            self.run.stopping = True
        if lines.get("FDSTOREREMOVE") == "1":
            self._drop(name)
        if lines.get("FDSTORE") == "1" and len(fds) == 1:
            if (
                ":" in name
                or not name.isprintable()
                or (len(self.fds) >= MAX_DESCRIPTORS and name not in self.fds)
            ):
                _say(f"descriptor {name!r} refused: {len(self.fds)} are held")
                return None
            self._drop(name)
            self.fds[name] = fds[0]
            return fds[0]
        return None

    def _drop(self, name: str) -> None:
        fd = self.fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def ended(self) -> int | None:
        """The daemon has ended: an exit code for us, or None to start it again."""
        run = self.run
        assert run is not None
        self.run = None
        status = os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1]) if run.child else None
        os.close(run.pidfd)
        os.environ.pop(_FAULT, None)  # a fault that a test asked for is for one life
        _reap()
        if status in _REFUSALS:
            return _REFUSALS[status]
        if status == 0 or (status is None and run.stopping) or self.stop_by_s is not None:
            return 0
        how = (
            "ended"
            if status is None
            else f"died of signal {-status}"
            if status < 0
            else f"exited with {status}"
        )
        if time.monotonic() - run.started_s >= _STEADY_S:
            self.backoff_s = _FIRST_BACKOFF_S
        if not run.ready and self.fds:
            self.start_crashes += 1
        _say(
            f"daemon {run.pid} {how}; starting it again in {self.backoff_s:g} s with {len(self.fds)} descriptors"
        )
        self.save_blackbox(".crash")
        if self.start_crashes >= _START_CRASHES:
            _say(
                f"the daemon failed {_START_CRASHES} times to start from what was kept: memory is dropped, disks stay"
            )
            for name in [name for name in self.fds if not name.startswith(_KEPT_AT_RESET)]:
                self._drop(name)
            self.start_crashes = 0
        return None

    def save_blackbox(self, suffix: str) -> None:
        """Copies the flight recording into its file; what cannot be written is said and lost."""
        fd = self.fds.get(_BLACKBOX)
        if fd is None or not self.blackbox or not self.served:
            return
        unfinished = f"{self.blackbox}.new"
        try:
            data = os.pread(fd, _MAX_BLACKBOX_BYTES, 0)
            file = os.open(
                unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                os.write(file, data)
            finally:
                os.close(file)
            os.rename(unfinished, self.blackbox + suffix)
        except OSError as error:
            _say(f"the flight recording cannot be written to {self.blackbox}{suffix}: {error.strerror}")

    def _back_off(self, poller: select.poll, wake: int) -> None:
        """Waits before the next start, for signals too."""
        until_s = time.monotonic() + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, _LAST_BACKOFF_S)
        while self.stop_by_s is None and (left_s := until_s - time.monotonic()) > 0:
            for fd, _ in poller.poll(left_s * 1000):
                if fd == wake:
                    self._pass_on(os.read(wake, 64))
                elif fd == self.notify.fileno():
                    self.receive()

    def _pass_on(self, signals: bytes) -> None:
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                if self.stop_by_s is None:
                    self.stop_by_s = time.monotonic() + _STOP_GRACE_S
                self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.run is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended; the poll says so next
                signal.pidfd_send_signal(self.run.pidfd, number)

    def _timeout_ms(self) -> float | None:
        return None if self.stop_by_s is None else max(0.0, self.stop_by_s - time.monotonic()) * 1000 + 1


def _reap() -> None:
    """Collects orphans of earlier daemons, which become ours where we are process 1 of a container."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()  # select() cannot take descriptors beyond 1023
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _ancillary(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[list[int], int]:
    """Descriptors and the sender's pid (0: unknown, or another user's)."""
    fds = array.array("i")
    sender = 0
    for level, kind, payload in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        elif kind == socket.SCM_CREDENTIALS:
            pid, uid, _ = array.array("i", payload[:_CREDENTIALS_BYTES])
            sender = pid if uid == os.getuid() else 0
    return list(fds), sender


def _exec_daemon(command: Sequence[str], fds: dict[str, int], notify: socket.socket) -> None:
    """In the forked child: puts the descriptors where sd_listen_fds(3) wants them and becomes the daemon."""
    try:
        os.setsid()  # a ^C of the terminal reaches the daemon once, through us
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        above = _FIRST_FD + len(fds)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds.values()]
        address = notify.getsockname()
        for offset, fd in enumerate(parked):
            os.dup2(fd, _FIRST_FD + offset, inheritable=True)
        environ = dict(os.environ)
        environ["NOTIFY_SOCKET"] = "@" + address.lstrip(b"\0").decode()
        environ[KEEPER_PID] = str(os.getppid())
        environ["LISTEN_PID"] = str(os.getpid())
        environ["LISTEN_FDS"] = str(len(fds))
        environ["LISTEN_FDNAMES"] = ":".join(fds)
        os.execve(command[0], list(command), environ)  # noqa: S606 (the command is our own caller's)
    except OSError as error:
        _say(f"cannot start {command[0]}: {error}")
    finally:
        os._exit(REFUSED_EXIT)


def _tell_our_own_manager(state: str) -> None:
    """Passes a state on to whoever runs us, where that is asked for by $NOTIFY_SOCKET."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    # That it does not listen is not our fault.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.sendto(state.encode(), socket.MSG_DONTWAIT, address)


def _say(text: str) -> None:
    with contextlib.suppress(
        OSError
    ):  # the log's reader may have gone; what is kept is worth more than the line
        os.write(2, f"kvstore keeper: {text}\n".encode())


def bind_notify_socket() -> socket.socket:
    """A datagram socket under a new abstract name that shows senders' credentials."""
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    notify.bind(f"\0kvstore-keeper-{secrets.token_hex(8)}")
    return notify


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 2 * MAX_DESCRIPTORS + 256)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _wake_pipe() -> int:
    """Signals as bytes on a pipe; returns its read end."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return read


def main(arguments: Sequence[str]) -> int:
    """The program; see the module's docstring."""
    usage = "usage: python -m kvstore.keeper [--blackbox FILE] [--adopt PID --notify-fd FD] -- COMMAND …"
    if "--" not in arguments:
        _say(usage)
        return 2
    split = list(arguments).index("--")
    options, command = list(arguments[:split]), list(arguments[split + 1 :])
    flags = dict(zip(options[::2], options[1::2], strict=False))
    blackbox = flags.pop("--blackbox", "")
    if not command or set(flags) not in (set(), {"--adopt", "--notify-fd"}):
        _say(usage)
        return 2
    _raise_descriptor_limit()
    wake = _wake_pipe()
    notify = socket.socket(fileno=int(flags["--notify-fd"])) if flags else bind_notify_socket()
    os.set_inheritable(notify.fileno(), False)
    keeper = Keeper(command=command, notify=notify, blackbox=blackbox)
    if flags:
        keeper.adopt(int(flags["--adopt"]))
    code = keeper.serve(wake)
    keeper.save_blackbox("")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
