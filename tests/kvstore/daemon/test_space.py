"""The room of a path: sizes that were given at run time, the write budget over restarts, what is shown of both."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from kvstore.cli.status import _render
from kvstore.config import NvmePath
from kvstore.daemon.metrics import StatsCollector
from kvstore.daemon.space import resized
from kvstore.units import GIB, MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient
from tiers.nvme.capacity import disk_usage
from tiers.nvme.notes import SizeNote, read_size, write_size

BLOCKS = 200


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def path_stats(service: Service) -> pb.PathStats:
    return service.stats().paths[0]


def write(service: Service, first: int = 0) -> None:
    """200 blocks come into DRAM, and as many of them go to disk as may."""
    one = RawClient(service.socket).begin(hbm_slots=512)
    hashes, granted = one.fill(range(first, first + 4 * BLOCKS))
    room = one.write_through(hashes)
    one.release(hbm=granted.hbm.tolist(), dram=[slot for slot, _ in room])
    one.acquire(hashes[:0])
    one.close()


# ------------------------------------------------------------ sizes


def test_a_size_counts_while_the_configuration_stays(tmp_path: Path) -> None:
    path = NvmePath(path=str(tmp_path), capacity_bytes=GIB)
    assert resized(path) == path
    write_size(tmp_path, SizeNote(configured_bytes=GIB, resized_bytes=100 * MIB))
    assert resized(path).capacity_bytes == 100 * MIB
    changed = replace(path, capacity_bytes=2 * GIB)
    assert resized(changed) == changed
    assert read_size(tmp_path) is None, "whoever changed the configuration meant it"
    assert resized(path) == path


def test_a_damaged_size_is_the_configured_one(tmp_path: Path) -> None:
    path = NvmePath(path=str(tmp_path), capacity_bytes=GIB)
    (tmp_path / "size").write_text("much")
    assert resized(path) == path
    assert resized(NvmePath(path=str(tmp_path / "none"), capacity_bytes=GIB)).capacity_bytes == GIB


# ------------------------------------------------------------ the write budget


def test_a_restart_gives_no_budget_back(place: Path) -> None:
    """A daemon that had written its day's worth was restarted and wrote it again."""
    config = replace(small_config(place, nvme_bytes=128 * MIB), nvme_write_budget_bytes=64 * MIB)
    with started(config) as service:
        wait_for("the whole budget", lambda: path_stats(service).write_budget_left_bytes > 15 * MIB)
        write(service)
        wait_for("the writes", lambda: path_stats(service).accepted_bytes == BLOCKS * SLOT_BYTES)
        left = path_stats(service).write_budget_left_bytes
        assert 0 < left <= 16 * MIB - BLOCKS * (SLOT_BYTES + 4096)
    with started(config) as service:  # stopped in order
        wait_for("the path", lambda: path_stats(service).in_service)
        again = wait_for("the budget", lambda: path_stats(service).write_budget_left_bytes)
        assert again <= left + MIB, "a minute gives 34 KiB"
        assert again >= left - 4 * MIB
        service.kill_daemon()
        wait_for("the path", lambda: path_stats(service).in_service)
        assert path_stats(service).write_budget_left_bytes <= again, "a kill gives nothing back"


def test_what_the_budget_refuses_is_written_by_a_flush(place: Path) -> None:
    config = replace(small_config(place, nvme_bytes=128 * MIB), nvme_write_budget_bytes=64 * MIB)
    with started(config) as service:
        for turn in range(6):  # 24 MiB, of which a quarter of 64 may be written
            write(service, 100_000 * turn)
        wait_for("the writes", lambda: not service.stats().moves_in_flight)
        stats = service.stats()
        assert stats.paths[0].written_bytes <= 16 * MIB + MIB, "the index is paid when it is written"
        assert stats.counters["refused_writes_budget"] > 0
        reply = service.call("Flush", pb.FlushRequest(deadline_ms=20_000), timeout_s=30)
        assert isinstance(reply, pb.FlushReply)
        assert (reply.pending_blocks, reply.durable_blocks) == (0, 6 * BLOCKS)
        assert service.stats().counters["flushed_writes"] > 0
        assert path_stats(service).write_budget_left_bytes == 0
        assert service.faults() == []


# ------------------------------------------------------------ what is shown


def test_what_the_disk_was_given_is_counted(place: Path) -> None:
    with started(small_config(place, nvme_bytes=128 * MIB)) as service:
        write(service)
        wait_for("the writes", lambda: path_stats(service).accepted_bytes == BLOCKS * SLOT_BYTES)
        wait_for("a commit", lambda: service.stats().counters["nvme_commits_total"])
        ask = pb.ResizeRequest(tier="nvme", path=str(place / "nvme"), capacity_bytes=128 * MIB)
        service.call("Resize", ask, service="admin")  # measures the folder now
        path = path_stats(service)
        slots = BLOCKS * (SLOT_BYTES + 4096)
        assert slots < path.written_bytes < 1.5 * slots, "slots with their trailers, and pages of the index"
        assert path.disk_bytes <= path.capacity_bytes
        assert path.disk_bytes == pytest.approx(disk_usage(place / "nvme").total_bytes, rel=0.2)


STATS = pb.StatsReply(
    ready=True,
    paths=[
        pb.PathStats(
            path="/var/lib/kvstore",
            capacity_bytes=100 * GIB,
            disk_bytes=50 * GIB,
            in_service=True,
            write_budget_bytes=1 << 40,
            write_budget_left_bytes=100 * GIB,
            accepted_bytes=1000,
            written_bytes=1250,
        ),
        pb.PathStats(path="/mnt/b", capacity_bytes=GIB, in_service=True, leaving_extents=3),
        pb.PathStats(path="/mnt/c", capacity_bytes=GIB),
        pb.PathStats(path="/mnt/d", capacity_bytes=GIB, in_service=True, hangs=True),
    ],
)


def test_status_shows_each_path() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(_render(pb.DescribeReply(version="1", pid=7), STATS, every_counter=False))
    assert isinstance(console.file, io.StringIO)
    shown = " ".join(console.file.getvalue().split())
    assert "in service 50GiB of" in shown
    assert "1.25 100GiB" in shown
    assert "resizing, 3" in shown
    assert "out of" in shown
    assert "no bound" in shown


def test_metrics_have_each_path() -> None:
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: STATS))
    text = generate_latest(registry).decode()
    assert 'kvstore_path_written_bytes_total{path="/var/lib/kvstore"} 1250.0' in text
    assert 'kvstore_path_accepted_bytes_total{path="/var/lib/kvstore"} 1000.0' in text
    assert 'kvstore_path_leaving_extents{path="/mnt/b"} 3.0' in text
    assert 'kvstore_path_in_service{path="/mnt/c"} 0.0' in text
    assert 'kvstore_path_in_service{path="/mnt/b"} 1.0' in text
    assert 'kvstore_path_in_service{path="/mnt/d"} 0.0' in text, "it hangs: nothing is asked of it"
    assert 'kvstore_path_hangs{path="/mnt/d"} 1.0' in text
