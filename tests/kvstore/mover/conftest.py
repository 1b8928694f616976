"""Movers over one DRAM extent and one slab; whatever happens none is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.mover.link import MoverLink
from kvstore.wire import mover as wire
from tests.kvstore.mover.rig import DEADLINE_S, Start
from tests.tiers.harness import DRAM, NVME, SLABS, SLOT_BYTES, Harness
from tiers.dram import DramTier


@pytest.fixture
def memory() -> Iterator[DramTier]:
    made = DramTier()
    made.create(DRAM, 64 * SLOT_BYTES)
    yield made
    made.close()


@pytest.fixture
def harness(memory: DramTier) -> Iterator[Harness]:
    made = Harness(memory, np.random.default_rng(7))
    yield made
    del made.bytes


@pytest.fixture
def start(memory: DramTier, tmp_path: Path) -> Iterator[Start]:
    links: list[MoverLink] = []

    def begin(*, lock_fd: int | None = None, max_outstanding: int = 1024, **config: object) -> MoverLink:
        settings = {"directory": str(tmp_path), "threads": 2} | config
        link = MoverLink.start(
            wire.Config(**settings),  # type: ignore[arg-type]
            lock_fd=lock_fd,
            max_outstanding=max_outstanding,
        )
        links.append(link)
        link.send_extent(DRAM, 64 * SLOT_BYTES, memory.descriptor(DRAM))
        link.send_slab(NVME, 1, SLABS, SLOT_BYTES)
        return link

    yield begin
    for link in links:
        if link.pidfd >= 0:
            link.kill()
            link.stop()
            link.reap(DEADLINE_S)
