"""One service for the tests of a file, and engines that are closed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.units import MIB
from tests.engine_adapter.external.host_engine import HostEngine
from tests.support.daemon import Service, small_config, started


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """16 MiB of DRAM: 4,096 slots of 4 KiB."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), dram_bytes=16 * MIB, dram_extent_bytes=4 * MIB)
        with started(config) as running:
            yield running


@pytest.fixture
def engine(service: Service) -> Iterator[Callable[..., HostEngine]]:
    """Makes engines, attached."""
    made: list[HostEngine] = []

    def make(**options: object) -> HostEngine:
        new = HostEngine(service.socket, **options)  # type: ignore[arg-type]
        made.append(new)
        new.attached()
        return new

    yield make
    for one in made:
        one.close()
