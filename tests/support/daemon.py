"""A real service for a test: keeper, daemon and movers on a temporary socket, found and ended by pid."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kvstore.cli.serve import keeper_command
from kvstore.client.rpc import Rpc
from kvstore.config import NvmePath, ServeConfig
from kvstore.errors import KvstoreError
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = [
    "DEADLINE_S",
    "Service",
    "children",
    "kill_everything",
    "small_config",
    "start",
    "started",
    "wait_for",
]

DEADLINE_S = 30.0


def small_config(folder: Path, *, nvme_bytes: int = 0, **changes: object) -> ServeConfig:
    """A service that takes little: 64 MiB of DRAM in extents of 16, small tables; NVMe below `folder` on request."""
    nvme = (NvmePath(path=str(folder / "nvme"), capacity_bytes=nvme_bytes),) if nvme_bytes else ()
    config = ServeConfig(
        socket=str(folder / "kv.sock"),
        dram_bytes=64 * MIB,
        dram_extent_bytes=16 * MIB,
        nvme=nvme,
        nvme_extent_bytes=16 * MIB,
        nvme_threads=2,
        hbm_bytes=256 * MIB,
        min_slot_bytes=4096,
        max_rows=16_384,
        max_sessions=8,
        max_namespaces=64,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


Value = TypeVar("Value")


def wait_for(what: str, get: Callable[[], Value], deadline_s: float = DEADLINE_S) -> Value:
    """The first true value of `get`; asks again after errors of the tree. Raises TimeoutError."""
    until = time.monotonic() + deadline_s
    last: object = None
    while time.monotonic() < until:
        try:
            value = get()
        except KvstoreError as error:
            last = error
        else:
            if value:
                return value
            last = value
        time.sleep(0.01)
    raise TimeoutError(f"{what} did not come within {deadline_s:g} s; last: {last}")


def children(pid: int) -> dict[int, str]:
    """Command line of each child process of `pid`."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{entry}/stat").read_text()
                state, parent = text.rpartition(")")[2].split()[:2]
                if int(parent) == pid and state != "Z":
                    line = Path(f"/proc/{entry}/cmdline").read_bytes()
                    found[int(entry)] = line.replace(b"\0", b" ").decode()
    return found


@dataclass(slots=True)
class Service:
    """A running service."""

    config: ServeConfig
    process: subprocess.Popen[bytes]
    log: Path
    rpc: Rpc
    pids: set[int] = field(default_factory=set)
    """Every process of the service that was ever seen."""

    @property
    def socket(self) -> str:
        """The RPC socket."""
        return self.config.socket

    def call(
        self, method: str, request: object, *, service: str = "kvstore", timeout_s: float = DEADLINE_S
    ) -> object:
        """One unary call."""
        return self.rpc.call(method, request, timeout_s, service=service)

    def describe(self) -> pb.DescribeReply:
        """What the daemon says it is."""
        reply = self.call("Describe", pb.DescribeRequest())
        assert isinstance(reply, pb.DescribeReply)
        self.pids |= {reply.pid, reply.keeper_pid} - {0}
        return reply

    def stats(self) -> pb.StatsReply:
        """Gauges and counters."""
        reply = self.call("Stats", pb.StatsRequest())
        assert isinstance(reply, pb.StatsReply)
        return reply

    def tier(self, name: str) -> pb.TierStats:
        """One tier's gauges."""
        return next(tier for tier in self.stats().tiers if tier.tier == name)

    def faults(self) -> list[str]:
        """What the store's own invariant check finds."""
        reply = self.call("CheckIntegrity", pb.CheckIntegrityRequest(), service="admin")
        assert isinstance(reply, pb.CheckIntegrityReply)
        return list(reply.faults)

    @property
    def daemon_pid(self) -> int:
        """The daemon that answers now."""
        return int(self.describe().pid)

    @property
    def keeper_pid(self) -> int:
        """The keeper of now."""
        return int(self.describe().keeper_pid)

    def mover_pids(self) -> list[int]:
        """The movers of the daemon that answers now."""
        found = [pid for pid, line in children(self.daemon_pid).items() if "kvstore.mover.process" in line]
        self.pids |= set(found)
        return found

    def await_ready(self) -> None:
        """Returns when a daemon answers that it is ready. Asking before there is a socket is a tenth of a start."""
        wait_for(
            f"a ready daemon ({self.tail()})",
            lambda: self.alive() and os.path.exists(self.socket) and self.stats().ready,
        )
        self.describe()

    def await_restart(self, old_pid: int) -> int:
        """Returns the pid of the daemon that came after `old_pid`."""
        return wait_for(f"a daemon after {old_pid}", lambda: (pid := self.daemon_pid) != old_pid and pid)

    def kill_daemon(self) -> int:
        """SIGKILLs the daemon; returns the pid of the next one, which is ready."""
        pid = self.daemon_pid
        os.kill(pid, signal.SIGKILL)
        return self.await_restart(pid)

    def alive(self) -> bool:
        """Whether the first keeper still runs."""
        return self.process.poll() is None

    def tail(self) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " | ".join(text.splitlines()[-12:])

    def stop(self, deadline_s: float = DEADLINE_S) -> int | None:
        """SIGTERM, and waits until every process that was seen has ended; SIGKILL for who does not.

        Returns the exit code of the keeper that was started first.
        """
        with contextlib.suppress(KvstoreError):
            self.mover_pids()
        pids = self.pids | {self.process.pid}
        keepers = [pid for pid in pids if _runs(pid, "kvstore.keeper")]
        for pid in keepers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        _await_end([pid for pid in pids if _runs(pid, "kvstore.")], deadline_s)
        self.rpc.close()
        return self.process.wait(deadline_s)


def kill_everything(service: Service) -> None:
    """SIGKILL of keeper, daemon and movers, all at once: only the slabs are left."""
    service.mover_pids()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, or one would start another again
        for pid in service.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    service.process.wait(DEADLINE_S)


def _runs(pid: int, module: str) -> bool:
    """Whether `pid` is still a process of ours: its command line names `module`."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return False
    return module in line


def _await_end(pids: list[int], deadline_s: float) -> None:
    pidfds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    until = time.monotonic() + deadline_s
    for pidfd in pidfds:
        if not select.select([pidfd], [], [], max(0.0, until - time.monotonic()))[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], DEADLINE_S)
        os.close(pidfd)


def start(config: ServeConfig, log: Path, environ: Mapping[str, str] | None = None) -> Service:
    """Starts the service and does not wait."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            keeper_command(config),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environ or {})},
        )
    return Service(config=config, process=process, log=log, rpc=Rpc(config.socket), pids={process.pid})


@contextmanager
def started(config: ServeConfig, *, environ: Mapping[str, str] | None = None) -> Iterator[Service]:
    """A ready service for the length of the block."""
    log = Path(config.socket).with_suffix(".log")
    service = start(config, log, environ)
    try:
        service.await_ready()
        yield service
    finally:
        service.stop()
