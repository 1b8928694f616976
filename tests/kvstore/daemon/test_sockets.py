"""Where a daemon's sockets may stand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvstore.daemon.sockets import Sockets
from kvstore.errors import ConfigError
from tests.support.daemon import small_config


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
