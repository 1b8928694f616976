"""Stores that several benchmarks share."""

from __future__ import annotations

import pytest

from bench.tables import FilledStore

ROWS = 200_000


@pytest.fixture(scope="session")
def filled() -> FilledStore:
    """200,000 blocks in chains of 4,096. Benchmarks leave as many in it as they found."""
    return FilledStore(ROWS)
