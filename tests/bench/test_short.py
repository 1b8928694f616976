"""`kvstore bench all`: each benchmark in a process of its own, and what becomes of those that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import short
from bench.short import Run, run_all, run_one
from kvstore.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]


def run_script(tmp_path: Path, script: str, limit_s: float = 30.0) -> Run:
    """In a process of its own, in the background: what `run_one` starts, and it alone, must be ended by it."""
    driver = (
        "import json, signal, sys\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from bench.short import run_one\n"
        f"run = run_one('x', [sys.executable, '-c', {script!r}], Path({str(tmp_path)!r}), {limit_s})\n"
        "print(json.dumps(asdict(run)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", driver], cwd=ROOT, capture_output=True, text=True, timeout=90, check=True
    )
    return Run(**json.loads(done.stdout))


def test_a_result_is_stored_with_its_machine(tmp_path: Path) -> None:
    run = run_script(tmp_path, "print('{\"rate\": 3}')")
    assert run.succeeded
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["results"] == {"rate": 3}
    assert stored["machine"]["cpu"]


def test_a_failure_is_one_line_and_its_log_stays(tmp_path: Path) -> None:
    run = run_script(tmp_path, "import sys; print('first', file=sys.stderr); sys.exit('no disk')")
    assert run.error == "no disk"
    assert (tmp_path / "x.log").read_text().split() == ["first", "no", "disk"]
    assert not (tmp_path / "x.json").exists()


def test_what_was_printed_before_a_failure_is_kept(tmp_path: Path) -> None:
    run = run_script(tmp_path, "print('{\"rate\": 3}', flush=True); import sys; sys.exit('then it broke')")
    assert run.error == "then it broke"
    assert json.loads((tmp_path / "x.json").read_text())["results"] == {"rate": 3}


def test_at_the_limit_it_is_interrupted_and_ends_what_it_started(tmp_path: Path) -> None:
    """A benchmark's daemon must not outlive it, with gigabytes of memory. In the background of a script it was not
    interrupted: it ignored SIGINT as its parent did, and what it had measured was lost with it."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit('interrupted')\n"
    )
    start = time.monotonic()
    run = run_script(tmp_path, script, limit_s=5.0)
    assert time.monotonic() - start < 30
    assert run.error == "not over after 5 s: interrupted"
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_time_left_is_no_start(tmp_path: Path) -> None:
    assert run_one("x", ["/does/not/exist"], tmp_path, 1.0).error == "no time was left for it"


def test_all_are_run_and_none_takes_more_than_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def fake(name: str, command: list[str], out: Path, limit_s: float) -> Run:
        limits.append(limit_s)
        assert command[-2:] == ["--json", "--short"] or command[-2] == "--folder"
        return Run(name=name, seconds=1.0, error="" if name == "copy" else "broken")

    monkeypatch.setattr(short, "run_one", fake)
    runs = run_all(tmp_path, lambda _: None, short=True, parent=tmp_path)
    assert {run.name for run in runs} >= {
        "copy",
        "ttft",
        "decode",
        "prefill",
        "lookup",
        "pressure",
        "store",
        "nvme",
    }
    assert max(limits) <= 600
    summary = json.loads((tmp_path / "summary.json").read_text())["results"]
    assert [run["name"] for run in summary if not run["error"]] == ["copy"]


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'speed'"):
        run_all(tmp_path, lambda _: None, short=True, only=["speed"])
