"""`kvstore bench all`: every benchmark in a process of its own, with a time limit; what one finds no other can lose.

In the short form all of them together end within ten minutes: each has a limit, and none more than what is left. The
most important come first. Each result is written as soon as it is there, with the machine it came from; a benchmark
that fails, or is not over in time, leaves its log and a line in the summary.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from bench.machine import document
from bench.report import write_result
from engine_adapter.cli.processes import Household
from kvstore.errors import InvalidArgument

__all__ = ["SHORT_S", "Run", "run_all", "run_one", "summary_table"]

SHORT_S = 600.0
_FULL_LIMIT_S = 3600.0
_LEAST_S = 5.0
_INTERRUPTED_S = 20.0
_LIMITS_S = {
    "copy": 75.0,
    "ttft": 180.0,
    "decode": 90.0,
    "prefill": 60.0,
    "lookup": 75.0,
    "pressure": 180.0,
    "interference": 90.0,
    "store": 60.0,
    "nvme": 60.0,
    "index": 60.0,
    "planner": 150.0,
    "guard": 150.0,
}
_WITH_FILES = ("guard", "index", "lookup", "nvme", "planner", "pressure", "store", "ttft")
_BY_PARTS = ("guard", "planner", "pressure", "ttft")
"""Those that write what they know so far: something is left of them where the limit ends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One benchmark of a run of all. `error` is empty where it succeeded."""

    name: str
    seconds: float
    error: str

    @property
    def succeeded(self) -> bool:
        """Whether there is a result of it."""
        return not self.error


def run_all(
    out: Path,
    say: Callable[[str], None],
    *,
    short: bool,
    parent: Path | None = None,
    only: Sequence[str] | None = None,
) -> list[Run]:
    """Runs them one after the other and writes `<name>.json`, `<name>.log` and `summary.json` into `out`.

    Raises: InvalidArgument for a name in `only` that is no benchmark.
    """
    unknown = sorted(set(only or ()) - set(_LIMITS_S))
    if unknown:
        raise InvalidArgument(f"no benchmark {unknown[0]!r}: there are {', '.join(_LIMITS_S)}")
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (SHORT_S if short else len(_LIMITS_S) * _FULL_LIMIT_S)
    runs: list[Run] = []
    for name in only or _LIMITS_S:
        limit_s = min(_LIMITS_S[name] if short else _FULL_LIMIT_S, deadline - time.monotonic())
        command = [sys.executable, "-m", "kvstore.cli.main", "bench", name, "--json"]
        command += ["--short"] if short else []
        if name in _BY_PARTS:
            (out / f"{name}.json").unlink(
                missing_ok=True
            )  # of an earlier run: it would count as a part of this one
            command += ["--out", str(out / f"{name}.json")]
        command += ["--folder", str(parent)] if parent is not None and name in _WITH_FILES else []
        say(f"{name}: at most {limit_s:.0f} s")
        runs.append(run_one(name, command, out, limit_s))
        write_result("summary", document([asdict(run) for run in runs]), out)
    return runs


def run_one(name: str, command: Sequence[str], out: Path, limit_s: float) -> Run:
    """One benchmark: its JSON on standard output becomes `<name>.json`. Nothing that it started outlives it."""
    if limit_s < _LEAST_S:
        return Run(name=name, seconds=0.0, error="no time was left for it")
    start = time.monotonic()
    log = out / f"{name}.log"
    household = Household()
    # A file, no pipe: a process that outlives the benchmark would keep a pipe open, and us waiting.
    with log.open("wb") as errors, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            preexec_fn=_interruptible,
        )
        try:
            _await_end(process, limit_s)
        finally:
            household.kill_everything()
        output.seek(0)
        printed = output.read()
    error = _store(name, printed, process.returncode, out, log)
    if time.monotonic() - start > limit_s and error:
        error = f"not over after {limit_s:.0f} s: {error}"
    return Run(name=name, seconds=time.monotonic() - start, error=error)


def _interruptible() -> None:
    """In the new process: what runs in the background of a script ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _await_end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """At the limit it is interrupted as by Ctrl-C, so that it ends its daemon, and then killed."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _store(name: str, printed: bytes, code: int, out: Path, log: Path) -> str:
    """Writes the result; why there is none, in one line."""
    lines = printed.decode(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if result is not None:
        write_result(name, document(result), out)
    if code == 0 and result is not None:
        return ""
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return said[-1] if said else f"exit code {code}, and no word why"


def summary_table(runs: Sequence[Run]) -> Table:
    """What became of each."""
    table = Table(title="kvstore bench all", title_justify="left")
    table.add_column("benchmark")
    table.add_column("seconds", justify="right")
    table.add_column("result")
    for run in runs:
        table.add_row(run.name, f"{run.seconds:.0f}", escape(run.error) if run.error else "done")
    return table
