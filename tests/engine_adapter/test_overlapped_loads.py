"""The bundled engine computes behind a prefix while that is loaded from DRAM, and answers as ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.copier import CopyBatch, Direction, TwinCopier
from tests.engine_adapter.overlapped_loads import BLOCK, SMALL, behind_a_load, cold
from tests.support.daemon import Service, small_config, started

SLOW_S = 0.05


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service
        assert service.faults() == []


@pytest.fixture
def slow_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group comes when the engine has long asked for it."""
    copy = TwinCopier._copy

    def slow(self: TwinCopier, batch: CopyBatch, begin: int, end: int) -> None:
        if batch.direction is Direction.LOAD:
            time.sleep(SLOW_S)
        copy(self, batch, begin, end)

    monkeypatch.setattr(TwinCopier, "_copy", slow)


@pytest.mark.usefixtures("slow_loads")
def test_answers_over_a_load_under_way_are_those_over_a_whole_one(service: Service) -> None:
    settings, store = SMALL.settings("cpu", deterministic=False), Path(service.socket)
    whole = behind_a_load(store, SMALL, settings, name="whole", grouped=False)
    grouped = behind_a_load(store, SMALL, settings, name="grouped", grouped=True)
    assert (whole.groups, grouped.groups) == ([], [2])
    assert grouped.by_tier.get("dram", 0) >= BLOCK
    assert sum(grouped.by_tier.values()) == sum(whole.by_tier.values()) == SMALL.prefix
    assert grouped.token_ids == whole.token_ids == cold(SMALL, settings)
