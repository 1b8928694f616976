"""Runs the microbenchmarks and prints a table beside the stored baseline: `make bench`.

python -m bench.micro [--short] [--save] [-k EXPRESSION]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bench.machine import document
from bench.report import Figure, comparison, read_baseline, write_result

_FOLDER = Path(__file__).resolve().parent
_NAME = "micro"


def main() -> int:
    """The program. Its exit code is pytest's."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.micro", description="Microbenchmarks of the hot paths."
    )
    parser.add_argument("--short", action="store_true", help="few rounds: shows that they work")
    parser.add_argument("--save", action="store_true", help="store the result as the new baseline")
    parser.add_argument("-k", dest="expression", default="", help="only those that match, as for pytest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        output = Path(folder) / "benchmark.json"
        code = _run(output, short=options.short, expression=options.expression)
        if code:
            return code
        medians_us = _medians_us(output)
    results = read_baseline(_NAME).get("results", {})
    assert isinstance(results, dict), "the baseline holds no results"
    figures = [Figure(name=name, value=value, unit="µs") for name, value in medians_us.items()]
    Console().print(comparison("microbenchmarks, medians", figures, results))
    if options.save:
        print(f"stored in {write_result(_NAME, document({**results, **medians_us}))}")
    return 0


def _run(output: Path, *, short: bool, expression: str) -> int:
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            str(_FOLDER),
            "-q",
            "--no-header",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
        ),
        *("-o", "python_files=bench_*.py", "-o", "addopts=--import-mode=importlib", "--timeout=600"),
        *("--benchmark-disable-gc", "--benchmark-columns=median", f"--benchmark-json={output}"),
        *(
            ("--benchmark-max-time=0.05", "--benchmark-min-rounds=3")
            if short
            else ("--benchmark-max-time=1",)
        ),
        *(("-k", expression) if expression else ()),
    ]
    # Under a parallel test run pytest-benchmark would take this run for one of its workers and measure nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, check=False, stdout=sys.stderr, cwd=_FOLDER.parent.parent, env=environment)
    return done.returncode


def _medians_us(output: Path) -> dict[str, float]:
    """Median of each benchmark in microseconds, by its name without `bench_`."""
    document = json.loads(output.read_text(encoding="utf-8"))
    return {
        bench["name"].removeprefix("test_"): bench["stats"]["median"] * 1e6
        for bench in document["benchmarks"]
    }


if __name__ == "__main__":
    sys.exit(main())
