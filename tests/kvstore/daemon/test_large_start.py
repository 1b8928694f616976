"""A start over more blocks than it waits for: it serves at once, and what happens meanwhile holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import Durability, ServeConfig
from kvstore.layout import touch_key
from kvstore.units import GIB, MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.raw_client import RawClient
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex
from tiers.nvme.slab import SlabFile, stride_bytes

BLOCKS = 600_000
SLOT = 4096
SLAB_BYTES = 256 * MIB
ALL = 0xFFFFFFFF


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """What a daemon would leave: an index of 600,000 blocks, and slabs that take no room."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        place = Path(name)
        with started(config_of(place)):
            pass
        nvme = place / "nvme"
        index = DurableIndex(nvme, map_bytes=256 * MIB, durability=Durability.PROCESS)
        rng = np.random.default_rng(1)
        in_slab = SLAB_BYTES // stride_bytes(SLOT)
        for number, first in enumerate(range(0, BLOCKS, in_slab), start=1):
            count = min(in_slab, BLOCKS - first)
            slab = SlabFile(number=number, slot_bytes=SLOT, nbytes=SLAB_BYTES)
            with (nvme / slab.name).open("wb") as file:
                file.truncate(SLAB_BYTES)
            at = np.arange(first, first + count)
            records = np.zeros(count, dtype=RECORD)
            records["slab"], records["slot"], records["length"] = number, at - first, SLOT
            records["generation"], records["depth"] = 1, at % 512
            records["touch"] = touch_key(1_700_000_000_000, records["depth"])
            records["hash"] = rng.integers(1, 1 << 64, size=(count, 2), dtype=np.uint64)
            records["ns_digest"] = (5, 6)
            index.commit(records, np.empty(0, dtype=SLOT_REF))
        index.close()
        yield place


def config_of(place: Path) -> ServeConfig:
    return small_config(
        place, nvme_bytes=6 * GIB, nvme_extent_bytes=SLAB_BYTES, max_rows=1 << 20, dram_bytes=16 * MIB
    )


def loaded(service: Service) -> int:
    return int(service.stats().counters.get("loaded_blocks", 0))


def test_it_serves_before_it_knows_and_then_knows_all(folder: Path) -> None:
    with started(config_of(folder)) as service:
        early = loaded(service)
        one = RawClient(service.socket).begin()
        hashes, _ = one.fill(range(200))
        assert service.faults() == [], "in the midst of it"
        assert set(one.acquire(hashes, lease=3).outcomes) == {pb.OUTCOME_HIT_HBM}
        assert wait_for("all blocks", lambda: loaded(service)) == BLOCKS
        wait_for("the path", service.mover_pids)
        assert service.tier("nvme").sealed_slots == BLOCKS, "none was evicted for slots that were to come"
        assert early == 0, "it was waited for"
        assert set(one.acquire(hashes, lease=4).outcomes) == {pb.OUTCOME_HIT_HBM}
        assert service.faults() == []
        one.close()


def test_a_clear_in_the_midst_of_it_holds(folder: Path) -> None:
    """The last of the module: nothing is left."""
    config = config_of(folder)
    with started(config) as service:
        one = RawClient(service.socket).begin()
        one.admin.Clear(pb.ClearRequest(namespace=ALL), timeout=DEADLINE_S)
        wait_for("the path", service.mover_pids)
        wait_for("an empty tier", lambda: service.tier("nvme").sealed_slots == 0)
        assert service.faults() == []
        one.close()
    with started(config) as service:
        wait_for("the path", service.mover_pids)
        assert service.tier("nvme").sealed_slots == 0
