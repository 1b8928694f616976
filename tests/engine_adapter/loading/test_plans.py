"""Load or recompute over a real daemon and a throttled disk: every page is checked, whatever way it came."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from engine_adapter.base import RequestId
from engine_adapter.blocks.manager import KvstoreBlockManager
from engine_adapter.copying.copier import Copier, TwinCopier
from engine_adapter.loading.choice import ChoiceSettings, LoadMode
from kvstore.client import Client, DeviceSpec, Session, connect
from kvstore.config import NvmeThrottle
from kvstore.layout import Tier
from kvstore.planning.planner import Ends
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.blocks import block_bytes
from tests.support.daemon import Service, small_config, started
from tests.support.driver import Driver
from tests.support.worker import BLOCK_TOKENS, PARTS, geometry

B = BLOCK_TOKENS
BLOCKS = 400
READ_BYTES_PER_S = 2 * MIB  # 128 blocks of 16 KiB a second, and as many at once after a pause
_FIRST = iter(range(1, 1 << 30))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = replace(
        small_config(tmp_path_factory.mktemp("kv"), nvme_bytes=256 * MIB, dram_bytes=16 * MIB),
        nvme_throttle=NvmeThrottle(read_bytes_per_s=READ_BYTES_PER_S),
    )
    with started(config) as service:
        yield service


class PlanningDriver(Driver):
    """A driver whose block manager decides as it is told."""

    def __init__(self, client: Client, session: Session, copier: Copier, loads: ChoiceSettings) -> None:
        self.client, self.session, self.copier = client, session, copier
        self.blocks = KvstoreBlockManager(session, PARTS, copier, loads=loads)
        self.namespace = session.open_namespace(PARTS)
        self.tokens = {}


@contextmanager
def attached(socket: str, name: str, *, pages: int, loads: ChoiceSettings) -> Iterator[Driver]:
    """An engine with so many pages of 16 KiB."""
    shape = geometry()
    spec = DeviceSpec(hbm_bytes=pages * shape.slot_bytes)
    with connect(socket, timeout_s=10.0) as client, client.attach(name, shape, spec) as session:
        copier = TwinCopier()
        try:
            yield PlanningDriver(client, session, copier, loads)
        finally:
            copier.close(10.0)


class Engine:
    """A driver that computes as an engine does: in steps, each as long as its tokens take, of which it tells."""

    def __init__(self, driver: Driver, *, tokens_per_s: float, chunk_tokens: int = 64) -> None:
        self.driver = driver
        self.blocks = driver.blocks
        self.token_s = 1.0 / tokens_per_s
        self.chunk_tokens = chunk_tokens
        self.computed_tokens = 0

    def run(self, name: str, tokens: list[int]) -> float:
        """One request to its first token; the seconds that took. Every page of it holds what its hash says."""
        driver, began = self.driver, time.monotonic()
        request = driver.enqueue(name, tokens)
        admission = driver.admit(request)
        at = admission.cached_tokens
        while at < len(tokens):
            reach = self.blocks.reach(request, at)
            at = reach.computed_tokens
            end = min(len(tokens), reach.stop_tokens, at + self.chunk_tokens)
            if end > at:
                self._step(request, at, end)
                at = end
            else:
                self.blocks.wait(0.01)
            self.blocks.end_step()
        took_s = time.monotonic() - began
        driver.settle()
        driver.check(request, len(tokens) // B)
        driver.release(request)
        return took_s

    def _step(self, request: RequestId, begin: int, end: int) -> None:
        """Writes whole blocks as their hashes say; a block that was loaded must not be written."""
        began = time.monotonic()
        pages, hashes = self.blocks.pages(request).copy(), self.driver.chain(request).hashes
        memory = np.asarray(self.blocks.kv_pages())
        time.sleep((end - begin) * self.token_s)
        for block in range(begin // B, end // B):
            memory[pages[block]] = block_bytes(hashes[block], memory.shape[1])
        self.computed_tokens += end - begin
        self.blocks.computed([(begin, end)], time.monotonic() - began)
        self.blocks.commit(request, self.driver.tokens[request], end)


def prompt(blocks: int = BLOCKS) -> list[int]:
    """A prompt that nobody else has, of so many full blocks and a token."""
    return [next(_FIRST), *range(1, blocks * B + 1)]


def on_disk_alone(service: Service, driver: Driver, name: str, tokens: list[int]) -> None:
    """Computes a prompt, and has everything but the disk forget it."""
    driver.run(name, tokens)
    service.call("Flush", pb.FlushRequest(), timeout_s=30.0)
    others = [prompt() for _ in range(4)]  # 25 MiB through 16 of DRAM and of HBM
    for number, other in enumerate(others):
        driver.run(f"{name} {number}", other)
    # DRAM that is being written cannot make way for reads.
    service.call("Flush", pb.FlushRequest(), timeout_s=30.0)
    tiers = driver.session.match(driver.namespace, driver.namespace.chain(tokens).hashes).tiers
    assert (tiers == 2).mean() > 0.9, np.bincount(tiers)


def settings(mode: LoadMode, ends: Ends = Ends.BOTH) -> ChoiceSettings:
    return ChoiceSettings(mode=mode, ends=ends, chunk_tokens=64)


def test_of_what_the_disk_has_all_is_loaded_or_computed_or_both_from_both_ends(service: Service) -> None:
    """400 blocks take 2 s from this disk and 1.6 s to compute. Each run checks every page of the request."""
    computed: dict[str, int] = {}
    for mode in LoadMode:
        with attached(service.socket, mode, pages=1024, loads=settings(mode)) as driver:
            engine = Engine(driver, tokens_per_s=1000.0)
            tokens = prompt()
            on_disk_alone(service, driver, mode, tokens)
            engine.run(f"{mode} again", tokens)
            computed[mode] = engine.computed_tokens
            driver.await_nothing_used()
            if mode is LoadMode.AUTO:
                stats = driver.held().loads
                assert (stats.both_ends_requests, stats.load_requests) == (1, 0)
                assert stats.last.startswith(f"loaded {stats.loaded_blocks} of ")
                assert 0 < stats.computed_blocks < BLOCKS
                before = engine.computed_tokens
                engine.run("from hbm", tokens)  # what was loaded and what was computed
                assert engine.computed_tokens - before < 0.5 * len(tokens)
        service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    assert computed["always"] < 0.1 * BLOCKS * B
    assert computed["never"] > 0.9 * BLOCKS * B
    assert computed["always"] < computed["auto"] < computed["never"]
    assert service.faults() == []


def test_what_was_computed_because_the_disk_is_slow_is_found_in_memory(service: Service) -> None:
    """A block that the disk had stayed private when it was computed again: the next request computed it, too."""
    with attached(service.socket, "again", pages=1024, loads=settings(LoadMode.NEVER)) as driver:
        tokens = prompt()
        on_disk_alone(service, driver, "slow", tokens)
        engine = Engine(driver, tokens_per_s=1e6)
        engine.run("computes", tokens)
        first = engine.computed_tokens
        engine.run("finds", tokens)
        assert engine.computed_tokens - first == 1
        driver.await_nothing_used()
    assert service.faults() == []


def test_a_request_that_waits_for_a_disk_does_not_ask_again_and_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked every 20 ms, as if it lacked slots; each time what had not come yet counted as a slow disk's."""
    with attached(service.socket, "waits", pages=1024, loads=settings(LoadMode.ALWAYS)) as driver:
        tokens = prompt()
        on_disk_alone(service, driver, "waits", tokens)
        asked = []
        acquire = driver.session.acquire
        monkeypatch.setattr(
            driver.session, "acquire", lambda *args, **kwargs: asked.append(0) or acquire(*args, **kwargs)
        )
        engine = Engine(driver, tokens_per_s=1e6)
        took_s = engine.run("waits again", tokens)
        assert took_s > 1.0
        assert len(asked) < 6, asked
        disk = driver.blocks._choice.tier_speed(Tier.NVME)
        assert disk is not None
        assert READ_BYTES_PER_S / 2 < disk.bytes_per_s < READ_BYTES_PER_S * 1.5
        driver.await_nothing_used()
    assert service.faults() == []


def test_an_abort_while_both_ends_are_under_way_leaks_nothing(service: Service) -> None:
    with attached(service.socket, "aborts", pages=1024, loads=settings(LoadMode.AUTO)) as driver:
        tokens = prompt()
        on_disk_alone(service, driver, "aborted", tokens)
        request = driver.enqueue("gone", tokens)
        driver.admit(request)
        driver.blocks.reach(request, 0)
        time.sleep(0.05)
        driver.blocks.reach(request, 0)
        driver.release(request)
        driver.await_nothing_used()
    assert service.faults() == []


def test_a_request_does_not_wait_for_one_behind_it_that_is_no_longer_asked_for(service: Service) -> None:
    """Two of one prefix were to compute it. The first was past the scheduler's patience, so nobody behind it was
    admitted, and waited for the second to compute what had its slots already: until a client went, for ever."""
    with attached(service.socket, "circle", pages=64, loads=settings(LoadMode.NEVER)) as driver:
        tokens = prompt(20)
        driver.run("first", tokens)
        for other in range(4):
            driver.run(f"other {other}", prompt(20))  # HBM has it no more
        tiers = driver.session.match(driver.namespace, driver.namespace.chain(tokens).hashes).tiers
        assert (tiers == Tier.DRAM).any()
        head, behind = driver.enqueue("head", tokens), driver.enqueue("behind", tokens)
        assert driver.try_admit(behind) is None  # asks, in slots of its own; from now on it is passed over
        assert driver.try_admit(head) is None  # while the one behind it is asked for it need not compute, too
        assert driver.admit(head, timeout_s=10.0).cached_tokens < 20 * B
        driver.release(head)
        driver.release(behind)
        driver.await_nothing_used()
    assert service.faults() == []
