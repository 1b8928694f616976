"""The keeper with a small daemon of the test's own: what is stored comes back, who may store, when it starts again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 20.0

# Says what it was given, then obeys one command a line from a fifo; `{log}` gets a line for each life.
DAEMON = """
import array, os, signal, socket, sys
log, fifo = sys.argv[1:3]
names = [name for name in os.environ["LISTEN_FDNAMES"].split(":") if name]
held = {name: os.pread(3 + i, 64, 0).decode() for i, name in enumerate(names)}
assert os.environ["LISTEN_PID"] == str(os.getpid())
def say(text):
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {text}\\n")
address = "\\0" + os.environ["NOTIFY_SOCKET"][1:]
def notify(lines, fds=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.sendmsg([lines.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
def barrier():
    read, write = os.pipe()
    notify("BARRIER=1", [write])
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
def store(name, text):
    fd = os.memfd_create(name)
    os.write(fd, text.encode())
    notify(f"FDSTORE=1\\nFDNAME={name}\\nFDPOLL=0", [fd])
    os.close(fd)
    barrier()
signal.signal(signal.SIGTERM, lambda *_: (say("term"), os._exit(0)))
say("start " + repr(sorted(held.items())))
if "crash" in held:
    os._exit(3)
notify("READY=1")
while True:
    with open(fifo) as file:
        for line in file:
            exec(line)
            say("done")
"""


class Kept:
    """A running keeper, its daemon's log and its command pipe."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.log = folder / "log"
        self.fifo = folder / "fifo"
        self.process = process
        self.seen = 0

    def next(self) -> tuple[int, str]:
        """The next line of the daemon's log: its pid and its text."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            if len(lines) > self.seen:
                self.seen += 1
                pid, _, text = lines[self.seen - 1].partition(" ")
                return int(pid), text
            time.sleep(0.005)
        raise TimeoutError("the daemon said nothing")

    def tell(self, command: str) -> None:
        """Has the daemon run one line, and waits until it has."""
        with self.fifo.open("w") as file:
            file.write(command + "\n")
        assert self.next()[1] == "done"


def _command(folder: Path) -> list[str]:
    return ["--", sys.executable, str(folder / "daemon.py"), str(folder / "log"), str(folder / "fifo")]


@contextmanager
def _kept(folder: Path, **environ: str) -> Iterator[Kept]:
    (folder / "daemon.py").write_text(textwrap.dedent(DAEMON))
    os.mkfifo(folder / "fifo")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.keeper", *_command(folder)], env={**os.environ, **environ}
    )
    kept = Kept(folder, process)
    try:
        yield kept
    finally:
        kept.process.terminate()
        try:
            kept.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            kept.process.kill()
            kept.process.wait()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with _kept(tmp_path) as kept:
        yield kept


def test_what_is_stored_is_given_to_the_next_daemon(kept: Kept) -> None:
    pid, text = kept.next()
    assert text == "start []"
    kept.tell("store('tables', 'rows'); store('dram-0', 'old'); store('dram-0', 'new'); store('gone', 'x')")
    kept.tell("notify('FDSTOREREMOVE=1\\nFDNAME=gone'); barrier()")
    os.kill(pid, signal.SIGKILL)
    second, text = kept.next()
    assert second != pid
    assert text == "start [('dram-0', 'new'), ('tables', 'rows')]"


def test_what_was_said_just_before_the_death_counts(kept: Kept) -> None:
    """Elsewhere a descriptor stored right before a crash was lost, because the death was seen first."""
    pid, _ = kept.next()
    with kept.fifo.open("w") as file:
        file.write("store('last', 'words'); os.kill(os.getpid(), 9)\n")
    second, text = kept.next()
    assert second != pid
    assert text == "start [('last', 'words')]"


def test_sigterm_is_passed_on_and_ends_both(kept: Kept) -> None:
    kept.next()
    kept.process.terminate()
    assert kept.next()[1] == "term"
    assert kept.process.wait(DEADLINE_S) == 0


def test_sighup_changes_nothing(kept: Kept) -> None:
    kept.next()
    kept.process.send_signal(signal.SIGHUP)
    kept.tell("barrier()")
    assert kept.process.poll() is None


def test_exit_with_zero_ends_the_keeper(kept: Kept) -> None:
    kept.next()
    with kept.fifo.open("w") as file:
        file.write("os._exit(0)\n")
    assert kept.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("daemon, keeper", [(78, 2), (69, 1)])
def test_a_refused_start_is_not_tried_again(kept: Kept, daemon: int, keeper: int) -> None:
    """A wrong configuration that only the daemon could see ended `kvstore serve` with 1, as a failure does."""
    kept.next()
    with kept.fifo.open("w") as file:
        file.write(f"os._exit({daemon})\n")
    assert kept.process.wait(DEADLINE_S) == keeper
    assert len(kept.log.read_text().splitlines()) == 1


def test_descriptors_that_kill_every_start_are_dropped(kept: Kept) -> None:
    """A daemon that dies of what it recovers is not started on it for ever; movers' pidfds stay, disks need them."""
    kept.next()
    with kept.fifo.open("w") as file:
        file.write("store('mover-0', 'pid'); store('crash', 'me'); os.kill(os.getpid(), 9)\n")
    for _ in range(5):
        assert kept.next()[1] == "start [('crash', 'me'), ('mover-0', 'pid')]"
    assert kept.next()[1] == "start [('mover-0', 'pid')]"


def test_a_stranger_stores_nothing(kept: Kept, tmp_path: Path) -> None:
    """Only the daemon's own process is listened to, or anyone could replace the tables."""
    pid, _ = kept.next()
    environ = dict(
        line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + environ["NOTIFY_SOCKET"][1:])
        fd = os.memfd_create("evil")
        socket.send_fds(sock, [b"FDSTORE=1\nFDNAME=evil"], [fd])
        os.close(fd)
    kept.tell("barrier()")
    os.kill(pid, signal.SIGKILL)
    assert kept.next()[1] == "start []"


def test_readiness_goes_up_to_our_own_manager(tmp_path: Path) -> None:
    path = tmp_path / "manager"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(DEADLINE_S)
        with _kept(tmp_path, NOTIFY_SOCKET=str(path)):
            assert manager.recv(100) == b"READY=1"


def test_a_second_keeper_adopts_a_running_daemon(tmp_path: Path) -> None:
    """The keeper may die too: the daemon goes on and gives its descriptors to the next one."""
    from kvstore.keeper import bind_notify_socket

    with _kept(tmp_path) as kept:
        pid, _ = kept.next()
        kept.process.kill()
        kept.process.wait()
        with bind_notify_socket() as notify:
            name = notify.getsockname()[1:].decode()
            second = subprocess.Popen(
                [
                    *[sys.executable, "-m", "kvstore.keeper", "--adopt", str(pid)],
                    *["--notify-fd", str(notify.fileno()), *_command(tmp_path)],
                ],
                pass_fds=[notify.fileno()],
            )
        kept.process = second
        kept.tell(f"address = '\\0{name}'; store('tables', 'again')")
        os.kill(pid, signal.SIGKILL)
        other, text = kept.next()
        assert other != pid
        assert text == "start [('tables', 'again')]"


def test_usage_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "kvstore.keeper"], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
