"""Killing exactly what is ours. Each case runs in a process of its own, because it adopts and kills whole families."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

SETUP = """
import os, subprocess, sys, time
from pathlib import Path
from engine_adapter.cli.processes import Household
from kvstore.errors import DeadlineExceeded, Unavailable
household = Household()
log = Path(sys.argv[1]) / "log"

def start(code):
    return household.start("it", [sys.executable, "-c", code], os.environ, log)

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def run(code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(code), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_orphans_of_orphans_are_found_and_killed(tmp_path: Path) -> None:
    """A mover whose daemon and keeper had been killed was nobody's child any more and went on."""
    run(
        """
        child = start(
            "import subprocess, sys, time;"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True);"
            "print('up', flush=True); time.sleep(100)"
        )
        assert child.read_line(20) == "up"
        until(lambda: len(household.descendants()) == 2)
        household.kill([child.pid])
        until(lambda: len(household.descendants()) == 1)
        household.kill_everything()
        assert household.descendants() == []
        """,
        tmp_path,
    )


def test_what_is_started_again_while_it_is_killed_is_killed_too(tmp_path: Path) -> None:
    run(
        """
        start(
            "import subprocess, sys\\n"
            "while True: subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"
        )
        until(lambda: len(household.descendants()) == 2)
        household.kill(household.descendants()[1:])
        until(lambda: len(household.descendants()) == 2)
        household.kill_everything()
        assert household.descendants() == []
        """,
        tmp_path,
    )


def test_a_stranger_is_never_hit(tmp_path: Path) -> None:
    """A pid that was named but is not ours is left alone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        run(f"household.kill([{stranger.pid}])", tmp_path)
        assert stranger.poll() is None
        assert stranger.stdin is not None
        stranger.stdin.write(b"\n")
    assert stranger.returncode == 0


def test_waiting_for_a_line_has_an_end_and_shows_the_log(tmp_path: Path) -> None:
    run(
        """
        silent = start("import time; time.sleep(100)")
        try:
            silent.read_line(0.1)
            raise SystemExit("no deadline")
        except DeadlineExceeded:
            pass
        broken = start("import sys; sys.exit('what is wrong')")
        try:
            broken.read_line(20)
            raise SystemExit("no error")
        except Unavailable as error:
            assert "what is wrong" in str(error), error
        household.terminate(silent, 10)
        until(lambda: household.descendants() == [])
        """,
        tmp_path,
    )


def test_what_a_killed_command_started_ends_with_it(tmp_path: Path) -> None:
    """A command that was killed could clean up nothing: what it had started, and what that had started, went on."""
    code = """
    household.watch([Path(sys.argv[1]) / "own"])
    (Path(sys.argv[1]) / "own").mkdir()
    child = start(
        "import subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True);"
        "print('up', flush=True); time.sleep(100)"
    )
    assert child.read_line(20) == "up"
    until(lambda: len(household.descendants()) == 2)
    print(*household.descendants(), flush=True)
    os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline_s = time.monotonic() + 20
    while (tmp_path / "own").exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_dismissed_watcher_has_gone(tmp_path: Path) -> None:
    run(
        """
        household.watch([])
        assert household.descendants() == []
        watcher = household._watcher
        household.kill_everything()
        assert watcher.poll() is None, "it outlives what is killed on purpose"
        household.dismiss()
        assert watcher.poll() == 0
        """,
        tmp_path,
    )
