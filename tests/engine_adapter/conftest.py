"""A tiny random model that the tests of worker, generate and demo run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_adapter.engine import tiny


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that reads bytes; its context is long enough for a prompt of many blocks."""
    return tiny.save_folder(tmp_path_factory.mktemp("model"), {"max_position_embeddings": 8192})
