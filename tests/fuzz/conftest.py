"""A service for each module of these tests, which each example must leave sound."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.units import MIB
from tests.fuzz.rig import Target
from tests.support.daemon import small_config, started


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A service with a disk. At the end nothing is held, and everything can be let go."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), nvme_bytes=64 * MIB, max_rows=4096, max_namespaces=512)
        with started(config) as service:
            target = Target(service)
            yield target
            target.empty()
