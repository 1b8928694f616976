"""What tests with a real vLLM share: a place with a short path, and prompts."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.processes import MODEL, PYTHON


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these need vLLM's own environment: `make test-vllm` makes it."""
    here = Path(__file__).parent
    missing = not (PYTHON.exists() and MODEL.is_dir())
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(1200))
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason=f"no vLLM in {PYTHON.parent.parent}: make test-vllm sets it up")
                )


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of the test's own, whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


@pytest.fixture
def prompt() -> Callable[[int, int], list[int]]:
    """`prompt(seed, tokens)`: the same tokens each time, and others for another seed."""

    def make(seed: int, tokens: int) -> list[int]:
        chosen = random.Random(seed)
        return [chosen.randrange(100, 40_000) for _ in range(tokens)]

    return make
