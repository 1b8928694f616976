"""The flight recording through the whole service: while it runs, after a crash, after the keeper has ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli.blackbox import blackbox
from kvstore.daemon.blackbox import saved_paths
from kvstore.recorder import Event, read_ring
from tests.support.command import kvstore
from tests.support.daemon import DEADLINE_S, small_config, started, wait_for
from tests.support.raw_client import RawClient

Records = list[dict[str, object]]
Show = Callable[..., Records]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Show:
    """What `kvstore blackbox --json` prints."""

    def show(
        file: str | None = None, *, socket: str, last: int = 10_000, since: str | None = None
    ) -> Records:
        blackbox(None if file is None else Path(file), socket=socket, last=last, since=since, as_json=True)
        records = json.loads(capsys.readouterr().out)["records"]
        assert isinstance(records, list)
        return records

    return show


def test_it_outlives_the_daemon_whose_crash_it_explains(tmp_path: Path, shown: Show) -> None:
    config = small_config(tmp_path)
    saved, crash = saved_paths(config.socket)
    with started(config) as service:
        one = RawClient(service.socket).begin()
        one.fill(range(40))
        first = service.daemon_pid
        running = shown(socket=service.socket)
        assert [record["event"] for record in running][:2] == ["boot", "extent_added"]
        assert {"attach", "activate", "grant", "seal", "ready"} <= {record["event"] for record in running}
        service.kill_daemon()
        after = shown(socket=service.socket)
        assert after[: len(running)] == running, "what was before the crash is still there"
        boots = [record["pid"] for record in after if record["event"] == "boot"]
        assert boots[0] == first
        assert len(boots) == 2
        assert "recovered" in {record["event"] for record in after}
        assert shown(crash, socket=service.socket)[: len(running)] == running, "and in the file of the crash"
        # Extents of DRAM may still be added after `ready`, each with a record of its own.
        wait_for("all of DRAM", lambda: service.tier("dram").allocated_bytes == config.dram_bytes)
        (last,) = shown(socket=service.socket, last=1)
        assert last == shown(socket=service.socket)[-1]
        assert shown(socket=service.socket, since="1h") == shown(socket=service.socket)
        assert shown(socket=service.socket, since="0s") == []
        one.close()
        log = service.log.read_text()
    assert saved in log, "the log says where it will be"
    ended = shown(socket=config.socket)
    assert ended[-1]["event"] == "stopped"
    assert [record.event for record in read_ring(Path(saved).read_bytes())][-1] is Event.STOPPED
    assert os.stat(saved).st_mode & 0o777 == 0o600


def test_it_is_readable_while_the_daemon_hangs_and_while_only_the_keeper_lives(
    tmp_path: Path, shown: Show
) -> None:
    with started(small_config(tmp_path)) as service:
        pid, keeper = service.daemon_pid, service.keeper_pid
        os.kill(pid, signal.SIGSTOP)
        assert "ready" in {record["event"] for record in shown(socket=service.socket)}
        os.kill(keeper, signal.SIGSTOP)  # so that no other daemon is started
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert "ready" in {record["event"] for record in shown(socket=service.socket)}
        os.kill(keeper, signal.SIGCONT)
        service.await_restart(pid)


def test_a_keeper_that_took_over_leaves_it_too(tmp_path: Path, shown: Show) -> None:
    config = small_config(tmp_path)
    with started(config) as service:
        old = service.keeper_pid
        os.kill(old, signal.SIGKILL)
        service.process.wait(DEADLINE_S)
        wait_for("another keeper that holds everything", lambda: service.stats().warnings)
        os.kill(service.keeper_pid, signal.SIGTERM)
        wait_for("the file", lambda: Path(saved_paths(config.socket)[0]).exists())
    assert shown(socket=config.socket)[-1]["event"] == "stopped"


def test_without_any_recording_it_says_so(tmp_path: Path) -> None:
    command = ("blackbox", "--socket", str(tmp_path / "kv.sock"))
    done = kvstore(*command)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has left a recording" in done.stderr
    (tmp_path / "junk").write_bytes(b"no recording at all" * 1000)
    done = kvstore(*command, str(tmp_path / "junk"))
    assert done.returncode == 1
    assert done.stderr == "kvstore: no flight recording of this version\n"
