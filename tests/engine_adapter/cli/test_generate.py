"""`kvstore generate`: its two ways, its output, and its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_adapter.serving.test_worker import ready, start
from tests.support.command import kvstore

TIMEOUT_S = 60


def generate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", "generate", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, input=stdin, check=False
    )


def test_in_process_json_has_the_promised_fields(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time")
    done = generate("--model", str(model_folder), "--no-cache", "--prompt-file", str(file), "--json", "--raw")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.keys() >= {
        "text",
        "prompt_tokens",
        "cached_tokens",
        "cached_by_tier",
        "ttft_s",
        "tokens_per_s",
    }
    assert report["prompt_tokens"] == len("Once upon a time")
    assert report["cached_tokens"] == 0


def test_a_raw_prompt_is_continued_as_it_stands(model_folder: Path) -> None:
    """Spaces and line ends at both ends of a raw prompt were dropped: other tokens than those that were given."""
    text = "  def f(x):\n    "
    done = generate("--model", str(model_folder), "--no-cache", "--prompt", text, "--json", "--raw")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == len(text)


def test_a_worker_and_this_process_answer_alike(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    worker = start(model_folder, path)
    try:
        ready(worker)
        flags = ["--prompt-file", "-", "--max-tokens", "20", "--temperature", "1.2", "--seed", "5", "--json"]
        there = generate("--worker", str(path), *flags, stdin="Tell me")
        here = generate("--model", str(model_folder), "--no-cache", *flags, stdin="Tell me")
        assert json.loads(there.stdout)["text"] == json.loads(here.stdout)["text"]
        shown = generate("--worker", str(path), "--prompt", "Tell me", "--max-tokens", "4")
        assert "prompt tokens" in shown.stderr
        assert "prompt tokens" not in shown.stdout
    finally:
        worker.kill()
        worker.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--prompt", "x", "--model", "nowhere", "--no-cache"], "no model 'nowhere'"),
        (["--no-cache"], "give --prompt TEXT or --prompt-file FILE"),
        (["--prompt", "x", "--prompt-file", "y"], "give --prompt TEXT or --prompt-file FILE"),
        (["--prompt-file", "nowhere.txt"], "cannot read the prompt nowhere.txt"),
        (["--prompt-file", "/"], "cannot read the prompt /: Is a directory"),
        (["--prompt", "  "], "the prompt is empty"),
        (
            ["--prompt", "a\udcff"],
            "the prompt is not UTF-8 text",
        ),  # a byte of the command line that is no text
        (["--prompt", "x", "--timeout", "-1"], "--timeout is above 0"),
        (["--prompt", "x", "--timeout", "nan"], "--timeout is above 0"),
        (["--prompt", "x", "--worker", "none.sock"], "no worker listens on none.sock"),
        (["--prompt", "x", "--worker", "none.sock", "--no-cache"], "belong to the worker"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], problem: str) -> None:
    done = kvstore("generate", *arguments)
    assert done.returncode == (1 if " listens on " in problem else 2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert problem in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--socket", "/nowhere/k.sock"], "no daemon listens on /nowhere/k.sock"),
        (["--temperature", "-1", "--no-cache"], "temperature must be"),
    ],
)
def test_nothing_else_is_said_by_a_process_that_had_a_model(
    model_folder: Path, arguments: list[str], problem: str
) -> None:
    done = generate("--prompt", "x", "--model", str(model_folder), *arguments)
    assert done.returncode == (1 if " listens on " in problem else 2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert problem in done.stderr
    assert not done.stdout
