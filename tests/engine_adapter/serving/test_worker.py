"""A worker as a process: its socket, its answers, its bounds and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.cli.connection import WorkerConnection
from engine_adapter.serving.jsonl import GenerateRequest, Message, Result
from kvstore.errors import InvalidArgument, Unavailable

START_S = 60
ANSWER_S = 30


def start(model: Path, listen: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A worker without a store; the caller reads its ready line."""
    command = [sys.executable, "-m", "kvstore.cli.main", "worker", "--no-cache", "--json"]
    command += ["--model", str(model), "--listen", str(listen), "--threads", "1", "--hbm", "8MiB", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ready(process: subprocess.Popen[bytes]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=START_S)[1].decode()
    record: dict[str, object] = json.loads(line)
    return record


@pytest.fixture(scope="module")
def worker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of one that runs."""
    path = tmp_path_factory.mktemp("worker") / "w.sock"
    process = start(model_folder, path)
    record = ready(process)
    assert record["socket"] == str(path)
    assert record["pid"] == process.pid
    yield path
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 0, errors.decode()
    assert not path.exists()


def answer(path: Path, request: GenerateRequest) -> tuple[list[str], Result]:
    with WorkerConnection(path, timeout_s=ANSWER_S) as connection:
        events = list(connection.ask(request))
    pieces = [event for event in events[:-1] if isinstance(event, str)]
    assert len(pieces) == len(events) - 1
    assert isinstance(events[-1], Result)
    return pieces, events[-1]


def test_an_answer_streams_and_adds_up(worker: Path) -> None:
    pieces, result = answer(
        worker,
        GenerateRequest(id="a", prompt="Once upon a time", max_tokens=12, ignore_eos=True, stream=True),
    )
    assert len(result.token_ids) == 12
    assert "".join(pieces) == result.text
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len("Once upon a time")
    assert result.cached_tokens == 0
    assert result.ttft_s is not None
    assert 0 < result.ttft_s < ANSWER_S


def test_without_stream_only_the_result_comes(worker: Path) -> None:
    pieces, result = answer(worker, GenerateRequest(id="a", prompt="Once", max_tokens=3, ignore_eos=True))
    assert not pieces
    assert len(result.token_ids) == 3


def test_messages_go_through_the_chat_template(worker: Path) -> None:
    _, chat = answer(
        worker, GenerateRequest(id="a", messages=(Message(role="user", content="Hi"),), max_tokens=1)
    )
    _, plain = answer(worker, GenerateRequest(id="a", prompt="Hi", max_tokens=1))
    assert chat.prompt_tokens > plain.prompt_tokens


def test_a_seed_repeats_and_greedy_ignores_it(worker: Path) -> None:
    def ask(seed: int, temperature: float) -> tuple[int, ...]:
        request = GenerateRequest(
            id="a", prompt="x", max_tokens=16, ignore_eos=True, seed=seed, temperature=temperature
        )
        return answer(worker, request)[1].token_ids

    assert ask(1, 1.5) == ask(1, 1.5) != ask(2, 1.5)
    assert ask(1, 0.0) == ask(2, 0.0)


@pytest.mark.parametrize(
    "request_, problem",
    [
        (GenerateRequest(id="a", prompt=""), "empty"),
        (GenerateRequest(id="a", token_ids=(1, 10_000)), "token ids"),
        (GenerateRequest(id="a", token_ids=(1,) * 9000), "at most"),
        (GenerateRequest(id="a", prompt="x", temperature=-1.0), "temperature"),
        (GenerateRequest(id="a", prompt="x", max_tokens=0), "max_new_tokens"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    worker: Path, request_: GenerateRequest, problem: str
) -> None:
    with WorkerConnection(worker, timeout_s=ANSWER_S) as connection:
        with pytest.raises(InvalidArgument, match=problem):
            list(connection.ask(request_))
        # The connection goes on.
        assert list(connection.ask(GenerateRequest(id="a", prompt="x", max_tokens=1)))


def test_two_requests_share_a_connection(worker: Path) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(ANSWER_S)
        raw.connect(str(worker))
        asked = [{"id": name, "prompt": name, "max_tokens": 4, "ignore_eos": True} for name in ("a", "b")]
        # In one piece: the third must come before the first is answered.
        raw.sendall(
            b"".join(json.dumps(line).encode() + b"\n" for line in (*asked, {"id": "a", "prompt": "again"}))
        )
        with raw.makefile("rb") as lines:
            events = [json.loads(lines.readline()) for _ in range(3)]
    kinds = sorted((event["id"], event["event"]) for event in events)
    assert kinds == [("a", "done"), ("a", "error"), ("b", "done")]
    assert "running already" in next(event["message"] for event in events if event["event"] == "error")


def test_a_cancelled_request_ends_as_aborted(worker: Path) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(ANSWER_S)
        raw.connect(str(worker))
        request = {"id": "a", "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        raw.sendall(json.dumps(request).encode() + b"\n")
        lines = raw.makefile("rb")
        assert json.loads(lines.readline())["event"] == "token"
        raw.sendall(b'{"id": "a", "cancel": true}\n')
        last = json.loads(lines.readline())
        while last["event"] == "token":
            last = json.loads(lines.readline())
    assert last["event"] == "done"
    assert last["finish_reason"] == "aborted"


def test_an_aborted_connection_frees_its_pages(worker: Path) -> None:
    """An aborted request kept its pages for ever, and after a few of them nothing was admitted any more."""
    for _ in range(8):  # each wants most of the 8 MiB of pages
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(ANSWER_S)
            raw.connect(str(worker))
            request = {
                "id": "a",
                "prompt": "x" * 4000,
                "max_tokens": 8000,
                "ignore_eos": True,
                "stream": True,
            }
            raw.sendall(json.dumps(request).encode() + b"\n")
            assert raw.recv(1)
    _, result = answer(worker, GenerateRequest(id="a", prompt="y" * 4000, max_tokens=2, ignore_eos=True))
    assert len(result.token_ids) == 2


def test_only_this_user_may_connect(worker: Path) -> None:
    assert stat.S_IMODE(worker.stat().st_mode) == 0o600
    assert worker.stat().st_uid == os.getuid()


def test_a_socket_in_use_is_one_clear_line(worker: Path, model_folder: Path) -> None:
    process = start(model_folder, worker)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 1
    assert errors.decode().count("\n") == 1
    assert f"a worker listens on {worker} already" in errors.decode()


@pytest.mark.parametrize(
    "model, listen, problem",
    [
        ("nowhere", "w.sock", "no model 'nowhere'"),
        ("", "missing/w.sock", "does not exist"),
        ("", "file", "is no socket"),
    ],
)
def test_bad_input_is_one_clear_line(
    model_folder: Path, tmp_path: Path, model: str, listen: str, problem: str
) -> None:
    (tmp_path / "file").write_text("")
    process = start(Path(model) if model else model_folder, tmp_path / listen)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode != 0
    assert errors.decode().count("\n") == 1
    assert problem in errors.decode()


def test_a_killed_workers_socket_is_taken_over_and_sigterm_finishes(
    model_folder: Path, tmp_path: Path
) -> None:
    """A worker that was killed left its socket behind, and the next one said that the address was in use."""
    path = tmp_path / "w.sock"
    first = start(model_folder, path)
    ready(first)
    first.kill()
    first.communicate(timeout=START_S)
    assert path.exists()
    second = start(model_folder, path)
    ready(second)
    with WorkerConnection(path, timeout_s=ANSWER_S) as connection:
        events = connection.ask(
            GenerateRequest(id="a", prompt="x", max_tokens=200, ignore_eos=True, stream=True)
        )
        assert isinstance(next(events), str)
        second.send_signal(signal.SIGTERM)
        result = list(events)[-1]
    assert isinstance(result, Result)
    assert len(result.token_ids) == 200
    second.communicate(timeout=START_S)
    assert second.returncode == 0


def test_nobody_there_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="kvstore worker"):
        WorkerConnection(tmp_path / "none.sock", timeout_s=1.0)
