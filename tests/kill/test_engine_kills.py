"""Kills worker, daemon, mover and keeper under a stream of requests to the bundled engine.

The oracle: every answer is, token for token, the one that the same engine gave without a store. Only the death of the
worker itself is ever seen by a client; whatever else dies costs it a miss at most.

$KVSTORE_TEST_ENGINE_KILLS sets how many (default 20), $KVSTORE_TEST_SEED which ones.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.serving.jsonl import GenerateRequest, Result
from kvstore.errors import KvstoreError, Unavailable
from kvstore.units import MIB
from tests.engine_adapter.engine import tiny
from tests.kill.harness import HANG_S, progress, told_where, within_capacity
from tests.support.daemon import Service, small_config, started, wait_for

KILLS = int(os.environ.get("KVSTORE_TEST_ENGINE_KILLS", "20"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
KINDS = ("worker", "daemon", "mover", "keeper")
CLIENTS = 3
BLOCK_TOKENS = 16
BLOCK_BYTES = 8192  # 2 layers, K and V, 2 heads of 16 floats
HBM_BLOCKS = 128  # three running requests fit
DRAM_BYTES = 256 * BLOCK_BYTES  # less than all prompts have, so that blocks come back from disk
GROUPS, PROMPTS_A_GROUP = 8, 6
PREFIX_TOKENS, MAX_TAIL_TOKENS = 24 * BLOCK_TOKENS, 6 * BLOCK_TOKENS

pytestmark = [pytest.mark.kill, pytest.mark.timeout(600)]

Tokens = tuple[int, ...]


def _requests(rng: random.Random) -> list[GenerateRequest]:
    """Groups that share a prefix; tails of any length, whole blocks among them; half of them sampled."""
    requests: list[GenerateRequest] = []
    for _ in range(GROUPS):
        prefix = rng.choices(range(256), k=PREFIX_TOKENS)
        lengths = [BLOCK_TOKENS, MAX_TAIL_TOKENS]
        lengths += [rng.randrange(1, MAX_TAIL_TOKENS) for _ in range(PROMPTS_A_GROUP - len(lengths))]
        for length in lengths:
            number = len(requests)
            requests.append(
                GenerateRequest(
                    id=str(number),
                    token_ids=(*prefix, *rng.choices(range(256), k=length)),
                    max_tokens=12,
                    temperature=0.8 * (number % 2),
                    seed=number,
                    ignore_eos=True,
                    stream=True,  # so that a client's time-out bounds each token
                )
            )
    return requests


@dataclass(slots=True, eq=False)
class Worker:
    """One `kvstore worker` process, ready; `killed` is set before its SIGKILL."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path
    killed: bool = False

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        self.process.kill()
        self.process.wait(HANG_S)

    def stop(self) -> None:
        """SIGTERM; raises unless it ends in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(HANG_S) == 0, self.tail()

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-2000:]


def _start_worker(model: Path, folder: Path, name: str, *flags: str) -> Worker:
    """A worker that is ready. Each listens on the same socket: a new one takes the place of one that was killed."""
    log, listen = folder / f"{name}.log", folder / "w.sock"
    command = [sys.executable, "-m", "kvstore.cli.main", "worker", "--json", "--deterministic", *flags]
    command += ["--model", str(model), "--listen", str(listen), "--threads", "1"]
    command += ["--hbm", f"{HBM_BLOCKS * BLOCK_BYTES // 1024}KiB", "--block-tokens", str(BLOCK_TOKENS)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    worker = Worker(process=process, socket=listen, log=log)
    try:
        wait_for(
            f"{name} to be ready", lambda: '"ready"' in worker.tail() or process.poll() is not None, HANG_S
        )
        assert process.poll() is None, worker.tail()
    except BaseException:
        worker.kill()
        raise
    return worker


class Client:
    """Asks one request after the other, and asks again what died with a worker that was killed."""

    def __init__(
        self,
        number: int,
        worker: Callable[[], Worker],
        requests: Sequence[GenerateRequest],
        expected: Sequence[Tokens],
    ) -> None:
        """`worker` waits for the one that is alive and ready."""
        self.answers = 0
        self.asked_again = 0
        self.slowest_s = 0.0
        self.cached = Counter[str]()
        self.problem = ""
        self.in_flight = False
        self._worker = worker
        self._requests = requests
        self._expected = expected
        self._rng = random.Random(f"{SEED}/{number}")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Its last answer is complete."""
        self._stopping.set()
        self._thread.join(2 * HANG_S)
        assert not self._thread.is_alive(), "a client hangs"

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._serve_one(self._rng.randrange(len(self._requests)))
        except Exception as error:  # noqa: BLE001 - the thread's boundary: the test's own thread reports it
            self.problem = f"{type(error).__name__}: {error}"

    def _serve_one(self, number: int) -> None:
        began = time.monotonic()
        result = None
        while result is None:
            worker = self._worker()
            try:
                self.in_flight = True
                result = _ask(worker, self._requests[number])
            except Unavailable:
                if not worker.killed:
                    raise
                self.asked_again += 1
            finally:
                self.in_flight = False
        expected = self._expected[number]
        assert result.token_ids == expected, f"request {number}: {result}, expected {expected}"
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.cached.update(result.cached_by_tier)
        self.answers += 1


def _ask(worker: Worker, request: GenerateRequest) -> Result:
    with WorkerConnection(worker.socket, timeout_s=HANG_S) as connection:
        *_, last = connection.ask(request)
    assert isinstance(last, Result)
    return last


class Stage:
    """A service, its worker and their clients, and the kills that they survive."""

    def __init__(
        self, service: Service, model: Path, requests: Sequence[GenerateRequest], expected: Sequence[Tokens]
    ) -> None:
        self._service = service
        self._model = model
        self._rng = random.Random(SEED)
        self._workers = 0
        self.worker = self._start_worker()
        self.clients = [Client(n, self._ready_worker, requests, expected) for n in range(CLIENTS)]

    def _start_worker(self) -> Worker:
        self._workers += 1
        folder = Path(self._service.socket).parent
        name = f"worker-{self._workers}"
        return _start_worker(self._model, folder, name, "--socket", self._service.socket)

    def _ready_worker(self) -> Worker:
        wait_for("a worker that is ready", lambda: not self.worker.killed, HANG_S)
        return self.worker

    def kill(self, kind: str) -> None:
        """SIGKILL in the middle of a request; returns when all goes on, or raises."""
        time.sleep(0.5 * self._rng.random())
        wait_for(
            f"a request in flight; {self.problems()}",
            lambda: any(client.in_flight for client in self.clients),
            HANG_S,
        )
        {
            "worker": self._kill_worker,
            "daemon": self._kill_daemon,
            "mover": self._kill_mover,
            "keeper": self._kill_keeper,
        }[kind]()
        self.await_answers(2)
        within_capacity(self._service.config)
        with contextlib.suppress(KvstoreError):  # away: it is checked at the end
            assert self._service.faults() == []

    def await_answers(self, count: int) -> None:
        """Each client gets so many more answers."""
        goals = [client.answers + count for client in self.clients]
        wait_for(
            "an answer for each client",
            lambda: (
                self.problems()
                or all(client.answers >= goal for client, goal in zip(self.clients, goals, strict=True))
            ),
            2 * HANG_S,
        )
        assert not self.problems(), f"{self.problems()}; {self.worker.tail()}; {self._service.tail()}"
        assert self.worker.process.poll() is None, self.worker.tail()

    def problems(self) -> list[str]:
        """What clients have seen that they must not."""
        return [client.problem for client in self.clients if client.problem]

    def _kill_worker(self) -> None:
        self.worker.kill()
        self.worker = self._start_worker()

    def _kill_daemon(self) -> None:
        self._service.kill_daemon()
        wait_for("a ready daemon", lambda: self._service.stats().ready, HANG_S)

    def _kill_mover(self) -> None:
        pids = wait_for("a mover", self._service.mover_pids, HANG_S)
        os.kill(pids[0], signal.SIGKILL)
        wait_for("another mover", lambda: set(self._service.mover_pids()) - set(pids), HANG_S)

    def _kill_keeper(self) -> None:
        before = self._service.keeper_pid
        os.kill(before, signal.SIGKILL)
        wait_for("another keeper", lambda: self._service.keeper_pid not in (0, before), HANG_S)
        time.sleep(0.5)  # it has every descriptor again

    def end(self) -> None:
        """All end in order; then nobody holds or fills anything."""
        for client in self.clients:
            client.stop()
        assert not self.problems(), self.problems()
        self.worker.stop()
        wait_for("the end of the session", lambda: not self._service.stats().sessions, HANG_S)
        wait_for("the end of all moves", lambda: not self._busy_slots(), HANG_S)
        assert self._service.faults() == []
        assert self._busy_slots() == 0

    def _busy_slots(self) -> int:
        return sum(tier.filling_slots + tier.held_slots for tier in self._service.stats().tiers)


@contextmanager
def _stage(
    service: Service, model: Path, requests: Sequence[GenerateRequest], expected: Sequence[Tokens]
) -> Iterator[Stage]:
    stage = Stage(service, model, requests, expected)
    try:
        yield stage
    finally:
        stage.worker.kill()


def _reference(model: Path, folder: Path, requests: Sequence[GenerateRequest]) -> list[Tokens]:
    """What the engine answers without a store."""
    worker = _start_worker(model, folder, "reference", "--no-cache")
    try:
        results = [_ask(worker, request) for request in requests]
        worker.stop()
    finally:
        worker.kill()
    assert not any(result.cached_tokens for result in results)
    return [result.token_ids for result in results]


def test_the_engine_answers_the_same_whoever_dies(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    model = tiny.save_folder(tmp_path / "model")
    requests = _requests(rng)
    expected = _reference(model, tmp_path, requests)
    # Else the wrong blocks could give the right answer; a few greedy answers repeat one token in any case.
    assert len(set(expected)) >= 0.9 * len(expected)
    kinds = [kind for _ in range(-(-KILLS // len(KINDS))) for kind in rng.sample(KINDS, len(KINDS))][:KILLS]
    config = small_config(
        tmp_path,
        dram_bytes=DRAM_BYTES,
        dram_extent_bytes=MIB,
        nvme_bytes=64 * MIB,
        nvme_extent_bytes=4 * MIB,
        hbm_bytes=4 * MIB,
    )
    with started(config) as service, _stage(service, model, requests, expected) as stage:
        stage.await_answers(2 * len(requests) // CLIENTS)  # most blocks are everywhere now
        progress(f"\n{len(kinds)} kills under the engine, seed {SEED}")
        for at, kind in enumerate(kinds):
            began = time.monotonic()
            step = f"{at + 1} of {len(kinds)}, seed {SEED}: {kind}"
            with told_where(step):
                stage.kill(kind)
            progress(f"{step}, {time.monotonic() - began:.1f} s")
        stage.await_answers(len(requests) // CLIENTS)
        stage.end()
    cached = sum((client.cached for client in stage.clients), Counter[str]())
    again = sum(client.asked_again for client in stage.clients)
    progress(
        f"{sum(client.answers for client in stage.clients)} answers, {again} asked again, cached tokens "
        f"{dict(cached)}, slowest {max(client.slowest_s for client in stage.clients):.1f} s"
    )
    assert set(cached) == {"hbm", "dram", "nvme"}
    assert again > 0 or "worker" not in kinds
