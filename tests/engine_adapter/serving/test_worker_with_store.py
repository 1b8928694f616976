"""A worker over a real service: its prompts are found again, and its users do not notice what happens to the daemon."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.serving.jsonl import GenerateRequest, Result
from kvstore.client import connect
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.engine_adapter.serving.test_worker import ready
from tests.support.stalls import Stalls

WAIT_S = 60
PROMPT = "It was the best of times, it was the worst of times. " * 20


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if condition():
                return
        except (Unavailable, DeadlineExceeded):
            pass  # the daemon is away
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


@pytest.fixture
def service(folder: Path) -> Iterator[Path]:
    """The socket of a service with DRAM alone."""
    path = folder / "k.sock"
    command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", str(path), "--dram", "64MiB"]
    with (
        (folder / "serve.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as keeper,
    ):
        try:
            with connect(path, timeout_s=30.0) as client:
                until(lambda: client.stats().ready)
            yield path
        finally:
            keeper.terminate()
            keeper.wait(WAIT_S)


@pytest.fixture
def worker(model_folder: Path, folder: Path, service: Path) -> Iterator[Path]:
    """The socket of a deterministic worker over the service."""
    path = folder / "w.sock"
    command = [
        sys.executable,
        "-m",
        "kvstore.cli.main",
        "worker",
        "--json",
        "--deterministic",
        "--threads",
        "1",
    ]
    command += [
        "--model",
        str(model_folder),
        "--listen",
        str(path),
        "--socket",
        str(service),
        "--hbm",
        "32MiB",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            ready(process)
            yield path
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)


def request(max_tokens: int, prompt: str = PROMPT) -> GenerateRequest:
    return GenerateRequest(id="a", prompt=prompt, max_tokens=max_tokens, ignore_eos=True, stream=True)


def ask(worker: Path, max_tokens: int, prompt: str = PROMPT) -> Result:
    with WorkerConnection(worker, timeout_s=WAIT_S) as connection:
        last = list(connection.ask(request(max_tokens, prompt)))[-1]
    assert isinstance(last, Result)
    return last


def test_a_daemon_that_dies_while_an_answer_is_given_is_not_noticed(service: Path, worker: Path) -> None:
    """A daemon's death in the middle of an answer ended the answer, or the engine with it."""
    cold = ask(worker, 300)
    with connect(service, timeout_s=30.0) as client, WorkerConnection(worker, timeout_s=WAIT_S) as connection:
        before = client.describe()
        events = connection.ask(request(300))
        assert isinstance(next(events), str)
        os.kill(before.pid, signal.SIGKILL)
        result = list(events)[-1]
        assert isinstance(result, Result)
        assert result.token_ids == cold.token_ids
        until(lambda: client.describe().boot_epoch != before.boot_epoch and client.stats().ready)
        until(lambda: ask(worker, 1).cached_tokens == (len(PROMPT) - 1) // 32 * 32)
        assert list(client.call("CheckIntegrity", pb.CheckIntegrityRequest(), service="admin").faults) == []
    assert ask(worker, 300).token_ids == cold.token_ids


def test_a_stopped_daemon_stalls_no_answer(service: Path, worker: Path) -> None:
    """A decode step waited for a daemon that did not answer."""
    ask(worker, 1)
    with connect(service, timeout_s=30.0) as client, WorkerConnection(worker, timeout_s=WAIT_S) as connection:
        pid = client.describe().pid
        events = connection.ask(request(400))
        assert isinstance(next(events), str)
        os.kill(pid, signal.SIGSTOP)
        try:
            arrivals = []
            with Stalls() as stalls:
                for event in events:
                    arrivals.append(time.monotonic())
                    if isinstance(event, Result):
                        assert len(event.token_ids) == 400
        finally:
            os.kill(pid, signal.SIGCONT)
    assert len(arrivals) == 400
    slowest = max(
        later - earlier - stalls.within(earlier, later) for earlier, later in itertools.pairwise(arrivals)
    )
    assert slowest < 0.9, f"a step took {slowest:.2f} s: less than any time-out, so nothing was waited for"
    assert ask(worker, 1, prompt="something else").prompt_tokens == len("something else")
