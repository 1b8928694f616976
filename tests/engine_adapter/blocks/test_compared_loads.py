"""Blocks that an engine stores with their checksums, and compares when it loads them: nobody else looks at them.

Over a real daemon and a real disk, whose faults are made below the mover.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from kvstore.layout import NONE, SlotState, Tier, states
from kvstore.tables.checksums import Checksums
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.blocks import block_bytes
from tests.support.daemon import MIB, Service, small_config, started, wait_for
from tests.support.driver import attached
from tests.support.worker import BLOCK_TOKENS

B = BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A service with a disk, whose faults a file says."""

    service: Service
    faults: Path

    def say(self, line: str) -> None:
        """What is wrong with the disk from now on; empty: nothing."""
        self.faults.write_text(line + "\n")

    def count(self, name: str) -> int:
        return self.service.stats().counters.get(name, 0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


PROMPTS = [[5000 + number, *range(1, 10 * B + 1)] for number in range(2)]
"""On disk alone, when the tests begin."""


@pytest.fixture(scope="module")
def rig(folder: Path) -> Iterator[Rig]:
    """The service in its second life."""
    config, faults = small_config(folder, nvme_bytes=128 * MIB), folder / "faults"
    faults.write_text("")
    with started(config) as service, attached(service.socket, "stores") as engine:
        for tokens in PROMPTS:
            engine.run("cold", tokens)
        assert engine.client.flush().pending_blocks == 0
    with started(config, environ={"KVSTORE_DISK_FAULTS": str(faults)}) as service:
        wait_for("what is on disk", lambda: service.tier("nvme").sealed_slots == 10 * len(PROMPTS))
        yield Rig(service=service, faults=faults)
        assert service.faults() == []


def test_what_an_engine_stores_has_its_checksum_before_anybody_has_read_it(tmp_path: Path) -> None:
    with started(small_config(tmp_path)) as service, attached(service.socket, "one") as engine:
        tokens = [6000, *range(1, 4 * B + 1)]
        engine.run("cold", tokens)
        columns = engine.session.tables.tables.columns
        pool = columns.pool(Tier.DRAM)
        slots = np.flatnonzero((states(pool.state) == SlotState.SEALED) & (pool.row != NONE)).astype(
            np.uint32
        )
        assert len(slots) == 4
        table = Checksums(columns)
        assert table.known(slots).all()
        assert not table.unread(slots).any()
        for slot, digest in zip(slots.tolist(), table.of(slots), strict=True):
            payload = block_bytes(columns.hash[pool.row[slot]], engine.session.hbm.slot_bytes)
            assert xxhash.xxh3_128_intdigest(payload.tobytes()).to_bytes(16, "little") == digest.tobytes()


def test_blocks_come_back_from_disk_by_the_checksums_that_their_engine_took(rig: Rig) -> None:
    with attached(rig.service.socket, "loads") as engine:
        warm = engine.run("warm", PROMPTS[0])
        assert warm.cached_tokens == 10 * B
        assert "nvme" in warm.cached_by_tier
        engine.await_nothing_used()
    assert (rig.count("checksum_failures"), rig.count("wrong_blocks")) == (0, 0)


def test_a_block_that_a_disk_gives_wrong_is_a_miss_and_is_computed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The mover has not looked at it, so only who loads it can see that a bit of it is another."""
    with attached(rig.service.socket, "loads") as engine, caplog.at_level("WARNING", "kvstore.loading"):
        rig.say("* read flip")
        damaged = engine.run("damaged", PROMPTS[1])
        assert damaged.cached_tokens < 10 * B, "each byte that is used is checked by the driver"
        rig.say("")
        assert rig.count("checksum_failures") >= 1
        assert rig.count("wrong_blocks") == 0, "nothing was computed from it"
        assert "are not what was stored" in caplog.text
        log = rig.service.log.read_text()
        assert "blocks read from" not in log, "so says a mover that has looked"
        assert "blocks are not what was written" in log, (
            "which disk it is can be seen where the disks are looked after"
        )
        assert "path 0, extent" in log
        assert engine.run("again", PROMPTS[1]).cached_tokens == 10 * B
        engine.await_nothing_used()


class Bending(TwinCopier):
    """Changes a bit in DRAM before the next load."""

    bends = False

    def submit(self, batch: CopyBatch) -> bool:
        if self.bends and batch.direction is Direction.LOAD:
            self.bends = False
            payload = np.ctypeslib.as_array(
                (ctypes.c_uint8 * batch.nbytes).from_address(int(batch.sources[2]))
            )
            payload[77] ^= 1
        return super().submit(batch)


def test_a_block_that_changed_in_memory_is_wrong_and_is_computed(tmp_path: Path) -> None:
    with started(small_config(tmp_path)) as service:
        tokens = [7000, *range(1, 10 * B + 1)]
        with attached(service.socket, "stores") as engine:
            engine.run("cold", tokens)
            engine.settle()
        service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
        copier = Bending()
        with attached(service.socket, "loads", copier=copier) as engine:
            copier.bends = True
            assert engine.run("warm", tokens).cached_tokens == 2 * B
            assert service.stats().counters["wrong_blocks"] == 1
            assert engine.run("again", tokens).cached_tokens == 10 * B
            engine.await_nothing_used()
        assert service.faults() == []
        assert "its load found other bytes than were stored" in service.log.read_text()
