"""`kvstore explain` for the bundled engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.daemon import small_config, started

TIMEOUT_S = 60


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_explain_takes_the_prompt_that_generate_takes(model_folder: Path, tmp_path: Path) -> None:
    """The README's `kvstore explain --prompt-file F` did not exist: only people who hash by hand could ask."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a prompt of some length " * 8)
    common = ("--model", str(model_folder), "--prompt-file", str(prompt), "--json")
    with (
        tempfile.TemporaryDirectory(prefix="kv") as folder,
        started(small_config(Path(folder))) as service,
    ):
        given = (*common, "--socket", service.socket)
        before = json.loads(kvstore("explain", *given).stdout)
        assert (before["cached_tokens"], before["cause"] != "") == (0, True)
        done = kvstore("generate", *given, "--max-tokens", "2")
        assert done.returncode == 0, done.stderr
        after = json.loads(kvstore("explain", *given).stdout)
    assert after["prompt_tokens"] == json.loads(done.stdout)["prompt_tokens"]
    assert after["cached_blocks"] == after["blocks"] > 0


@pytest.mark.parametrize(
    "arguments", [(), ("--tokens", "t.json"), ("--prompt", "x", "--namespace", "n.json")]
)
def test_explain_says_what_to_give(arguments: tuple[str, ...]) -> None:
    done = kvstore("explain", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore: give --")
    assert done.stderr.count("\n") == 1
