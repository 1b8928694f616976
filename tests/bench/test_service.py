"""The daemon that benchmarks run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench.service import serve, serve_in
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
