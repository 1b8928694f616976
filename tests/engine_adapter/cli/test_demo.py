"""The demo with a tiny model: every kill, every tier, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TIMEOUT_S = 110
SIZES = ("--dram", "64MiB", "--nvme", "320MiB", "--hbm", "32MiB", "--threads", "1")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where the demo puts its sockets: a short path, for they have little room."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        yield Path(folder)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore.cli.main", "demo", *arguments]


def environ(scratch: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(scratch)}


def demo(scratch: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environ(scratch),
    )


def left_behind(scratch: Path) -> list[str]:
    """Files below the folder, and command lines of live processes that have it in their environment."""
    found = [str(path) for path in scratch.iterdir()]
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if f"TMPDIR={scratch}\0".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(
                        Path(f"/proc/{entry}/cmdline").read_text(errors="replace").replace("\0", " ")
                    )
    return found


def test_every_row_is_a_hit_with_the_same_answer(model_folder: Path, tmp_path: Path, scratch: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("It was the best of times, it was the worst of times. " * 40)
    work = tmp_path / "w"
    work.mkdir()
    done = demo(
        scratch,
        "--model", str(model_folder), "--prompt-file", str(prompt), "--dir", str(work), "--max-tokens", "8",
        "--json", *SIZES,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = report["rows"]
    assert [row["step"] for row in rows] == ["cold", "hbm", "worker", "daemon", "disk"]
    tiers = {"hbm": "hbm", "worker": "hbm", "daemon": "dram", "disk": "nvme"}
    assert rows[0]["cached_tokens"] == 0
    assert rows[0]["prompt_tokens"] > 2000
    for row in rows:
        assert row["identical"]
        assert row["ttft_s"] > 0
        assert (row["kill_to_first_token_s"] is None) == (row["step"] in ("cold", "hbm"))
    for row in rows[1:]:
        assert row["cached_by_tier"] == {tiers[row["step"]]: (rows[0]["prompt_tokens"] - 1) // 32 * 32}
        assert row["cached_tokens"] >= 0.95 * row["prompt_tokens"]
    assert report["cold_default_chunks_ttft_s"] > 0
    assert not list(work.iterdir())
    assert not left_behind(scratch)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--prompt-file", "nowhere.txt"], "cannot read the prompt nowhere.txt"),
        (["--dir", "/nowhere"], "/nowhere: no such folder"),
        (["--dram", "8GiBB"], "--dram: unknown unit 'GiBB'"),
        (["--nvme", "4000PiB"], "give a smaller --nvme"),
    ],
)
def test_bad_input_is_one_clear_line(
    model_folder: Path, scratch: Path, arguments: list[str], problem: str
) -> None:
    done = demo(scratch, *(["--model", str(model_folder)] if "--model" not in arguments else []), *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert problem in done.stderr


def test_a_killed_demo_leaves_nothing_behind(model_folder: Path, tmp_path: Path, scratch: Path) -> None:
    """After kill -9 of the demo its keeper, daemon, mover and worker went on, and its folders stayed."""
    arguments = command("--model", str(model_folder), "--dir", str(tmp_path), *SIZES)
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ(scratch)
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("starting a worker"):
                assert len(left_behind(scratch)) > 3
                process.kill()
                break
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    deadline_s = time.monotonic() + 30
    while left_behind(scratch) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline_s, left_behind(scratch)
        time.sleep(0.05)


def test_a_terminated_demo_leaves_nothing_behind(model_folder: Path, tmp_path: Path, scratch: Path) -> None:
    """A demo that was ended by a signal left its daemon, its worker and its folders."""
    arguments = command("--model", str(model_folder), "--dir", str(tmp_path), *SIZES)
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ(scratch)
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("starting a worker"):
                assert len(left_behind(scratch)) > 3
                process.terminate()
        process.wait(TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
    assert not left_behind(scratch)
