"""The microbenchmarks run, and their table is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_one_microbenchmark_gives_a_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.micro", "--short", "-k", "hash_1024_blocks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hash_1024_blocks[16]" in done.stdout
    assert "now / stored" in done.stdout
