"""The bundled engine computes behind a prefix while that is loaded from DRAM, and answers as ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from engine_adapter.loading.arrival import Arrival
from kvstore.errors import Unavailable
from tests.engine_adapter.loading.overlapped_loads import (
    BLOCK,
    SMALL,
    behind_a_load,
    broken_off,
    cold,
    failed_load,
)
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


def test_pages_of_a_load_that_was_given_up_are_used_by_nobody_until_it_has_ended(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails, others run in what is left of the pool, and what comes late is a hit of the next one."""
    held, go = threading.Event(), threading.Event()
    copy = TwinCopier._copy

    def waits(self: TwinCopier, batch: CopyBatch, begin: int, end: int) -> None:
        if batch.direction is Direction.LOAD:
            held.set()
            assert go.wait(30)
        copy(self, batch, begin, end)

    monkeypatch.setattr(TwinCopier, "_copy", waits)
    monkeypatch.setitem(Arrival.__init__.__kwdefaults__, "patience_s", 0.1)  # type: ignore[arg-type]
    settings = SMALL.settings("cpu", deterministic=False)
    found = broken_off(Path(service.socket), SMALL, settings, name="late", come=go.set)
    assert held.is_set()
    assert isinstance(found.error, Unavailable)
    assert found.beside == found.afterwards, "what others computed meanwhile was not overwritten"
    assert found.again == cold(SMALL, settings)


@pytest.mark.parametrize("grouped", [True, False], ids=["in groups", "as a whole"])
def test_a_request_whose_copier_dies_fails_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    """The copier's thread had ended by an exception: a group was waited for a minute, a whole load for ever."""
    copy = TwinCopier._copy

    def dies(self: TwinCopier, batch: CopyBatch, begin: int, end: int) -> None:
        if batch.direction is Direction.LOAD:
            raise OSError("the copier dies")
        copy(self, batch, begin, end)

    settings, name = SMALL.settings("cpu", deterministic=False), f"dies {grouped}"
    monkeypatch.setattr(TwinCopier, "_copy", dies)
    error, took_s = failed_load(Path(service.socket), SMALL, settings, name=name, grouped=grouped)
    assert isinstance(error, Unavailable)
    assert took_s < 10
