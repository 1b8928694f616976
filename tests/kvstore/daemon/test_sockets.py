"""Where a daemon's sockets may stand."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from kvstore.cli.serve import keeper_command
from kvstore.daemon.sockets import Sockets
from kvstore.errors import AlreadyExists, ConfigError
from tests.support.daemon import small_config, started, wait_for


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    """In a folder of mode 0777 anybody could put a socket of his own in the daemon's place."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write"):
        Sockets(small_config(tmp_path))
    tmp_path.chmod(0o1777)
    Sockets(small_config(tmp_path)).close()


def test_a_sticky_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sticky folder passed whoever owned it, and its owner may remove any file in it."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, 4343, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Sockets(small_config(tmp_path))


def test_a_missing_folder_is_made_private(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        Sockets(small_config(tmp_path / "new")).close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new/kv.sock.lock").stat().st_mode) == 0o600


def test_who_has_the_socket_is_named(tmp_path: Path) -> None:
    """The lock file was empty, and the message named nobody whom one could stop."""
    lock = tmp_path / "kv.sock.lock"
    lock.write_text("99999999999 an older and longer content\n")
    held = Sockets(small_config(tmp_path))
    assert lock.read_text() == f"{os.getpid()}\n"
    with pytest.raises(AlreadyExists, match=rf"daemon {os.getpid()} .*`kill {os.getpid()}`"):
        Sockets(small_config(tmp_path))
    for nobody in ("", "-1\n", "0\n", "4194305\n", "x\n"):
        lock.write_text(nobody)
        with pytest.raises(AlreadyExists, match="another daemon listens"):
            Sockets(small_config(tmp_path))
    held.close()
    assert lock.read_text() == ""


def test_a_service_without_its_first_keeper_is_named_and_ends_by_the_command_that_is_said(
    tmp_path: Path,
) -> None:
    """`kill -9` of `kvstore serve` left a service behind that the next `serve` told to stop, without saying whom."""
    config = small_config(tmp_path)
    with started(config) as service:
        keeper, first = service.keeper_pid, service.daemon_pid
        os.kill(keeper, signal.SIGKILL)
        wait_for("another keeper", lambda: service.keeper_pid not in (0, keeper))
        os.kill(first, signal.SIGKILL)
        daemon = service.await_restart(first)
        wait_for("a ready daemon", lambda: service.stats().ready)
        second = subprocess.run(
            keeper_command(config), capture_output=True, text=True, timeout=30, check=False
        )
        assert f"stop it with `kill {daemon}`" in second.stderr, second.stderr
        left = {daemon, service.keeper_pid}
        os.kill(daemon, signal.SIGTERM)
        wait_for("the end of both", lambda: not any(_runs(pid) for pid in left))


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
