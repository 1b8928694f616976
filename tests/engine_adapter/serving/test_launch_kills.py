"""A worker dies between the launch of a step and its end: what that step computed is nobody's hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.serving.jsonl import GenerateRequest, Result
from kvstore.client import connect
from kvstore.errors import KvstoreError, Unavailable
from tests.engine_adapter.serving.test_worker import ready

WAIT_S = 90
CHUNK = 256
PROMPT = [(7 * index + index // 50) % 500 for index in range(1100)]
WARM_UP_STEPS = 2


@contextmanager
def service(folder: Path, *flags: str) -> Iterator[Path]:
    """The socket of a service with little DRAM."""
    path = folder / "k.sock"
    command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", str(path), "--dram", "64MiB"]
    with (folder / "serve.log").open("wb") as log:
        keeper = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + WAIT_S
        while not is_ready(path):
            assert time.monotonic() < deadline, (folder / "serve.log").read_text()
            time.sleep(0.05)
        yield path
    finally:
        keeper.terminate()
        keeper.wait(WAIT_S)


def is_ready(path: Path) -> bool:
    try:
        with connect(path, timeout_s=30.0) as client:
            return client.stats().ready
    except KvstoreError:
        return False


@contextmanager
def worker(folder: Path, store: Path, device: str, fault: str = "") -> Iterator[Path]:
    """The socket of a worker with random weights. Steps are of `CHUNK` tokens."""
    path = folder / "w.sock"
    command = [sys.executable, "-m", "kvstore.cli.main", "worker", "--json", "--threads", "1"]
    command += ["--load-format", "dummy", "--model", "llama-tiny", "--device", device, "--hbm", "64MiB"]
    command += ["--chunk-tokens", str(CHUNK), "--max-requests", "8"]
    command += ["--listen", str(path), "--socket", str(store)]
    environ = os.environ | ({"KVSTORE_FAULT": fault} if fault else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    try:
        ready(process)
        yield path
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WAIT_S)


def ask(path: Path, max_tokens: int = 8) -> Result:
    request = GenerateRequest(id="a", token_ids=PROMPT, max_tokens=max_tokens, ignore_eos=True)
    with WorkerConnection(path, timeout_s=WAIT_S) as connection:
        last = list(connection.ask(request))[-1]
    assert isinstance(last, Result)
    return last


@contextmanager
def short_folder() -> Iterator[Path]:
    """Its name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


def die_after_a_launch(device: str, launch: int) -> Result:
    """What the next worker finds after one died when it had launched its `launch`th step of `PROMPT`."""
    with short_folder() as folder, service(folder) as store:
        with (
            worker(folder, store, device, f"step.launched:kill:{WARM_UP_STEPS + launch}") as path,
            pytest.raises(Unavailable),
        ):
            ask(path)
        with worker(folder, store, device) as path:
            found = ask(path)
            assert ask(path).cached_tokens == (len(PROMPT) - 1) // 32 * 32
    return found


def test_what_a_launched_step_wrote_is_sealed_only_when_it_has_ended() -> None:
    step = CHUNK + 8
    found = die_after_a_launch("cpu", launch=3)
    # Of the two steps that had ended: the first at once, the second with what ends within a tenth of a second.
    assert found.cached_by_tier in ({"hbm": steps * step // 32 * 32} for steps in (1, 2))
