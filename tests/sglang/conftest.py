"""The stage `make test-sglang`: SGLang's own classes around the connector, over real daemons."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang import standins
from tests.support.daemon import Service, small_config, started

if standins.is_installed():
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        standins.install()
        import sglang.srt.managers.cache_controller
        import sglang.srt.mem_cache.pool_host.mha
        import sglang.srt.mem_cache.pool_host.mla
        import sglang.srt.mem_cache.storage  # noqa: F401


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service


@pytest.fixture
def own_config(tmp_path: Path) -> object:
    """For tests that kill their service: with a disk."""
    return small_config(tmp_path, nvme_bytes=64 << 20)
