"""Models that many tests share; nothing changes them."""

from pathlib import Path

import pytest

from engine_adapter.engine.loader import LoadedModel
from tests.engine_adapter.engine import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LoadedModel:
    return tiny.load(tiny_folder)
