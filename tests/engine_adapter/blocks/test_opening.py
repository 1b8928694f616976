"""A block manager that a thread opens: what its caller sees of success, failure and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvstore
from engine_adapter.blocks import opening
from engine_adapter.blocks.opening import StorePlan, begin_block_manager
from engine_adapter.copying.copier import Copier, TwinCopier
from kvstore.client import Client, DramListener
from kvstore.errors import KvstoreError, Unavailable
from kvstore.units import MIB
from tests.support.daemon import Service, small_config, started
from tests.support.worker import PARTS, geometry


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with started(small_config(tmp_path)) as service:
        yield service


def plan(service: Service) -> StorePlan:
    return StorePlan(
        socket=service.socket, name="opening", geometry=geometry(), parts=PARTS, hbm_bytes=2 * MIB
    )


def sessions(service: Service) -> int:
    with kvstore.connect(service.socket) as client:
        return len(client.stats().sessions)


def test_the_caller_goes_on_while_a_thread_attaches(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, copiers = threading.Event(), list[Copier]()

    def slowly(device: str) -> tuple[Copier, DramListener | None]:
        assert threading.current_thread() is not threading.main_thread()
        assert go.wait(10)
        copiers.append(TwinCopier())
        return copiers[0], None

    monkeypatch.setattr(opening, "_copier", slowly)
    with begin_block_manager(plan(service)) as pending:
        assert sessions(service) == 0
        go.set()
        blocks = pending.result()
        assert pending.result() is blocks
        assert blocks.kv_pages().count > 0
        assert sessions(service) == 1
        assert {"copier and context", "device and daemon", "tables", "DRAM mapping", "HBM mapping"} <= set(
            pending.times
        )
        assert min(pending.times.values()) >= 0
        pending.pin_ahead()  # a twin has nothing to pin
    assert sessions(service) == 0


def test_a_failure_is_told_where_the_result_is_wanted(service: Service) -> None:
    no_gpu = replace(plan(service), device="cuda:63")
    with begin_block_manager(no_gpu) as pending, pytest.raises(KvstoreError):
        pending.result()
    no_daemon = replace(plan(service), socket="/nowhere.sock")
    with begin_block_manager(no_daemon) as pending, pytest.raises(Unavailable):
        pending.result()
    assert sessions(service) == 0


def test_who_fails_meanwhile_leaves_no_session(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = threading.Event()
    attach = Client.attach

    def observed(self: Client, *args: object, **kwargs: object) -> object:
        session = attach(self, *args, **kwargs)  # type: ignore[arg-type]
        attached.set()
        return session

    monkeypatch.setattr(Client, "attach", observed)
    with pytest.raises(ValueError, match="bad weights"), begin_block_manager(plan(service)):
        raise ValueError("bad weights")
    assert attached.is_set()
    assert sessions(service) == 0
