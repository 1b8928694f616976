"""Fixtures for the tests of tiers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.tiers.harness import DRAM, SLOT_BYTES, Harness
from tiers.dram import DramTier


@pytest.fixture
def harness() -> Iterator[Harness]:
    memory = DramTier()
    memory.create(DRAM, 64 * SLOT_BYTES)
    made = Harness(memory, np.random.default_rng(20261129))
    yield made
    del made.bytes
    memory.close()
