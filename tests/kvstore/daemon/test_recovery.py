"""Tables that a keeper has, and a daemon that takes them over or begins with new ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.daemon.recovery import TABLES, open_tables
from tests.support.daemon import small_config


@pytest.mark.parametrize("name", [TABLES, "tables"])
def test_tables_in_which_nothing_can_be_unread_are_not_taken_over(tmp_path: Path, name: str) -> None:
    """A daemon that knows no checksums gave out blocks that nobody had looked at, where it took these tables over."""
    config = small_config(tmp_path)
    kept = open_tables(config, {}, 0)
    assert kept.fresh
    taken = open_tables(config, {name: kept.fd}, 0)
    assert taken.fresh is (name != TABLES)
    for fd in {kept.fd, taken.fd}:
        os.close(fd)
