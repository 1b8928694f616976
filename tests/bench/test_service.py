"""The daemon that benchmarks run."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.service import disk_room, serve, serve_in
from kvstore.errors import ConfigError


def test_what_the_daemon_lacks_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without lmdb the daemon died with a traceback in a log that nobody had been shown."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lmdb" else find(name))
    with pytest.raises(ConfigError, match=r"not installed: lmdb$"), serve({}, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError), serve_in(tmp_path, {}):
        pass


def test_a_disk_tier_is_no_larger_than_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid plans 44 GiB, which a machine lent for it may not have left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=30 << 30))
    assert disk_room(tmp_path, "28GiB") == "28GiB"
    assert disk_room(tmp_path, "44GiB") == "28GiB"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert disk_room(tmp_path, "44GiB") == "64MiB"
