"""The NVMe tier through the whole service: down, back, through kills of the daemon and of its movers, and damage."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import Durability, ServeConfig
from kvstore.daemon.nvme import slabs_to_keep
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, start, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient
from tiers.nvme.capacity import SlabPlan
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.index import RECORD
from tiers.nvme.recover import FoundRecords
from tiers.nvme.slab import list_slabs, open_slab

HIT_HBM, HIT_DRAM, PROMOTING, MISS = (
    pb.OUTCOME_HIT_HBM,
    pb.OUTCOME_HIT_DRAM,
    pb.OUTCOME_PROMOTING,
    pb.OUTCOME_MISS,
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def content(block: int) -> bytes:
    """What a block of these tests holds."""
    return np.full(SLOT_BYTES // 8, 0x1234_5678_9ABC_0000 + block, dtype="<u8").tobytes()


def dram_view(one: RawClient, slot: int) -> memoryview:
    """Bytes of a DRAM slot in shared memory."""
    assert one.columns is not None
    extent = int(one.columns.pools[1].extent[slot])
    offset = (slot - int(one.columns.extent_slot_base[extent])) * SLOT_BYTES
    while extent not in one.dram_fds:
        one.receive_descriptor()
    fd = one.dram_fds[extent]
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))[offset : offset + SLOT_BYTES]


def store(service: Service, tokens: range) -> tuple[RawClient, np.ndarray]:  # type: ignore[type-arg]
    """A prompt whose blocks are in DRAM with `content`, and on disk."""
    one = RawClient(service.socket).begin()
    hashes, _ = one.fill(tokens)
    one.step(want_room=len(hashes))
    from kvstore.wire.packed import COPY, u32_of

    slots = one.receive_body("slots").slots
    room, generations = u32_of(slots.dram_slots), u32_of(slots.dram_generations)
    for block in range(len(hashes)):
        dram_view(one, int(room[block]))[:] = content(block)
    held = one.acquire(hashes, lease=9)
    copies = np.zeros(len(hashes), dtype=COPY)
    copies["source"], copies["source_generation"] = held.hbm, held.hbm_generations
    copies["target"], copies["target_generation"] = room[: len(hashes)], generations[: len(hashes)]
    one.step(stores=copies.tobytes(), released_dram=room.tobytes(), released_hbm=held.hbm.tobytes())
    one.acquire(hashes[:0])
    reply = one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
    assert reply.pending_blocks == 0
    assert reply.durable_blocks >= len(hashes)
    return one, hashes


def filled(config: ServeConfig) -> np.ndarray:  # type: ignore[type-arg]
    """Twenty blocks on disk, after a service that ended in order; their hashes."""
    with started(config) as service:
        one, hashes = store(service, range(80))
        one.close()
    return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A path that a service has left in order, with twenty blocks."""

    folder: Path
    hashes: np.ndarray  # type: ignore[type-arg]

    def into(self, place: Path) -> None:
        """The same path for a service of `place`, as if that had been there before."""
        shutil.copytree(self.folder, place / "nvme")


def read_back(one: RawClient, hashes: np.ndarray) -> list[int]:  # type: ignore[type-arg]
    """Outcomes once nothing is on its way any more."""
    for lease in range(100, 120):
        granted = one.acquire(hashes, lease=lease)
        if PROMOTING not in granted.outcomes:
            for block, (outcome, slot) in enumerate(
                zip(granted.outcomes, granted.dram.tolist(), strict=True)
            ):
                if outcome == HIT_DRAM:
                    assert dram_view(one, slot) == content(block), f"block {block} is not what was stored"
            return granted.outcomes
        one.receive_body("changed")
    raise TimeoutError("the promotions did not end")


def known(service: Service, blocks: int) -> None:
    """What is on disk may be found a moment after the service is ready."""
    wait_for(f"{blocks} blocks", lambda: service.tier("nvme").sealed_slots == blocks)


@pytest.mark.parametrize("durability", ["process", "power"])
def test_blocks_come_back_from_disk_alone(place: Path, durability: str) -> None:
    config = replace(small_config(place, nvme_bytes=128 * MIB), durability=Durability(durability))
    with started(config) as service:
        one, hashes = store(service, range(80))
        one.close()
        kill_all(service)
    with started(config) as service:
        known(service, 20)
        other = RawClient(service.socket).begin()
        assert read_back(other, hashes) == [HIT_DRAM] * 20
        assert service.faults() == []
        other.close()


def kill_all(service: Service) -> None:
    """kill -9 of keeper and daemon; the mover ends by itself."""
    pids = [service.keeper_pid, service.daemon_pid]
    movers = service.mover_pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    service.process.wait(DEADLINE_S)
    wait_for("the movers' end", lambda: not any(_runs(pid) for pid in movers))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_lost_index_is_rebuilt_from_the_trailers(place: Path, written: Written) -> None:
    config = small_config(place, nvme_bytes=128 * MIB)
    written.into(place)
    shutil.rmtree(place / "nvme" / "index")
    with started(config) as service:
        other = RawClient(service.socket).begin()
        assert read_back(other, written.hashes) == [HIT_DRAM] * 20
        other.close()


@pytest.mark.parametrize("lost", ["index", "nothing"])
def test_cleared_blocks_stay_cleared(place: Path, lost: str) -> None:
    """After a clear an index rebuilt from the trailers gave the cleared blocks out again."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service:
        one, hashes = store(service, range(80))
        reply = one.admin.Clear(pb.ClearRequest(namespace=one.ns.namespace), timeout=DEADLINE_S)
        assert reply.removed_blocks == 20
        kill_all(service)  # at once: the index need not have heard of it
        one.close()
    if lost == "index":
        shutil.rmtree(place / "nvme" / "index")
    with started(config) as service:
        assert service.tier("nvme").sealed_slots == 0
        other = RawClient(service.socket).begin()
        assert read_back(other, hashes) == [MISS] * 20
        two, _more = store(service, range(2000, 2080))
        two.close()
        other.close()
        kill_all(service)
    shutil.rmtree(place / "nvme" / "index")
    with started(config) as service:
        known(service, 20)  # what was stored after it is found


def test_a_clear_counts_although_the_clock_was_set_back(place: Path) -> None:
    """A clear is a time: with a clock set back it was older than what was cleared, which a lost index brought back."""
    config = small_config(place, nvme_bytes=128 * MIB)
    ahead = place / "ahead"
    ahead.mkdir()
    (ahead / "sitecustomize.py").write_text(
        "import time\nreal = time.time_ns\ntime.time_ns = lambda: real() + 86_400 * 10**9\n", encoding="ascii"
    )
    with started(
        config, environ={"PYTHONPATH": f"{ahead}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ) as service:
        one, _blocks = store(service, range(80))
        one.close()
    with started(config) as service:
        assert "the clock was set back" in service.log.read_text(encoding="utf-8")
        one = RawClient(service.socket).begin()
        reply = one.admin.Clear(pb.ClearRequest(namespace=0xFFFFFFFF), timeout=DEADLINE_S)
        assert reply.removed_blocks == 20
        one.close()
        two, _more = store(service, range(2000, 2008))
        two.close()
    with started(config) as service:
        known(service, 2)  # what was stored after the clear, over the first slots that it freed
    shutil.rmtree(place / "nvme" / "index")
    with started(config) as service:
        known(service, 2)  # trailers of 18 blocks that were cleared are there still, and of two written since


def test_damage_on_disk_is_a_miss_and_is_removed(place: Path, written: Written) -> None:
    """Elsewhere a block whose bytes had rotted was served as it was."""
    config = small_config(place, nvme_bytes=128 * MIB)
    written.into(place)
    slab = list_slabs(place / "nvme")[0]
    with (place / "nvme" / slab.name).open("r+b") as file:
        file.seek(3 * (SLOT_BYTES + 4096) + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with started(config) as service:
        other = RawClient(service.socket).begin()
        outcomes = read_back(other, written.hashes)
        damaged = outcomes.index(MISS)
        assert outcomes[:damaged] == [HIT_DRAM] * damaged
        assert service.stats().counters["checksum_failures"] == 1
        assert service.faults() == []
        other.close()
    with started(config) as service:
        known(service, 19)  # the index has forgotten it too


def test_a_killed_mover_is_started_again(place: Path) -> None:
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service:
        one, _hashes = store(service, range(80))
        (old,) = service.mover_pids()
        os.kill(old, signal.SIGKILL)
        wait_for("another mover", lambda: [pid for pid in service.mover_pids() if pid != old])
        two, _more = store(service, range(1000, 1080))
        assert service.tier("nvme").sealed_slots == 40
        assert service.faults() == []
        one.close()
        two.close()


@pytest.mark.kill
@pytest.mark.parametrize(
    "point", ["move.start", "move.done", "mover.sync", "move.reply", "commit.lmdb", "commit.done"]
)
def test_a_kill_while_blocks_go_down(place: Path, point: str) -> None:
    """Whoever dies between a write and its record: what is flushed afterwards is whole, and nothing is stuck."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config, environ={"KVSTORE_FAULT": f"{point}:kill"}) as service:
        first = service.daemon_pid
        one = RawClient(service.socket).begin()
        hashes, _granted = one.fill(range(80))
        one.write_through(hashes)
        if point in ("move.start", "move.done", "mover.sync"):
            wait_for("another mover", lambda: service.stats().counters["mover_restarts_total"] >= 1)
        else:
            service.await_restart(first)
        reply = wait_for("a flush", lambda: _flushed(service))
        assert reply.durable_blocks == 20
        assert service.faults() == []
        one.close()
        kill_all(service)
    with started(config) as service:
        known(service, 20)


def _flushed(service: Service) -> pb.FlushReply | None:
    reply = service.call("Flush", pb.FlushRequest(deadline_ms=5000), timeout_s=30.0)
    assert isinstance(reply, pb.FlushReply)
    return reply if not reply.pending_blocks else None


def test_the_tier_evicts_and_keeps_its_capacity(place: Path) -> None:
    """Elsewhere the disk cap was not enforced."""
    config = replace(small_config(place, nvme_bytes=64 * MIB), nvme_extent_bytes=8 * MIB)
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=256)
        nbytes = wait_for("the disk", lambda: service.tier("nvme").allocated_bytes)
        slots = nbytes // (SLOT_BYTES + 4096)
        for first in range(0, 2 * slots * 4, 800):
            hashes, granted = one.fill(range(first, first + 800))
            room = one.write_through(hashes)
            one.release(hbm=granted.hbm.tolist(), dram=[slot for slot, _ in room])
            one.acquire(hashes[:0])
            wait_for("the writes", lambda: _flushed(service))
        used = sum(path.stat().st_blocks * 512 for path in (place / "nvme").rglob("*") if path.is_file())
        assert used <= 64 * MIB
        assert service.tier("nvme").sealed_slots > slots // 2
        assert service.faults() == []
        one.close()


def test_a_smaller_capacity_keeps_what_fits(place: Path, written: Written) -> None:
    written.into(place)
    smaller = small_config(place, nvme_bytes=64 * MIB)
    with started(smaller) as service:
        known(service, 20)
        assert service.tier("nvme").allocated_bytes <= 64 * MIB


def test_a_smaller_start_keeps_what_was_used_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of slabs that were equally full those with the lowest numbers stayed: the newest blocks were thrown away."""
    directory = NvmeDirectory.open(tmp_path / "nvme")
    for number in range(1, 5):
        open_slab(directory.path, number, MIB, SLOT_BYTES).close()
    records = np.zeros(10, dtype=RECORD)
    records["slab"] = [1, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    records["slot"] = [0, 1, 2, 3, 0, 1, 0, 1, 0, 1]
    records["touch"] = records["slab"] * 1000 + records["slot"]
    records["length"] = SLOT_BYTES
    slabs = directory.slabs()
    found = FoundRecords(records, slabs, {}).blocks
    kept = slabs_to_keep(directory.path, slabs, found, SlabPlan(slabs=2, slab_bytes=MIB, map_bytes=MIB))
    assert [slab.number for slab in kept] == [3, 4]
    (said,) = [record for record in caplog.records if "capacity is smaller" in record.message]
    assert (said.__dict__["fields"]["slabs"], said.__dict__["fields"]["blocks"]) == (2, 6)
    directory.close()


def test_a_path_in_use_ends_a_second_daemon_in_one_line(place: Path) -> None:
    """A second daemon over a path in use said it was ready, died with a traceback, and came back without its disk."""
    with started(small_config(place, nvme_bytes=128 * MIB)) as first:
        pid = first.daemon_pid
        config = replace(first.config, socket=str(place / "two.sock"))
        second = start(config, place / "two.log")
        try:
            assert second.process.wait(DEADLINE_S) == 1
        finally:
            second.stop()
        said = (place / "two.log").read_text()
        assert f"is in use by another kvstore daemon or its mover (pid {pid})" in said
        assert "ready" not in said
        assert "Traceback" not in said
        assert first.daemon_pid == pid


def test_a_slab_table_outlives_the_daemon(place: Path) -> None:
    """A restarted daemon must know which slab is which extent, or it would read others' blocks."""
    with started(small_config(place, nvme_bytes=128 * MIB)) as service:
        one, hashes = store(service, range(80))
        service.kill_daemon()
        wait_for("a mover", service.mover_pids)
        one.connect()
        one.resume()
        one.open_stream()
        one.ns = one.namespace()
        assert one.acquire(hashes, lease=50).outcomes == [HIT_HBM] * 20
        two, _ = store(service, range(2000, 2080))
        assert len(list_slabs(place / "nvme")) == 1, "the same slab goes on being used"
        one.close()
        two.close()
