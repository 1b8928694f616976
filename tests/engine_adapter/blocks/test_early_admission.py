"""Requests admitted while their prefix is still being loaded: who may use what meanwhile, and every way it can end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.base import Admission, RequestId
from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from engine_adapter.loading.layer_groups import LayerGroups
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.blocks import block_bytes
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.driver import Driver, attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS
GROUPS = 4
CACHED = 6
RULE = LayerGroups(layers=GROUPS, slot_bytes=16 << 10, chunk_tokens=1 << 20, most=GROUPS, least_tokens=1)
_FIRST = iter(range(1, 1 << 30))


class SteppedCopier(TwinCopier):
    """Loads advance by one group for each `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.began = threading.Event()
        self.sources: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        """Of the load that came last."""

    def submit(self, batch: CopyBatch) -> bool:
        if batch.direction is Direction.LOAD:
            self.sources = batch.sources
        return super().submit(batch)

    def step(self, groups: int = 1) -> None:
        self.turns.release(groups)

    def _copy(self, batch: CopyBatch, begin: int, end: int) -> None:
        if batch.direction is Direction.LOAD:
            self.began.set()
            assert self.turns.acquire(timeout=20)
        super()._copy(batch, begin, end)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(small_config(tmp_path_factory.mktemp("kv"))) as service:
        yield service
        assert service.faults() == []


def prompt(blocks: int = CACHED) -> list[int]:
    """A prompt that nobody else has."""
    return [next(_FIRST), *range(1, blocks * B + 1)]


@contextmanager
def loading(
    service: Service, tokens: list[int], *, pages: int = 128, rule: LayerGroups | None = RULE
) -> Iterator[tuple[Driver, SteppedCopier]]:
    """An engine on a device that has lost its blocks; those of `tokens` are in DRAM."""
    with attached(service.socket, "before") as engine:
        engine.run("cold", tokens)
        engine.settle()
    service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    copier = SteppedCopier()
    with attached(service.socket, "loads", pages=pages, copier=copier, layer_groups=rule) as engine:
        try:
            yield engine, copier
        finally:
            copier.step(100)


def admitted_early(engine: Driver, tokens: list[int], name: str = "r") -> tuple[RequestId, Admission]:
    request = engine.enqueue(name, tokens)
    admission = engine.admit(request)
    assert admission.arriving is not None
    assert admission.cached_by_tier == {"dram": CACHED * B}
    return request, admission


def layers_here(engine: Driver, request: RequestId) -> list[bool]:
    """By layer, whether all its bytes of the cached blocks are."""
    pages, hashes = engine.blocks.pages(request), engine.chain(request).hashes
    memory = np.asarray(engine.blocks.kv_pages())
    layers = []
    for layer in range(GROUPS):
        part = slice(layer * memory.shape[1] // GROUPS, (layer + 1) * memory.shape[1] // GROUPS)
        layers.append(
            all(
                (memory[pages[block], part] == block_bytes(hashes[block], memory.shape[1])[part]).all()
                for block in range(CACHED)
            )
        )
    return layers


def test_layers_come_one_group_after_the_other(service: Service) -> None:
    tokens = prompt()
    with loading(service, tokens) as (engine, copier):
        request, admission = admitted_early(engine, tokens)
        assert admission.arriving is not None
        for group in range(GROUPS):
            copier.step()
            assert admission.arriving.wait_for(group)
            assert layers_here(engine, request)[: group + 1] == [True] * (group + 1)
            if group < GROUPS - 1:
                assert not layers_here(engine, request)[-1]
        engine.fill(request, CACHED * B)
        engine.check(request, CACHED)
        engine.release(request)
        engine.await_nothing_used()
        again = engine.run("again", tokens)
        assert again.cached_by_tier == {"hbm": CACHED * B}
        assert again.arriving is None
        engine.await_nothing_used()


def test_a_block_that_differs_breaks_its_step_off_before_the_last_group(service: Service) -> None:
    """Its first layers are computed with by then; nothing of that is committed, and who asks again computes it."""
    tokens = prompt()
    before = service.stats().counters["wrong_blocks"]
    with loading(service, tokens) as (engine, copier):
        request, admission = admitted_early(engine, tokens)
        assert admission.arriving is not None
        copier.step(GROUPS - 1)
        assert admission.arriving.wait_for(GROUPS - 2)
        last = int(copier.sources[2]) + engine.session.hbm.slot_bytes - 1
        ctypes.memset(last, ctypes.c_uint8.from_address(last).value ^ 1, 1)
        copier.step()
        assert not admission.arriving.wait_for(GROUPS - 1)
        assert admission.arriving.differs
        engine.release(request)
        copier.step(100)
        wait_for("the report", lambda: service.stats().counters["wrong_blocks"] == before + 1)
        assert engine.run("again", tokens).cached_tokens == 2 * B
        engine.await_nothing_used()


def test_nobody_else_hits_what_is_under_way(service: Service) -> None:
    """The store learns of a load when it has ended: another request with the prefix waits until then."""
    tokens = prompt()
    with loading(service, tokens) as (engine, copier):
        first, _ = admitted_early(engine, tokens)
        copier.step(GROUPS - 1)
        second = engine.enqueue("second", tokens)
        for _ in range(10):
            assert engine.try_admit(second) is None
            engine.blocks.end_step()
            engine.blocks.wait(0.02)
        copier.step()
        assert engine.admit(second).cached_by_tier == {"hbm": CACHED * B}
        for request in (first, second):
            engine.fill(request, CACHED * B)
            engine.check(request, CACHED)
            engine.release(request)
        engine.await_nothing_used()


def test_a_load_is_awaited_whole_where_others_run(service: Service) -> None:
    """A step that waited for a load would hold up the tokens of all others in it."""
    tokens = prompt()
    with loading(service, tokens) as (engine, copier):
        other = engine.enqueue("other", prompt())
        engine.admit(other)
        request = engine.enqueue("r", tokens)
        wait_for("the load", lambda: engine.try_admit(request) is None and copier.began.is_set())
        for _ in range(5):
            assert engine.try_admit(request) is None
            engine.blocks.wait(0.01)
        copier.step()  # it comes as a whole
        assert engine.admit(request).arriving is None
        engine.release(request)
        engine.release(other)
        engine.await_nothing_used()


@pytest.mark.parametrize("rule", [None, RULE], ids=["off", "short"])
def test_a_load_that_does_not_pay_is_awaited_whole(service: Service, rule: LayerGroups | None) -> None:
    tokens = prompt()
    few = (
        None
        if rule is None
        else LayerGroups(layers=GROUPS, slot_bytes=16 << 10, chunk_tokens=512, most=GROUPS, least_tokens=2)
    )
    with loading(service, tokens, rule=few) as (engine, copier):
        request = engine.enqueue("r", tokens)
        wait_for("the load", lambda: engine.try_admit(request) is None and copier.began.is_set())
        copier.step()
        assert engine.admit(request).arriving is None
        engine.release(request)


@pytest.mark.parametrize("groups", [0, 1, GROUPS - 1, GROUPS])
@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_an_end_at_any_moment_leaks_nothing(service: Service, groups: int, end: str) -> None:
    """Pages of a request that ends while they are being loaded stay its load's, and are given to nobody."""
    tokens = prompt()
    with loading(service, tokens, pages=32) as (engine, copier):
        request, admission = admitted_early(engine, tokens)
        assert admission.arriving is not None
        if groups:
            copier.step(groups)
            assert admission.arriving.wait_for(groups - 1)
        wait_for("the copy", copier.began.is_set)
        engine.blocks.release(request)
        if end == "preempt":
            engine.blocks.enqueue(request, tokens)
        else:
            other = engine.enqueue("other", prompt(14))
            engine.admit(other)
            engine.fill(other, 0)
            copier.step(GROUPS)
            wait_for("the end of it", lambda: copier.stats().loaded_blocks == CACHED)
            engine.check(other, 14)
            engine.release(other)
            engine.await_nothing_used()
            return
        copier.step(2 * GROUPS)
        engine.admit(request)
        wait_for("the end of it", lambda: copier.stats().waiting_blocks == 0)
        engine.check(request, CACHED)
        engine.fill(request, CACHED * B)
        engine.release(request)
        engine.await_nothing_used()
        assert engine.run("after", tokens).cached_tokens == CACHED * B


def test_a_daemon_that_dies_between_two_groups_is_noticed_by_nobody(service: Service) -> None:
    tokens = prompt()
    with loading(service, tokens) as (engine, copier):
        request, admission = admitted_early(engine, tokens)
        assert admission.arriving is not None
        copier.step(2)
        assert admission.arriving.wait_for(1)
        service.kill_daemon()
        copier.step(2)
        assert admission.arriving.wait_for(GROUPS - 1)
        engine.fill(request, CACHED * B)
        engine.check(request, CACHED)
        engine.blocks.end_step()
        engine.settle()
        engine.release(request)
        engine.await_nothing_used()
        assert engine.run("warm", tokens).cached_by_tier == {"hbm": CACHED * B}
        engine.await_nothing_used()


@pytest.mark.slow
def test_a_new_session_waits_for_a_load_of_the_lost_one(tmp_path: Path) -> None:
    """Daemon and keeper die between two groups, and the request ends: the pages are the load's until it has ended."""
    config, tokens = small_config(tmp_path), prompt()
    with started(config) as first, loading(first, tokens) as (engine, copier):
        request, admission = admitted_early(engine, tokens)
        assert admission.arriving is not None
        copier.step()
        assert admission.arriving.wait_for(0)
        keeper, daemon = first.keeper_pid, first.daemon_pid
        os.kill(keeper, signal.SIGKILL)
        os.kill(daemon, signal.SIGKILL)
        wait_for("the loss", lambda: not engine.session.connected)
        with started(config) as second:
            engine.release(request)
            deadline = time.monotonic() + 1.5  # a new session comes within a second where nothing is in use
            while time.monotonic() < deadline:
                engine.blocks.end_step()
                assert not engine.session.connected
                time.sleep(0.02)
            copier.step(100)
            engine.run("cold", tokens)
            engine.run("again", tokens)  # the first was named by a key that was lost with the daemon
            assert engine.run("warm", tokens).cached_tokens == CACHED * B
            engine.await_nothing_used()
            assert second.faults() == []


_DIES = """
import sys
from tests.engine_adapter.blocks.test_early_admission import RULE
from tests.support.driver import attached
socket, *tokens = sys.argv[1:]
with attached(socket, "dies", layer_groups=RULE) as engine:
    request = engine.enqueue("r", [int(token) for token in tokens])
    admission = engine.admit(request)
    while True:  # the fault is in the copier's thread
        assert admission.arriving.wait_for(3)
"""


def test_what_a_worker_had_loaded_of_blocks_is_nobodys_when_it_dies(service: Service) -> None:
    """Killed between two groups of their layers."""
    tokens = prompt()
    with attached(service.socket, "before") as engine:
        engine.run("cold", tokens)
        engine.settle()
    service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    environ = os.environ | {"KVSTORE_FAULT": "copy.group:kill:2"}
    command = [sys.executable, "-c", _DIES, service.socket, *map(str, tokens)]
    died = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    with attached(service.socket, "next") as engine:
        assert engine.run("warm", tokens).cached_by_tier == {"dram": CACHED * B}
        engine.await_nothing_used()
