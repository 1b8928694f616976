"""Each fault of a disk through the whole service: what requests and people see, and that it ends by itself."""

from __future__ import annotations

import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import NvmePath
from kvstore.units import MIB
from kvstore.wire.packed import COPY, u32_of
from kvstore.wire.v1 import health_pb2, health_pb2_grpc
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient

BLOCKS = 40
_SERVING = health_pb2.HealthCheckResponse.SERVING
MISS, DRAM, PROMOTING = pb.OUTCOME_MISS, pb.OUTCOME_HIT_DRAM, pb.OUTCOME_PROMOTING
NAMES = ("eio", "short", "flip", "hang", "torn", "gone", "cut", "one")
"""Prompts that are on disk alone when the tests begin, for one test each."""


@dataclass(slots=True)
class Rig:
    """A service over a disk that does as the file of faults says."""

    service: Service
    one: RawClient
    faults: Path

    def say(self, *lines: str) -> None:
        """From now on the disk fails like this."""
        unfinished = self.faults.with_suffix(".new")
        unfinished.write_text("\n".join(lines))
        unfinished.rename(self.faults)

    def warning(self, *words: str) -> str:
        """The warning with all of these words; waits for it."""

        def look() -> str:
            found = [text for text in self.service.stats().warnings if all(word in text for word in words)]
            return found[0] if found else ""

        return wait_for(f"a warning of {words}; have {self.service.stats().warnings}", look)

    def well(self) -> None:
        """The fault has ended: everything comes back without anybody's doing."""
        self.say("")
        wait_for("the end of all warnings", lambda: not self.service.stats().warnings)

    def path(self) -> pb.PathStats:
        """The path as Stats, `kvstore status` and the metrics show it."""
        (path,) = self.service.stats().paths
        return path

    def serving(self) -> tuple[bool, bool]:
        """What the health service says of the whole and of the path."""
        with grpc.insecure_channel(f"unix:{self.service.socket}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            folder = self.service.config.nvme[0].path
            told = [
                health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30).status
                for name in ("kvstore.v1.Kvstore", f"nvme:{folder}")
            ]
        return told[0] == _SERVING, told[1] == _SERVING

    def count(self, name: str) -> int:
        return int(self.service.stats().counters[name])

    def chain(self, name: str) -> NDArray[np.uint64]:
        return self.one.chain(tokens_of(name))

    def read(self, name: str) -> list[int]:
        """Outcomes of a prompt once nothing of it is on its way; what was given is let go."""
        hashes = self.chain(name)
        for lease in range(100, 140):
            granted = self.one.acquire(hashes, lease=lease)
            held = granted.hbm[granted.hbm != 0xFFFFFFFF].tolist()
            self.one.release(hbm=held, dram=granted.dram[granted.dram != 0xFFFFFFFF].tolist())
            if PROMOTING not in granted.outcomes:
                return granted.outcomes
            self.one.receive_body("changed")
        raise TimeoutError(f"{name} is still on its way")

    def flush(self) -> pb.FlushReply:
        return self.one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)


def tokens_of(name: str) -> list[int]:
    return [zlib.crc32(name.encode()), *range(4 * BLOCKS - 1)]


def store(one: RawClient, name: str) -> None:
    """Into DRAM, to be written down; nothing stays held."""
    hashes, granted = one.fill(tokens_of(name))
    one.step(want_room=len(hashes))
    slots = one.receive_body("slots").slots
    room, generations = u32_of(slots.dram_slots), u32_of(slots.dram_generations)
    copies = np.zeros(len(hashes), dtype=COPY)
    copies["source"], copies["source_generation"] = granted.hbm, granted.hbm_generations
    copies["target"], copies["target_generation"] = room[: len(hashes)], generations[: len(hashes)]
    one.step(stores=copies.tobytes(), released_dram=room.tobytes(), released_hbm=granted.hbm.tobytes())
    one.acquire(hashes[:0])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Rig]:
    """The service in its second life, with the prompts of `NAMES` on disk, of which `torn` was torn as it went down."""
    config = small_config(folder, nvme_bytes=128 * MIB)
    faults = folder / "faults"
    environ = {"KVSTORE_DISK_FAULTS": str(faults)}
    with started(config, environ=environ) as service:
        rig = Rig(service, RawClient(service.socket).begin(hbm_slots=512), faults)
        for name in NAMES:
            rig.say("* write torn" if name == "torn" else "")
            store(rig.one, name)
            assert rig.flush().pending_blocks == 0
        rig.one.close()
    with started(config, environ=environ) as service:
        rig = Rig(service, RawClient(service.socket).begin(hbm_slots=512), faults)
        wait_for("the prompts", lambda: service.tier("nvme").sealed_slots == len(NAMES) * BLOCKS)
        yield rig
        assert service.faults() == []
        rig.one.close()


@pytest.fixture
def rig(running: Rig) -> Iterator[Rig]:
    yield running
    running.well()


@pytest.mark.parametrize("name", ["flip", "torn"])
def test_bytes_that_are_not_what_was_written_are_a_miss_and_counted(rig: Rig, name: str) -> None:
    """Before any pause: of a paused path single blocks are not told of, and a probe of it may find a torn one."""
    before = rig.count("checksum_failures")
    rig.say("* read flip" if name == "flip" else "")
    outcomes = rig.read(name)
    bad = rig.count("checksum_failures") - before
    assert bad >= 1
    assert outcomes[outcomes.index(MISS) :] == [MISS] * (BLOCKS - outcomes.index(MISS))
    assert "are not what was written" in rig.service.log.read_text()
    rig.say("")
    assert not rig.service.stats().warnings, "it is no fault of the disk as a whole"


@pytest.mark.parametrize(
    "name,fault,words", [("eio", "EIO", "Input/output error"), ("short", "short", "came short")]
)
def test_a_disk_that_gives_nothing_is_paused_and_comes_back_with_all_it_has(
    rig: Rig, name: str, fault: str, words: str
) -> None:
    rig.say(f"* read {fault}")
    assert rig.read(name) == [MISS] * BLOCKS
    assert "paused" in rig.warning("fails all reads", words)
    assert rig.path().reads_paused
    assert not rig.path().writes_paused
    assert rig.serving() == (True, False), "a failing disk is no failing service"
    rig.say("")
    wait_for("the blocks", lambda: rig.read(name) == [DRAM] * BLOCKS)
    assert rig.count("io_errors") >= 32
    assert rig.serving() == (True, True)
    assert not rig.path().reads_paused


def test_one_block_that_cannot_be_read_costs_itself_alone(rig: Rig) -> None:
    """A bad sector is no bad disk: the block is a miss, and its slot is used no more."""
    before = rig.service.tier("nvme").sealed_slots
    rig.say("* read EIO")
    hashes = rig.chain("one")[:1]
    granted = rig.one.acquire(hashes, lease=50)
    assert granted.outcomes == [PROMOTING]
    rig.one.receive_body("changed")
    rig.say("")
    assert rig.one.acquire(hashes, lease=51).outcomes == [MISS]
    assert rig.service.tier("nvme").sealed_slots == before - 1
    assert rig.service.tier("nvme").quarantined_slots == 1
    assert rig.serving() == (True, True)
    assert "failed: Input/output error" in rig.service.log.read_text()
    assert not rig.service.stats().warnings


@pytest.mark.parametrize(
    "fault,words",
    [("EIO", "Input/output"), ("ENOSPC", "No space"), ("EROFS", "Read-only"), ("short", "came short")],
)
def test_a_disk_that_takes_nothing_is_paused_and_then_takes_all(rig: Rig, fault: str, words: str) -> None:
    rig.say(f"* write {fault}")
    before = rig.service.tier("nvme").sealed_slots
    store(rig.one, f"write {fault}")
    assert "paused" in rig.warning("fails all writes", words)
    assert rig.path().writes_paused
    assert rig.serving() == (True, False)
    assert rig.service.tier("nvme").sealed_slots == before
    rig.say("")
    wait_for("all of it on disk", lambda: rig.service.tier("nvme").sealed_slots == before + BLOCKS)


def test_a_sync_that_fails_keeps_its_blocks_from_counting(rig: Rig) -> None:
    rig.say("* sync EIO")
    before = rig.service.tier("nvme").sealed_slots
    store(rig.one, "sync")
    rig.warning("fdatasync failed: Input/output error")
    assert rig.service.tier("nvme").sealed_slots == before
    rig.say("")
    assert rig.flush().pending_blocks == 0
    assert rig.service.tier("nvme").sealed_slots == before + BLOCKS


def test_a_disk_that_hangs_is_a_miss_after_seconds_and_serves_again(rig: Rig) -> None:
    """It kept every request that asked for one of its blocks waiting for a minute."""
    rig.say("* read hang")
    before = rig.count("nvme_hangs_total")
    assert rig.read("hang") == [MISS] * BLOCKS
    rig.warning("does not answer")
    assert rig.path().hangs
    assert rig.path().in_service
    assert rig.serving() == (True, False)
    assert rig.count("nvme_hangs_total") == before + 1
    rig.say("")
    wait_for("the blocks", lambda: rig.read("hang") == [DRAM] * BLOCKS)


def test_a_slab_that_was_cut_short_is_a_miss_and_no_fault_of_the_disk(rig: Rig, folder: Path) -> None:
    slab = next((folder / "nvme").glob("slab-*.kv"))
    size, keep = slab.stat().st_size, place_of(rig, "cut")
    before = rig.count("checksum_failures")
    os.truncate(slab, keep)
    try:
        assert MISS in rig.read("cut")
        assert rig.count("checksum_failures") > before
        assert not rig.service.stats().warnings
    finally:
        os.truncate(slab, size)


def place_of(rig: Rig, name: str) -> int:
    """Where the first block of a prompt lies in the slab; nothing that a later test reads lies behind the last."""
    del rig
    return NAMES.index(name) * BLOCKS * (SLOT_BYTES + 4096)


def test_a_slab_that_is_gone_is_made_anew_and_said(rig: Rig, folder: Path) -> None:
    """Deleted under a running service it lived on in its mover's descriptor, and was an empty one after that."""
    slab = next((folder / "nvme").glob("slab-*.kv"))
    size = slab.stat().st_size
    slab.unlink()
    (old,) = rig.service.mover_pids()
    os.kill(old, signal.SIGKILL)
    wait_for("another mover", lambda: [pid for pid in rig.service.mover_pids() if pid != old])
    before = rig.count("checksum_failures")
    wait_for("the count", lambda: rig.count("nvme_slabs_lost_total") == 1)
    assert rig.read("gone") == [MISS] * BLOCKS
    assert rig.count("checksum_failures") == before, "nothing is read from it any more"
    assert "slab was deleted while in use" in rig.service.log.read_text()
    store(rig.one, "after it")
    assert rig.flush().pending_blocks == 0
    assert slab.stat().st_size == size
    assert not rig.service.stats().warnings


def test_no_room_for_a_first_slab_pauses_the_path_until_there_is(folder: Path) -> None:
    """Nothing else can take the writes; every block stays in DRAM until then."""
    place = folder / "other"
    place.mkdir()
    faults = place / "faults"
    faults.write_text("nvme make ENOSPC")
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config, environ={"KVSTORE_DISK_FAULTS": str(faults)}) as service:
        rig = Rig(service, RawClient(service.socket).begin(), faults)
        store(rig.one, "first")
        assert "no space for a slab" in rig.warning("fails all writes")
        rig.well()
        wait_for("all of it on disk", lambda: service.tier("nvme").sealed_slots == BLOCKS)
        assert service.faults() == []
        rig.one.close()


def test_a_slow_disk_is_given_less_and_slows_nobody(folder: Path) -> None:
    """Writes were given to whichever path was first in the configuration, or in turns, slow or not."""
    place = folder / "two"
    place.mkdir()
    faults = place / "faults"
    faults.write_text("slow write slow=0.25")
    paths = tuple(NvmePath(path=str(place / name), capacity_bytes=64 * MIB) for name in ("slow", "fast"))
    config = replace(small_config(place), nvme=paths)
    with started(config, environ={"KVSTORE_DISK_FAULTS": str(faults)}) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        for number in range(8):  # what the disks can do is not known before
            store(one, f"first {number}")
        wait_for("these", lambda: service.tier("nvme").sealed_slots == 8 * BLOCKS)
        before = [path.accepted_bytes for path in service.stats().paths]
        assert all(before)
        for number in range(30):
            store(one, f"prompt {number}")
        wait_for("all of it", lambda: service.tier("nvme").sealed_slots == 38 * BLOCKS)
        after = [path.accepted_bytes for path in service.stats().paths]
        slow, fast = (then - now for now, then in zip(before, after, strict=True))
        assert fast > 3 * slow
        assert service.faults() == []
        one.close()
