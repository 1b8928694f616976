"""The demo's steps: a real store and a real worker, killed in every way, asked the same question each time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.cli.processes import Child, Household
from engine_adapter.serving.jsonl import GenerateRequest, Message, Result
from kvstore.client import Client, connect
from kvstore.errors import ConfigError, DeadlineExceeded, KvstoreError, Unavailable
from kvstore.units import format_size, write_size
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Demo", "DemoOptions", "Row", "check_space"]

_POLL_S = 0.01
_CALL_TIMEOUT_S = 2.0
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo runs, and where: sockets and logs in `folder`, the disk tier in `slabs`, both its own."""

    folder: Path
    slabs: Path
    model: str
    prompt: str
    raw: bool
    max_tokens: int
    dram_bytes: int
    nvme_bytes: int
    hbm_bytes: int
    min_slot_bytes: int
    block_tokens: int
    threads: int
    start_timeout_s: float = 120.0
    answer_timeout_s: float = 600.0
    settle_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Times in seconds; `kill_to_first_token_s` None where nothing was killed."""

    step: str
    ttft_s: float
    kill_to_first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    speedup: float
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """An answer and when its first token arrived, on the monotonic clock."""

    result: Result
    first_token_at: float

    @property
    def ttft_s(self) -> float:
        assert self.result.ttft_s is not None
        return self.result.ttft_s


@dataclass(slots=True, kw_only=True)
class Demo:
    """Runs the steps in order; `tell` hears what is going on, `show` gets each row as it is measured."""

    options: DemoOptions
    household: Household
    tell: Callable[[str], None]
    show: Callable[[Row], None]
    answer: str = ""
    rows: list[Row] = field(default_factory=list)
    _cold: _Asked | None = None
    _service: Child | None = None
    _worker: Child | None = None

    def run(self) -> float:
        """All rows; returns the cold time to first token at the default chunk size, in seconds."""
        _write_config(self.options)
        self._start_service()
        self._start_worker()
        self._ask_row("cold", None)
        self._ask_row("hbm", None)
        self._wait_written_through()
        self._after_worker_kill()
        self._after_daemon_kill()
        self._after_everything_killed()
        return self._cold_with_default_chunks()

    def _after_worker_kill(self) -> None:
        self.tell("worker: kill -9")
        killed_at = time.monotonic()
        self._kill_worker()
        self._start_worker()
        self._ask_row("worker", killed_at)

    def _after_daemon_kill(self) -> None:
        self.tell("daemon: kill -9 of the daemon and of the worker")
        with self._client() as client:
            before = client.describe()
            killed_at = time.monotonic()
            self.household.kill([before.pid])
            self._kill_worker()
            self._wait(
                "the keeper starts the daemon again",
                lambda: client.describe().boot_epoch != before.boot_epoch,
            )
            self._wait_ready(client)
            self._release_hbm(client)
        self._start_worker()
        self._ask_row("daemon", killed_at)

    def _after_everything_killed(self) -> None:
        self.tell("disk: flush")
        with self._client() as client:
            reply = client.flush(self.options.settle_timeout_s)
            if reply.pending_blocks:
                raise DeadlineExceeded(f"{reply.pending_blocks} blocks did not reach the disk in time")
        self.tell("disk: kill -9 of the worker, the keeper, the daemon and its movers")
        killed_at = time.monotonic()
        self.household.kill_everything()
        self._start_service()
        self._start_worker()
        self._ask_row("disk", killed_at)

    def _cold_with_default_chunks(self) -> float:
        self.tell("cold (default chunks): a worker without a cache")
        assert self._worker is not None
        self.household.terminate(self._worker, 10.0)
        self._start_worker("--no-cache")
        return self._ask("cold (default chunks)", max_tokens=1).ttft_s

    def _ask_row(self, step: str, killed_at: float | None) -> None:
        asked = self._ask(step, max_tokens=self.options.max_tokens)
        cold = self._cold = self._cold or asked
        result = asked.result
        row = Row(
            step=step,
            ttft_s=asked.ttft_s,
            kill_to_first_token_s=None if killed_at is None else asked.first_token_at - killed_at,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            cached_by_tier=dict(result.cached_by_tier),
            speedup=cold.ttft_s / asked.ttft_s,
            identical=result.token_ids == cold.result.token_ids and result.text == cold.result.text,
        )
        self.answer = cold.result.text
        self.rows.append(row)
        self.show(row)

    def _ask(self, step: str, *, max_tokens: int) -> _Asked:
        """Puts the question to the worker, streaming."""
        self.tell(f"{step}: asking")
        options = self.options
        request = GenerateRequest(
            id=step,
            prompt=options.prompt if options.raw else None,
            messages=None if options.raw else (Message(role="user", content=options.prompt),),
            max_tokens=max_tokens,
            stream=True,
        )
        first_token_at = None
        text = ""
        with WorkerConnection(
            options.folder / "worker.sock", timeout_s=options.answer_timeout_s
        ) as connection:
            for event in connection.ask(request):
                first_token_at = first_token_at or time.monotonic()
                if isinstance(event, Result):
                    return _Asked(result=event, first_token_at=first_token_at)
                text += event
                self.tell(f"{step}: {text}")
        raise Unavailable("the worker ended its answer without a result")

    def _start_service(self) -> None:
        self.tell("starting the store")
        command = [sys.executable, "-m", "kvstore.cli.main", "serve"]
        self._service = self.household.start("the store", command, self._environ(), self._log("serve"))
        with self._client() as client:
            self._wait_ready(client)

    def _wait_ready(self, client: Client) -> None:
        self._wait("the store is ready", lambda: client.stats().ready)

    def _start_worker(self, *flags: str) -> None:
        """Starts a worker and waits until it takes requests; deterministic unless `flags` are given."""
        self.tell("starting a worker: torch, weights")
        command = [
            sys.executable,
            "-m",
            "kvstore.cli.main",
            "worker",
            "--json",
            *(flags or ("--deterministic",)),
        ]
        worker = self._worker = self.household.start(
            "the worker", command, self._environ(), self._log("worker")
        )
        line = worker.read_line(self.options.start_timeout_s)
        if json.loads(line).get("event") != "ready":
            raise Unavailable(f"the worker said {line!r} instead of that it is ready; {worker.tail()}")

    def _kill_worker(self) -> None:
        assert self._worker is not None
        self.household.kill([self._worker.pid])

    def _release_hbm(self, client: Client) -> None:
        """All HBM that outlived the worker is dropped."""

        def released() -> bool:
            reply = client.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
            return not reply.kept_bytes

        self.tell("daemon: releasing the HBM")
        self._wait("the HBM is released", released)

    def _wait_written_through(self) -> None:
        """Every full block of the prompt is in DRAM."""
        assert self._cold is not None
        blocks = self._cold.result.prompt_tokens // self.options.block_tokens

        def written() -> bool:
            return all(tier.sealed_slots >= blocks for tier in client.stats().tiers if tier.tier == "dram")

        self.tell("waiting until every block is in DRAM too")
        with self._client() as client:
            self._wait(f"{blocks} blocks are in DRAM", written)

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        """Asks until it is so. A daemon that is away is asked again; a service that ended is an error."""
        deadline = time.monotonic() + self.options.settle_timeout_s
        while True:
            try:
                if done():
                    return
                problem = ""
            except (Unavailable, DeadlineExceeded) as error:
                problem = f": {error}"
            assert self._service is not None
            if not self._service.alive():
                raise Unavailable(f"the store ended; {self._service.tail()}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waited in vain until {what}{problem}; {self._service.tail()}")
            time.sleep(_POLL_S)

    def _client(self) -> Client:
        return connect(self.options.folder / "kvstore.sock", timeout_s=_CALL_TIMEOUT_S)

    def _environ(self) -> dict[str, str]:
        """Ours without any setting of the store, and the demo's own file."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        return kept | {"KVSTORE_CONFIG": str(self.options.folder / "demo.toml")}

    def _log(self, name: str) -> Path:
        return self.options.folder / f"{name}.log"


def check_space(folder: Path, options_bytes: int) -> None:
    """Raises ConfigError where the folder's disk has no room for the slabs."""
    free = shutil.disk_usage(folder).free
    if free < options_bytes + _SPARE_BYTES:
        raise ConfigError(
            f"{folder} has {format_size(free)} free and the demo's disk tier wants {format_size(options_bytes)}: "
            "give a smaller --nvme, or another --dir"
        )


def _write_config(options: DemoOptions) -> None:
    """One file for the store and its workers."""
    lines = [
        f"socket = {json.dumps(str(options.folder / 'kvstore.sock'))}",
        f'dram = "{write_size(options.dram_bytes)}"',
        f"nvme = [{json.dumps(f'{options.slabs}:{write_size(options.nvme_bytes)}')}]",
        f'hbm = "{write_size(options.hbm_bytes)}"',
        f'min_slot = "{write_size(options.min_slot_bytes)}"',
        'orphan_ttl = "15m"',
        "[worker]",
        f"model = {json.dumps(options.model)}",
        f"socket = {json.dumps(str(options.folder / 'worker.sock'))}",
        f'hbm = "{write_size(options.hbm_bytes)}"',
        f"block_tokens = {options.block_tokens}",
        f"threads = {options.threads}",
    ]
    try:
        (options.folder / "demo.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise KvstoreError(f"cannot write to {options.folder}: {error.strerror}") from error
