"""A service under the load of torch-free workers, and the ways to kill each of its processes.

The oracle: every page a worker reads is byte for byte the block of its hash (it says `wrong` otherwise), every worker
goes on after every kill, no path ever takes more on its disk than its size, and once all have ended the store is sound
and nobody holds or fills a slot.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.client.rpc import Rpc
from kvstore.config import ServeConfig
from kvstore.daemon.handover import config_to_toml
from kvstore.faults import FAULT_VARIABLE
from tests.support.daemon import Service, wait_for
from tiers.nvme.capacity import disk_usage

__all__ = ["HANG_S", "Load", "WorkerSpec", "planned_service", "progress", "told_where", "within_capacity"]

HANG_S = 90.0
"""Whoever makes no progress for this long hangs. Generous: the machine is small and shared."""


def progress(text: str) -> None:
    """One line for whoever waits for many kills; at once, into a pipe too."""
    print(text, flush=True)


@contextmanager
def told_where(where: str) -> Iterator[None]:
    """A failure inside says where it was: which seed, which kill, at which fault point."""
    try:
        yield
    except BaseException as error:
        error.add_note(where)
        progress(f"failed: {where}")
        raise


def within_capacity(config: ServeConfig) -> None:
    """Raises where an NVMe path takes more on its disk than it may, by a byte: at any time, whatever has died."""
    for path in config.nvme:
        used = disk_usage(Path(path.path)).total_bytes
        assert used <= path.capacity_bytes, f"{path.path} takes {used} of {path.capacity_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one worker runs with; `fault` is its $KVSTORE_FAULT."""

    device: int = 0
    slot_kib: int = 16
    family: int = 1
    fault: str = ""


class Load:
    """One worker process and what it has said."""

    _numbers = iter(range(1, 1 << 30))

    def __init__(self, socket: str, spec: WorkerSpec, seed: int) -> None:
        self.spec = spec
        self.name = f"load-{next(self._numbers)}"
        self.wrong: list[str] = []
        self.requests = 0
        self.hit_blocks = 0
        self.by_tier: dict[str, int] = {}
        self.last: dict[str, object] = {}
        command = [sys.executable, "-m", "tests.support.worker", "--socket", socket, "--name", self.name]
        command += ["--seed", str(seed), "--family", str(spec.family), "--device", str(spec.device)]
        command += ["--slot-kib", str(spec.slot_kib), "--hbm-bytes", str(256 * 16 * 1024)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        environ.pop(FAULT_VARIABLE, None)
        if spec.fault:
            environ[FAULT_VARIABLE] = spec.fault
        self._errors = Path(socket).with_name(f"{self.name}.err")
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # cut off by SIGKILL
                continue
            self.last = said
            if said["event"] == "wrong":
                self.wrong.append(line)
            self.requests = said.get("requests", self.requests)
            self.hit_blocks = said.get("hit_blocks", self.hit_blocks)
            self.by_tier = said.get("by_tier", self.by_tier)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def await_progress(self, requests: int = 3) -> None:
        """Returns when it has begun so many more requests, or has died of its own fault."""
        goal = self.requests + requests
        self._wait(f"{self.name} makes progress", lambda: self.requests >= goal or not self.running)
        self.check()

    def check(self) -> None:
        """Raises for a wrong byte, or an end that nobody asked for."""
        assert not self.wrong, self.wrong[:3]
        code = self.process.poll()
        assert code in (None, -signal.SIGKILL), f"{self.name} ended with {code}: {self.errors()}"

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(HANG_S)

    def stop(self) -> None:
        """SIGTERM; raises unless it ends in order and saw nothing wrong."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        assert not self.wrong, self.wrong[:3]
        assert code in (0, -signal.SIGKILL), f"{self.name} ended with {code}: {self.errors()}"

    def end(self) -> None:
        """Whatever happened: no process is left."""
        if self.running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return self._errors.read_text(errors="replace")[-2000:]

    def _wait(self, what: str, get: Callable[[], bool]) -> None:
        try:
            wait_for(what, get, HANG_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it said last {self.last}; {self.errors()}") from None


@contextmanager
def planned_service(config: ServeConfig, faults: Sequence[str]) -> Iterator[Service]:
    """A ready service whose daemon's lives have these faults, one each."""
    folder = Path(config.socket).parent
    plan, log = folder / "plan", folder / "kv.log"
    plan.write_text("".join(f"{fault}\n" for fault in faults))
    command = [
        sys.executable,
        "-m",
        "kvstore.keeper",
        "--",
        sys.executable,
        "-m",
        "tests.support.faulty_daemon",
    ]
    command += [str(plan), "--config", config_to_toml(config)]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    service = Service(config=config, process=process, log=log, rpc=Rpc(config.socket), pids={process.pid})
    try:
        wait_for("a ready daemon", lambda: service.stats().ready, HANG_S)
        service.describe()
        yield service
    finally:
        service.stop()
