"""A member that ends is noticed, once, and only while somebody watches."""

from __future__ import annotations

import subprocess
import sys
import threading

from engine_adapter.group.watch import watched


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_the_first_member_to_end_is_told_with_one_line() -> None:
    heard, said = threading.Event(), list[str]()

    def on_death(why: str) -> None:
        said.append(why)
        heard.set()

    first, second = sleeper(), sleeper()
    try:
        with watched({1: first.pid, 2: second.pid}, on_death):
            second.kill()
            assert heard.wait(10.0)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    assert said == [f"process 2 of the model (pid {second.pid}) has ended: the worker ends with it"]


def test_an_end_after_the_watch_is_nobodys_news() -> None:
    said = list[str]()
    process = sleeper()
    with watched({1: process.pid}, said.append):
        pass
    process.kill()
    process.wait()
    assert said == []


def test_the_worker_says_why_it_ends() -> None:
    script = "from engine_adapter.group.watch import end_process; end_process('it has ended')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (1, b"kvstore: it has ended\n", b"")
