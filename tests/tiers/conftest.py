"""Fixtures for the tests of tiers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.harness import Harness, opened


@pytest.fixture
def harness() -> Iterator[Harness]:
    with opened() as made:
        yield made
