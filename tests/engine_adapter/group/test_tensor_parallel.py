"""A model shared among two processes over the store, on the CPU: what survives them, and who is hit by what."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_adapter.cli.assembly import EngineOptions, open_engine
from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.engine.engine import Engine
from engine_adapter.engine.runner import LaunchedStep
from engine_adapter.engine.sampler import SamplingParams
from engine_adapter.serving.jsonl import GenerateRequest, Result
from kvstore.cli.settings import load_settings
from kvstore.client import connect
from kvstore.errors import InvalidArgument, KvstoreError, Unavailable
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.engine_adapter.engine.tiny import save_folder
from tests.engine_adapter.serving.test_launch_kills import is_ready, service
from tests.support.daemon import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 90.0


def prompt_of(number: int) -> list[int]:
    """A prompt that shares no block with another's."""
    return [(number + 7 * index + index // 50) % 500 for index in range(700)]


PROMPT = prompt_of(0)
CACHED = (len(PROMPT) - 1) // 32 * 32


def options(store: Path | None, devices: int, **flags: str) -> EngineOptions:
    given = {"load_format": "dummy", "model": "llama-tiny", "hbm": "16MiB", "threads": "1", "device": "cpu"}
    given |= {"tensor_parallel": str(devices), **flags}
    config = load_settings({f"worker.{name}": value for name, value in given.items()}).config
    return EngineOptions(worker=config.worker, store=store, deterministic=False, timeout_s=30.0)


@contextmanager
def engine(store: Path | None, devices: int) -> Iterator[Engine]:
    with open_engine(options(store, devices), lambda _: None) as opened:
        yield opened


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


class Worker:
    """A worker process of two devices, and its member."""

    def __init__(self, folder: Path, store: Path, device: str, model: str, hbm: str) -> None:
        self.path = folder / "w.sock"
        command = [sys.executable, "-m", "kvstore.cli.main", "worker", "--json", "--threads", "1"]
        command += ["--load-format", "dummy", "--model", model, "--device", device, "--hbm", hbm]
        command += ["--tp", "2", "--listen", str(self.path), "--socket", str(store)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the worker ended: {self.process.communicate()[1]}")
        assert json.loads(line)["event"] == "ready"
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.members = [int(pid) for pid in children.split()]

    def ask(self, prompt: Sequence[int] = PROMPT) -> Result:
        request = GenerateRequest(id="a", token_ids=tuple(prompt), max_tokens=8, ignore_eos=True)
        with WorkerConnection(self.path, timeout_s=WAIT_S) as connection:
            last = list(connection.ask(request))[-1]
        assert isinstance(last, Result)
        return last

    def kill_member_in_an_answer(self) -> None:
        request = GenerateRequest(id="a", token_ids=PROMPT, max_tokens=3000, ignore_eos=True, stream=True)
        with WorkerConnection(self.path, timeout_s=WAIT_S) as connection:
            for count, _ in enumerate(connection.ask(request)):
                if count == 5:
                    os.kill(self.members[0], signal.SIGKILL)

    def forget_what_was_said(self) -> None:
        """It was about what was done to it before."""
        assert self.process.stderr is not None
        fd = self.process.stderr.fileno()
        while select.select([fd], [], [], 0)[0]:
            os.read(fd, 65_536)

    def kill(self, *pids: int) -> str:
        """SIGKILL for these, or for all; what the worker said since."""
        for pid in pids or (self.process.pid, *self.members):
            os.kill(pid, signal.SIGKILL)
        said: str = self.process.communicate(timeout=WAIT_S)[1]
        deadline = time.monotonic() + WAIT_S
        while any(alive(pid) for pid in self.members):
            assert time.monotonic() < deadline, "a member outlived its worker"
            time.sleep(0.01)
        return said


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def worker(
    folder: Path, store: Path, device: str = "cpu", model: str = "llama-tiny", hbm: str = "16MiB"
) -> Iterator[Worker]:
    running = Worker(folder, store, device, model, hbm)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


class Group:
    """A service, and on it one worker after the other: a test may kill the one that it gets."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.store = store
        self._folder = folder
        self._numbers = itertools.count(1)
        self._running: Worker | None = None

    def prompt(self) -> list[int]:
        """One that nobody has asked yet."""
        return prompt_of(next(self._numbers))

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """The one that runs, or another if it has ended; it may go on for the next test."""
        if self._running is None or self._running.process.poll() is not None:
            self._running = Worker(self._folder, self.store, "cpu", "llama-tiny", "16MiB")
        else:
            self._running.forget_what_was_said()
        yield self._running

    def close(self) -> None:
        if self._running is not None and self._running.process.poll() is None:
            self._running.kill()


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as path, service(Path(path)) as store:
        made = Group(Path(path), store)
        try:
            yield made
        finally:
            made.close()


def until_saved(store: Path, stepped: Engine | None = None) -> None:
    """Every sealed block has its copy in DRAM. `stepped`: an engine of this process, which reports its copies so."""
    deadline = time.monotonic() + WAIT_S
    with connect(store) as client:
        while True:
            if stepped is not None:
                stepped.step()
            tiers = {tier.tier: tier for tier in client.stats().tiers}
            if tiers["dram"].sealed_slots >= tiers["hbm"].sealed_slots > 0:
                return
            assert time.monotonic() < deadline
            time.sleep(0.02)


def release(store: Path) -> int:
    """HBM that nobody maps goes; how many bytes."""
    deadline = time.monotonic() + WAIT_S
    with connect(store) as client:
        while client.stats().sessions:  # a killed worker is a session until its end is certain
            assert time.monotonic() < deadline
            time.sleep(0.02)
        reply = client.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        assert reply.kept_bytes == 0
        released: int = reply.released_bytes
        return released


class Recorder:
    """A runner that keeps the logits of each step."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine._runner
        self.steps: list[LaunchedStep] = []
        self.logits: list[Tensor] = []
        engine._runner = self

    def prepare(self) -> None:
        self._inner.prepare()

    def launch(self, chunks, tables):  # type: ignore[no-untyped-def]
        step = self._inner.launch(chunks, tables)
        step.wait()
        self.logits.append(step.logits().clone())
        return step


def logits_of(store: Path | None, devices: int) -> tuple[list[Tensor], tuple[int, ...], int]:
    """Logits and tokens of an answer, and how much of its prompt was cached."""
    with engine(store, devices) as opened:
        recorder = Recorder(opened)
        (completion,) = opened.generate([PROMPT], SamplingParams(max_new_tokens=8, ignore_eos=True))
        if store is not None:
            until_saved(store, opened)
    found = [step for step in recorder.logits if len(step)]
    return found, completion.token_ids, completion.stats.cached_tokens


def test_logits_of_two_devices_are_those_of_one(folder: Path) -> None:
    """And no block of one is a hit for the other: its bytes lie in another order."""
    with service(folder) as store:
        whole, tokens, _ = logits_of(store, 1)
        cold, cold_tokens, cached = logits_of(store, 2)
        assert cached == 0
        warm, warm_tokens, cached = logits_of(store, 2)
        assert cached == CACHED
        assert logits_of(store, 1)[2] == CACHED  # from DRAM: its HBM had to make room
    assert tokens == cold_tokens == warm_tokens
    for one, two, again in zip(whole, cold, warm, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again, one, rtol=1e-4, atol=1e-4)


def shards_outlive_their_processes(
    store: Path, start: Callable[[], AbstractContextManager[Worker]], prompt: Sequence[int] = PROMPT
) -> tuple[Result, Result]:
    """Killed with -9, all of them, and again with the HBM gone: hits in HBM, then in DRAM, the answer the same.

    The first answers, cold and cached.
    """
    with start() as first:
        cold = first.ask(prompt)
        assert cold.cached_tokens == 0
        warm = first.ask(prompt)  # on a GPU rounding differs between a cold prompt and a cached one
        assert warm.cached_by_tier == {"hbm": CACHED}
        until_saved(store)
        first.kill()
    with start() as second:
        after = second.ask(prompt)
        assert after.cached_by_tier == {"hbm": CACHED}
        second.kill()
    assert release(store) > 0
    wait_for("the keeper to let go", lambda: not shards_kept(store))
    with start() as third:
        down = third.ask(prompt)
    assert down.cached_by_tier == {"dram": CACHED}
    assert warm.token_ids == after.token_ids == down.token_ids
    return cold, warm


def test_shards_outlive_their_processes(group: Group) -> None:
    cold, warm = shards_outlive_their_processes(group.store, group.worker, group.prompt())
    assert cold.token_ids == warm.token_ids


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_is_not_what_it_was_is_not_used(group: Group, shard: int) -> None:
    """Each process looks at its own: what the one has is no word on what the other has."""
    prompt = group.prompt()
    with group.worker() as first:
        cold = first.ask(prompt)
        until_saved(group.store)
        first.kill()
    spoil(group.store, shard)
    with group.worker() as second:
        again = second.ask(prompt)
    assert again.cached_by_tier == {"dram": CACHED}
    assert again.token_ids == cold.token_ids


def shards_kept(store: Path) -> list[Path]:
    """Descriptors of a twin's HBM that daemon and keeper have, the daemon's first."""
    with connect(store) as client:
        told = client.describe()
    fds = [fd for pid in (told.pid, told.keeper_pid) for fd in sorted(Path(f"/proc/{pid}/fd").iterdir())]
    return [fd for fd in fds if target(fd).startswith("/memfd:kvstore-hbm")]


def target(fd: Path) -> str:
    """What a descriptor is of; nothing where it was closed meanwhile."""
    try:
        return os.readlink(fd)
    except FileNotFoundError:
        return ""


def spoil(store: Path, shard: int) -> None:
    """Changes a byte of each page of one shard, in memory that nobody maps."""
    kept = shards_kept(store)
    assert len(kept) == 4, "two shards, each in the daemon and in the keeper"
    with kept[shard].open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[100::4096] = bytes(byte ^ 1 for byte in memory[100::4096])


def test_a_killed_member_ends_the_worker_and_nothing_else(group: Group) -> None:
    """With one line that says so; what was sealed is a hit for the next."""
    prompt = group.prompt()
    with group.worker() as first:
        cold = first.ask(prompt)
        assert cold.cached_tokens == 0
        said = first.kill(*first.members)
        assert first.process.returncode == 1
        assert said.count("\n") == 1, said
        assert f"process 1 of the model (pid {first.members[0]}) has ended" in said
    with group.worker() as second:
        warm = second.ask(prompt)
    assert warm.cached_by_tier == {"hbm": CACHED}
    assert warm.token_ids == cold.token_ids
    with connect(group.store) as client:
        faults = client.call("CheckIntegrity", pb.CheckIntegrityRequest(), service="admin").faults
    assert list(faults) == []


def test_a_member_killed_in_a_step_is_one_line_too(group: Group) -> None:
    """What broke was a sum somewhere in the model: nobody wants to read of that."""
    with group.worker() as running:
        with pytest.raises(KvstoreError):
            running.kill_member_in_an_answer()
        said = running.process.communicate(timeout=WAIT_S)[1]
        assert running.process.returncode == 1
        (line,) = (line for line in said.splitlines() if not line.startswith("WARNING "))  # of a busy machine
        assert "has ended: the worker ends with it" in line


def test_a_signal_to_all_processes_is_the_workers(group: Group) -> None:
    """As a terminal and a supervisor send it: members that ended at once took the answers under way with them."""
    prompt = group.prompt()
    with group.worker() as running:
        cold = running.ask(prompt)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(running.members[0], number)
        assert running.ask(prompt).token_ids == cold.token_ids
        for pid in (*running.members, running.process.pid):
            os.kill(pid, signal.SIGTERM)
        said = running.process.communicate(timeout=WAIT_S)[1]
        assert (running.process.returncode, said) == (0, "")
        assert not any(alive(pid) for pid in running.members)


def test_a_killed_daemon_is_noticed_by_no_process_of_a_group(group: Group) -> None:
    """And the members end with their worker."""
    prompt = group.prompt()
    with group.worker() as running:
        cold = running.ask(prompt)
        until_saved(group.store)
        with connect(group.store) as client:
            os.kill(client.describe().pid, signal.SIGKILL)
        until_ready(group.store)
        warm = running.ask(prompt)
        assert warm.token_ids == cold.token_ids
        running.forget_what_was_said()  # that the daemon was away
        assert running.kill(running.process.pid) == ""
    with group.worker() as second:
        after = second.ask(prompt)
    assert after.cached_by_tier == {"hbm": CACHED}
    assert after.token_ids == cold.token_ids


def test_a_group_goes_on_when_the_whole_service_was_killed(folder: Path) -> None:
    """Daemon and keeper: a new session, in which every process maps new memory behind its pages."""
    with service(folder) as store, worker(folder, store) as running:
        cold = running.ask()
        with connect(store) as client:
            told = client.describe()
        for pid in (told.keeper_pid, told.pid):
            os.kill(pid, signal.SIGKILL)
        with service(folder) as again:
            until_ready(again)
            deadline = time.monotonic() + WAIT_S
            while (after := running.ask()).cached_tokens == 0:  # until the new session is there
                assert after.token_ids == cold.token_ids
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert after.cached_by_tier == {"hbm": CACHED}
            assert after.token_ids == cold.token_ids
            assert running.process.poll() is None


def until_ready(store: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_ready(store):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_blocks_that_cannot_be_shared_are_refused(group: Group, folder: Path) -> None:
    """A part of a block is whole pages, so that it can be mapped and copied; and nobody is left behind."""
    model = save_folder(folder / "model")  # 8 tokens of it are a page of 4 KiB
    chosen = options(group.store, 2, load_format="auto", model=str(model), block_tokens="8", max_requests="4")
    before = children()
    with (
        pytest.raises(InvalidArgument, match="take larger blocks"),
        open_engine(chosen, lambda _: None),
    ):
        pass
    assert children() == before


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_a_member_killed_at_its_start_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: before it joins, before it gives its shard, before anybody knows that it has."""
    with service(folder) as store:
        for point in ("member.opened", "member.asked", "member.joined"):
            monkeypatch.setenv("KVSTORE_FAULT", f"{point}:kill")
            with pytest.raises(Unavailable, match="process 1 of the model has "), engine(store, 2):
                pass
        monkeypatch.delenv("KVSTORE_FAULT")
        with engine(store, 2) as again:
            (answer,) = again.generate([PROMPT], SamplingParams(max_new_tokens=2, ignore_eos=True))
        assert answer.stats.cached_tokens == 0
        assert len(shards_kept(store)) == 4


def test_a_daemon_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(KvstoreError, match="no daemon listens"), engine(folder / "none.sock", 2):
        pass
