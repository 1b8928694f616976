"""One device has one pool of pages of a size: workers share it, however they come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client import DeviceSpec, connect
from kvstore.client.group import Shard
from kvstore.client.member import MemberMemory
from kvstore.geometry import Geometry, LayerGroup
from kvstore.wire import descriptors as wire
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import BLOCK_TOKENS, SLOT_BYTES, RawClient
from tiers.twin import TwinDevice

Make = Callable[[], RawClient]
GROUP = LayerGroup(layers=1, kv_heads=1, head_dim=512, block_tokens=BLOCK_TOKENS)
GEOMETRY = Geometry(groups=(GROUP,), dtype="float32")
PAGES = 64


def test_pages_beyond_a_sessions_own_budget_are_refused(client: Make) -> None:
    one, other = client(), client()
    for each in (one, other):
        each.attach(hbm_bytes=PAGES * SLOT_BYTES)
        each.hello()
    assert isinstance(one.give_hbm(PAGES), wire.Accepted)
    refused = other.give_hbm(1)
    assert isinstance(refused, wire.Refused)
    assert refused.text == "device 0 has 1MiB of the 1MiB that this session may have"


@pytest.mark.parametrize("extent_pages", [PAGES, 8, 5])
def test_workers_that_start_at_once_make_one_pool(
    service: Service, client: Make, monkeypatch: pytest.MonkeyPatch, extent_pages: int
) -> None:
    """Two workers that started on one device at once each made a whole pool: twice the memory that was allowed."""
    monkeypatch.setattr(TwinDevice, "extent_bytes", extent_pages * SLOT_BYTES)
    device = DeviceSpec(hbm_bytes=PAGES * SLOT_BYTES)
    for attempt in range(5):
        barrier, pages = threading.Barrier(3), []

        def work(name: str, barrier: threading.Barrier, pages: list[int]) -> None:
            with connect(service.socket, timeout_s=30.0) as own:
                barrier.wait(10)
                with own.attach(name, GEOMETRY, device) as session:
                    barrier.wait(10)
                    wait_for("the pages of the others", lambda: session.hbm.num_pages == PAGES)
                    pages.append(session.hbm.num_pages)

        threads = [
            threading.Thread(target=work, args=(f"at-once-{attempt}-{i}", barrier, pages)) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert pages == [PAGES] * 3
        assert service.tier("hbm").allocated_bytes == PAGES * SLOT_BYTES
        wait_for("no session", lambda: not service.stats().sessions)
        service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        assert service.tier("hbm").allocated_bytes == 0


class Pair:
    """A group of two, whose other process is a thread of this one: both have a twin in the memory of one host."""

    def __init__(self, hbm_bytes: int) -> None:
        self.members = 2
        self._device = TwinDevice()
        self.uuids, self.identities = [self._device.uuid], [self._device.identity]
        self.memory = MemberMemory(Shard(member=1, members=2), hbm_bytes, self._device, timeout_s=30.0)
        self._thread = threading.Thread()

    def join(self, path: str, token: bytes, slot_bytes: int, device: int) -> None:
        self._thread = threading.Thread(target=self.memory.join, args=(path, token, slot_bytes, device))
        self._thread.start()

    def wait_joined(self, num_pages: int) -> None:
        self._thread.join(10.0)
        assert not self._thread.is_alive(), f"{num_pages} pages"

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.memory.close()
        self._device.close()


def test_twins_of_all_shards_count(tmp_path: Path) -> None:
    """Of two shards in one host's memory the device showed one, and the most that it may have held for one."""
    shard_bytes = PAGES * SLOT_BYTES // 2
    config = replace(small_config(tmp_path), hbm_bytes=2 * shard_bytes)
    with started(config) as service, connect(service.socket, timeout_s=30.0) as client:
        pair = Pair(shard_bytes)
        with client.attach("two", GEOMETRY, DeviceSpec(hbm_bytes=shard_bytes), group=pair):
            (device,) = service.stats().devices
            assert device.owned_bytes == service.tier("hbm").allocated_bytes == 2 * shard_bytes
        pair.close()
        wait_for("an orphan", lambda: service.stats().devices[0].orphan_bytes == 2 * shard_bytes)
        pair = Pair(2 * shard_bytes)
        with client.attach("more", GEOMETRY, DeviceSpec(hbm_bytes=2 * shard_bytes), group=pair) as session:
            assert session.hbm.num_pages == PAGES, "all that one device may have"
            assert service.tier("hbm").allocated_bytes == config.hbm_bytes
        pair.close()
