"""KV memory as a share of what is free, and DRAM that is pinned as it comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.blocks.opening import open_block_manager
from engine_adapter.budget import device_spec, hbm_bytes
from kvstore.client import connect
from kvstore.config import HbmBudget
from kvstore.errors import ConfigError
from kvstore.units import GIB, MIB
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.hbm_scenes import killed_worker
from tests.support.worker import PARTS, geometry
from tiers.twin import TwinDevice


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with started(small_config(tmp_path)) as service:
        yield service


def test_a_size_needs_nobody() -> None:
    assert hbm_bytes(HbmBudget(size_bytes=GIB), "cuda:7", "/nowhere") == GIB


def test_orphans_count_as_free(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted worker took a share of what its predecessor's blocks had left, and had most of them dropped."""
    monkeypatch.setattr(TwinDevice, "free_bytes", lambda _self: 36 * MIB)
    half = HbmBudget(share_percent=50)
    assert hbm_bytes(half, "cpu", None) == 18 * MIB
    assert hbm_bytes(half, "cpu", service.socket) == 18 * MIB
    killed_worker(service, "twin")
    assert hbm_bytes(half, "cpu", service.socket) == (36 + 64) * MIB // 2


def test_more_than_the_host_has_is_refused_before_any_is_taken(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for 900 GiB by mistake, a worker took all memory extent by extent; then it stayed as an orphan."""
    monkeypatch.setattr(TwinDevice, "free_bytes", lambda _self: 36 * MIB)
    assert hbm_bytes(HbmBudget(size_bytes=36 * MIB), "cpu", "/nowhere") == 36 * MIB
    for socket in (None, service.socket):
        with pytest.raises(ConfigError, match=r"worker.hbm: 37MiB of host memory .* 36MiB is there"):
            hbm_bytes(HbmBudget(size_bytes=37 * MIB), "cpu", socket)
    killed_worker(service, "twin")  # its 64 MiB are there, whoever maps them
    assert hbm_bytes(HbmBudget(size_bytes=100 * MIB), "cpu", service.socket) == 100 * MIB
    with pytest.raises(ConfigError):
        hbm_bytes(HbmBudget(size_bytes=101 * MIB), "cpu", service.socket)


def test_twins_of_all_shards_share_one_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards were each given half of what was free: all of it, and of a size only one was looked at."""
    monkeypatch.setattr(TwinDevice, "free_bytes", lambda _self: 36 * MIB)
    assert hbm_bytes(HbmBudget(share_percent=50), "cpu", None, shards=2) == 9 * MIB
    assert hbm_bytes(HbmBudget(size_bytes=18 * MIB), "cpu", None, shards=2) == 18 * MIB
    with pytest.raises(ConfigError, match=r"worker.hbm: 38MiB of host memory .* 36MiB is there"):
        hbm_bytes(HbmBudget(size_bytes=19 * MIB), "cpu", None, shards=2)
    assert hbm_bytes(HbmBudget(size_bytes=GIB), "cuda:0", None, shards=2) == GIB


def test_a_device_by_its_name() -> None:
    assert (device_spec("cpu", 5).kind, device_spec("cpu", 5).hbm_bytes) == ("twin", 5)
    assert (device_spec("cuda:3", 5).kind, device_spec("cuda:3", 5).index) == ("cuda", 3)


def test_a_gpu_that_is_not_there_leaves_no_session(service: Service) -> None:
    from kvstore.errors import KvstoreError

    with (
        pytest.raises(KvstoreError),
        open_block_manager(
            socket=service.socket,
            name="no gpu",
            geometry=geometry(),
            parts=PARTS,
            hbm_bytes=MIB,
            device="cuda:63",
        ),
    ):
        pass
    assert service.stats().sessions == []


class Registry:
    """A DramListener that keeps what is mapped now."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.mapped
        self.mapped[address] = nbytes
        self.calls += 1

    def unregister(self, address: int) -> None:
        del self.mapped[address]


def test_dram_is_announced_while_it_is_mapped(tmp_path: Path) -> None:
    """Copies from memory that is not pinned are slow, and memory that is unmapped while it is pinned stays taken."""
    registry = Registry()
    config = small_config(tmp_path, dram_bytes=64 * MIB, dram_extent_bytes=16 * MIB)
    with started(config) as first, connect(first.socket) as client:
        with client.attach("pins", geometry(), device_spec("cpu", MIB), listener=registry) as session:
            wait_for("all of it", lambda: sum(registry.mapped.values()) == session.dram.nbytes == 64 * MIB)
            before = registry.calls
            first.kill_daemon()
            wait_for("a resumed session", lambda: session.connected)
            assert registry.calls == before, "what is mapped is not mapped again"
        assert registry.mapped == {}
