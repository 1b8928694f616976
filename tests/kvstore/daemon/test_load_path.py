"""What a disk holds is taken over whole: nothing goes for want of slots that are only to come."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eviction.lru import Lru
from kvstore.config import NvmePath, ServeConfig
from kvstore.daemon import load_path
from kvstore.daemon.movers import Movers
from kvstore.daemon.owner import Owner
from kvstore.layout import TableShape, Tier, open_columns, table_bytes, touch_key
from kvstore.moves import StoreLimits
from kvstore.store import Store
from kvstore.units import MIB
from tiers.nvme.capacity import SlabPlan
from tiers.nvme.index import RECORD
from tiers.nvme.recover import FoundRecords
from tiers.nvme.slab import SlabFile

SLOT = 4096
SLABS = 9
MAP_BYTES = 8 * MIB


class SlowlyClosed(FoundRecords):
    """A child that takes its time to end."""

    def close(self) -> None:
        time.sleep(0.05)


def on_disk(last_slots: int) -> tuple[list[SlabFile], np.ndarray]:
    """Slabs of which all but the last are full, and the RECORD[] of their blocks."""
    slabs = [SlabFile(number=number, slot_bytes=SLOT, nbytes=MIB) for number in range(1, SLABS + 1)]
    records = np.zeros((SLABS - 1) * slabs[0].slots + last_slots, dtype=RECORD)
    at = np.arange(len(records))
    records["slab"], records["slot"] = at // slabs[0].slots + 1, at % slabs[0].slots
    records["length"], records["generation"], records["depth"] = SLOT, 1, at % 16
    records["touch"] = touch_key(1_700_000_000_000, records["depth"])
    records["hash"] = np.random.default_rng(1).integers(1, 1 << 64, size=(len(records), 2), dtype=np.uint64)
    records["ns_digest"] = (5, 6)
    return slabs, records


def movers_of(folder: Path) -> tuple[Movers, Owner]:
    """Of a daemon that has just started, with an empty store."""
    shape = TableShape(
        max_rows=4096, hbm_slots=8, dram_slots=8, nvme_slots=4096, devices=1, max_extents=64, max_sessions=8,
        max_namespaces=4,
    )  # fmt: skip
    memory = memoryview(bytearray(table_bytes(shape)))
    store = Store.create(memory, shape, StoreLimits(reserve_slots=8, reserve_fraction=0.02), Lru())
    config = ServeConfig(
        socket=str(folder / "s"), nvme=(NvmePath(path=str(folder), capacity_bytes=64 * MIB),)
    )
    owner = Owner(store=store, config=config, boot_epoch=1)
    nobody: Any = SimpleNamespace(listen=lambda *_: None)
    tables: Any = SimpleNamespace(columns=open_columns(memory, shape), fresh=True)
    return Movers(owner=owner, kept=nobody, memory=nobody, tables=tables, secret=b"", inherited={}), owner


@pytest.mark.parametrize("last_slots", [3, 126], ids=["behind is room", "all are full"])
def test_no_block_goes_before_all_slabs_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_slots: int
) -> None:
    """The background's reserve of free slots was made by evicting, while the slabs behind were not entered yet, and
    while those that nothing is in were not there: blocks that a flush had acknowledged were gone after a full restart.
    """
    monkeypatch.setattr(load_path, "_TURN_S", 0.0)
    slabs, records = on_disk(last_slots)
    plan = SlabPlan(slabs=2 * SLABS, slab_bytes=MIB, map_bytes=MAP_BYTES)
    directory = SimpleNamespace(path=tmp_path, disk=None)
    place: Any = SimpleNamespace(plan=plan, slabs=tuple(slabs), directory=directory, crowded_bytes=0)
    ticks = 0

    async def work() -> Owner:
        nonlocal ticks
        movers, owner = movers_of(tmp_path)
        entering = asyncio.ensure_future(movers._enter(0, place, SlowlyClosed(records, slabs, {})))
        while not entering.done():
            owner.store.tick(owner.now_ms())
            ticks += 1
            await asyncio.sleep(0)
        assert entering.result() == []
        owner.store.tick(owner.now_ms())
        return owner

    owner = asyncio.run(work())
    stats = owner.store.stats()
    assert ticks > 10, "the background had its turns in the midst of it"
    assert stats.counters["loaded_blocks"] == len(records)
    assert stats.counters.get("evictions_nvme", 0) == 0
    assert next(tier for tier in stats.tiers if tier.tier is Tier.NVME).sealed_slots == len(records)
