"""One device has one pool of pages of a size: workers share it, however they come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvstore.client import DeviceSpec, connect
from kvstore.geometry import Geometry, LayerGroup
from kvstore.wire import descriptors as wire
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, wait_for
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
            with connect(service.socket, timeout_s=10.0) as own:
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
