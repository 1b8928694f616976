"""Another size for a tier of a running service: the bound holds from the answer on, over kills and restarts."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import ServeConfig
from kvstore.errors import InvalidArgument, KvstoreError, NotFound, ResourceExhausted
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.test_commands import run
from tests.kvstore.daemon.test_nvme import MISS
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient
from tiers.nvme.capacity import disk_usage

STRIDE = SLOT_BYTES + 4096


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def config_of(place: Path, mib: int, **changes: object) -> ServeConfig:
    """One path in slabs of 8 MiB, 403 blocks each."""
    return replace(small_config(place, nvme_bytes=mib * MIB), nvme_extent_bytes=8 * MIB, **changes)  # type: ignore[arg-type]


def ask(service: Service, tier: str, mib: int, path: str = "") -> pb.ResizeReply:
    """One call."""
    request = pb.ResizeRequest(tier=tier, path=path, capacity_bytes=mib * MIB)
    reply = service.call("Resize", request, service="admin", timeout_s=30.0)
    assert isinstance(reply, pb.ResizeReply)
    return reply


def resize(service: Service, tier: str, mib: int) -> pb.ResizeReply:
    """Until the size holds."""
    path = service.config.nvme[0].path if tier == "nvme" else ""
    return wait_for("the size", lambda: reply if (reply := ask(service, tier, mib, path)).complete else None)


def used(place: Path) -> int:
    return disk_usage(place / "nvme").total_bytes


def fill(service: Service, one: RawClient, blocks: range) -> list[np.ndarray]:
    """Prompts of 200 blocks, all of them written down; their hashes."""
    chains = []
    for first in range(blocks.start, blocks.stop, 200):
        hashes, granted = one.fill(range(4 * first, 4 * first + 800))
        room = one.write_through(hashes)
        one.release(hbm=granted.hbm.tolist(), dram=[slot for slot, _ in room])
        one.acquire(hashes[:0])
        chains.append(hashes)
        wait_for("the writes", lambda: flushed(service))
    return chains


def outcomes(one: RawClient, hashes: np.ndarray) -> list[int]:
    """Of a prompt, all of which is let go again."""
    granted = one.acquire(hashes, lease=77)
    one.send(cancel=pb.Cancel(lease=77))
    none = 0xFFFFFFFF
    one.release(
        hbm=[slot for slot in granted.hbm.tolist() if slot != none],
        dram=[slot for slot in granted.dram.tolist() if slot != none],
    )
    one.acquire(hashes[:0])
    return granted.outcomes


def flushed(service: Service) -> bool:
    reply = service.call("Flush", pb.FlushRequest(deadline_ms=5000), timeout_s=30.0)
    assert isinstance(reply, pb.FlushReply)
    return not reply.pending_blocks


def path_stats(service: Service) -> pb.PathStats:
    return service.stats().paths[0]


def test_a_path_becomes_smaller_and_larger_in_use(place: Path) -> None:
    with started(config_of(place, 97, dram_bytes=32 * MIB)) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        chains = fill(service, one, range(3200))
        before = service.tier("nvme")
        assert before.sealed_slots > 2800
        reply = resize(service, "nvme", 64)
        assert used(place) <= 64 * MIB, "from the answer on"
        assert reply.used_bytes <= reply.capacity_bytes == 64 * MIB
        after = service.tier("nvme")
        assert 0 < after.sealed_slots < before.sealed_slots
        assert after.capacity_bytes == 64 * MIB
        assert after.allocated_bytes < 64 * MIB
        assert path_stats(service).capacity_bytes == 64 * MIB
        assert service.faults() == []
        assert MISS not in outcomes(one, chains[-1]), "what was used last is still there"
        assert set(outcomes(one, chains[0])) == {MISS}, "what was used longest ago is not"

        resize(service, "nvme", 88)
        fill(service, one, range(8000, 11200))
        grown = service.tier("nvme")
        assert grown.sealed_slots > after.sealed_slots
        assert grown.allocated_bytes > after.allocated_bytes
        assert used(place) <= 88 * MIB
        assert service.faults() == []
        one.close()


def test_a_size_holds_over_restarts_until_the_configuration_changes(place: Path) -> None:
    """After a restart the disk tier had its old size again, and filled the disk that had been needed for something."""
    config = config_of(place, 97)
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        fill(service, one, range(3200))
        one.close()
        resize(service, "nvme", 64)
        blocks = service.tier("nvme").sealed_slots
        service.kill_daemon()
        wait_for("the writes", lambda: flushed(service))
        assert service.tier("nvme").capacity_bytes == 64 * MIB
        assert service.tier("nvme").sealed_slots >= blocks - 403, "some are written again, and others evicted"
        assert ask(service, "nvme", 64, config.nvme[0].path).complete
        assert used(place) <= 64 * MIB
    with started(config) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        assert path_stats(service).capacity_bytes == 64 * MIB
        assert 0 < service.tier("nvme").allocated_bytes < 64 * MIB
        assert service.tier("nvme").sealed_slots >= blocks - 403, "at most what one slab held"
        assert used(place) <= 64 * MIB
    with started(config_of(place, 80)) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        assert path_stats(service).capacity_bytes == 80 * MIB
    assert not (place / "nvme" / "size").exists()
    with started(config) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        assert path_stats(service).capacity_bytes == 97 * MIB


@pytest.mark.parametrize("stopped", [True, False])
def test_a_daemon_killed_meanwhile_goes_on(place: Path, stopped: bool) -> None:
    """Slabs that had left the store and were not deleted yet stayed on the disk for ever."""
    with started(config_of(place, 97)) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        fill(service, one, range(3200))
        one.close()
        movers = service.mover_pids()
        if stopped:  # nothing that left is deleted
            for pid in movers:
                os.kill(pid, signal.SIGSTOP)
            assert not ask(service, "nvme", 64, service.config.nvme[0].path).complete
        else:
            request = pb.ResizeRequest(tier="nvme", path=service.config.nvme[0].path, capacity_bytes=64 * MIB)
            with pytest.raises(KvstoreError):
                service.call("Resize", request, service="admin", timeout_s=0.03)
        pid = service.daemon_pid
        os.kill(pid, signal.SIGKILL)
        for mover in movers:
            if stopped:
                os.kill(mover, signal.SIGCONT)
        service.await_restart(pid)
        wait_for("the path", lambda: path_stats(service).in_service)
        if path_stats(service).capacity_bytes == 64 * MIB:  # the call had come so far
            wait_for("the size", lambda: used(place) <= 64 * MIB)
            wait_for("all slabs", lambda: not path_stats(service).leaving_extents)
        else:
            assert not stopped
        assert resize(service, "nvme", 64).complete
        assert used(place) <= 64 * MIB
        assert service.faults() == []


def test_dram_becomes_smaller_and_larger_in_use(place: Path) -> None:
    with started(config_of(place, 64)) as service:
        wait_for("all of DRAM", lambda: service.tier("dram").allocated_bytes == 64 * MIB)
        one = RawClient(service.socket).begin(hbm_slots=512)
        fill(service, one, range(2600))
        chain, granted = one.fill(range(400_000, 400_800))
        room = one.write_through(chain)  # held: 200 blocks in DRAM
        one.release(hbm=granted.hbm.tolist())
        assert ask(service, "dram", 32).capacity_bytes == 32 * MIB
        one.release(dram=[slot for slot, _ in room])
        one.acquire(chain[:0])
        reply = resize(service, "dram", 32)
        assert reply.used_bytes == 32 * MIB
        assert service.tier("dram").allocated_bytes == 32 * MIB
        assert service.tier("dram").capacity_bytes == 32 * MIB
        assert service.faults() == []
        dropped = [extent for extent, fd in one.dram_fds.items() if os.fstat(fd).st_blocks == 0]
        assert len(dropped) == 2, "the memory is given back, also where somebody maps it still"
        fill(service, one, range(20_000, 22_000))

        service.kill_daemon()
        wait_for("DRAM", lambda: service.tier("dram").allocated_bytes)
        assert service.tier("dram").capacity_bytes == 32 * MIB
        assert service.tier("dram").allocated_bytes == 32 * MIB

        resize(service, "dram", 64)
        assert service.tier("dram").allocated_bytes == 64 * MIB
        assert service.faults() == []
        one.close()


def test_memory_that_was_given_back_comes_under_another_number(place: Path) -> None:
    """An engine that had not heard of it yet would have taken new memory for that which it still mapped."""
    with started(config_of(place, 64)) as service:
        wait_for("all of DRAM", lambda: service.tier("dram").allocated_bytes == 64 * MIB)
        one = RawClient(service.socket).begin()
        resize(service, "dram", 16)
        resize(service, "dram", 64)
        assert one.columns is not None
        columns = one.columns
        dram = np.flatnonzero((columns.extent_tier == 1) & (columns.extent_state != 0))
        assert len(dram) == 4
        first = {extent for extent, fd in one.dram_fds.items() if os.fstat(fd).st_blocks == 0}
        assert not first & set(dram.tolist())
        one.close()


def test_sizes_that_cannot_be_are_refused_in_one_line(place: Path) -> None:
    with started(config_of(place, 64)) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        path = service.config.nvme[0].path
        with pytest.raises(InvalidArgument, match="at least 64MiB"):
            ask(service, "nvme", 63, path)
        with pytest.raises(InvalidArgument, match=r"is configured: give less"):
            ask(service, "nvme", 1 << 30, path)
        with pytest.raises(ResourceExhausted, match="configure the larger nvme, and start again"):
            ask(service, "nvme", 1024, path)
        with pytest.raises(NotFound, match=f"no NVMe path /elsewhere .*{path}"):
            ask(service, "nvme", 64, "/elsewhere")
        with pytest.raises(InvalidArgument, match="less than one extent"):
            ask(service, "dram", 1)
        with pytest.raises(InvalidArgument, match="more than the"):
            ask(service, "dram", 1 << 20)
        with pytest.raises(InvalidArgument, match="'hbm' cannot be resized"):
            ask(service, "hbm", 64)
        assert path_stats(service).capacity_bytes == 64 * MIB
        shown = run("resize", "nvme", path, "63MiB", "--socket", service.socket)
        assert shown.returncode != 0
        assert shown.stderr.count("\n") == 1


def test_the_command_waits_until_the_size_holds(place: Path) -> None:
    with started(config_of(place, 96)) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        path = service.config.nvme[0].path
        shown = run("resize", "nvme", path, "64MiB", "--socket", service.socket)
        assert shown.returncode == 0, shown.stderr
        assert f"{path} takes at most 64MiB" in shown.stdout
        shown = run("resize", "dram", "48MiB", "--socket", service.socket, "--json")
        assert '"capacity_bytes": 50331648' in shown.stdout


def test_a_file_of_somebody_elses_is_said(place: Path) -> None:
    """What the service cannot delete keeps a path above its size: complete was answered all the same."""
    with started(config_of(place, 64)) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        path = service.config.nvme[0].path
        with (place / "nvme" / "holiday.mkv").open("wb") as file:
            file.truncate(70 * MIB)
        reply = ask(service, "nvme", 64, path)
        assert not reply.complete
        assert "70MiB in it are not the service's (holiday.mkv)" in reply.waits_for
        assert list(service.stats().warnings) == [reply.waits_for]
        (place / "nvme" / "holiday.mkv").unlink()
        wait_for("the size", lambda: ask(service, "nvme", 64, path).complete)
        assert list(service.stats().warnings) == []


def test_a_start_makes_no_slab_in_place_of_somebody_elses_file(place: Path) -> None:
    """A start beside a foreign file made slabs up to the whole size and said nothing of the file."""
    config = config_of(place, 96)
    with started(config) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
    with (place / "nvme" / "holiday.mkv").open("wb") as file:
        file.truncate(50 * MIB)
    with started(config) as service:
        wait_for("the path", lambda: path_stats(service).in_service)
        (warning,) = service.stats().warnings
        assert "50MiB in it are not the service's (holiday.mkv)" in warning
        assert service.tail().count("files of others") == 1
        one = RawClient(service.socket).begin(hbm_slots=512)
        fill(service, one, range(2000))
        assert used(place) <= 96 * MIB, "with the file"
        before = service.tier("nvme").allocated_bytes
        assert 0 < before <= 40 * MIB
        (place / "nvme" / "holiday.mkv").unlink()
        wait_for("its room", lambda: service.tier("nvme").allocated_bytes > 70 * MIB)
        assert list(service.stats().warnings) == []
        fill(service, one, range(4000, 5000))
        assert used(place) <= 96 * MIB
        assert service.faults() == []
        one.close()
