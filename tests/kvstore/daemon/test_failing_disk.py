"""A disk that fails all that it is given, under a whole service."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import NvmePath, ServeConfig
from kvstore.units import MIB
from kvstore.wire.packed import COPY, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, Service, small_config, start, started, wait_for
from tests.support.mounts import tmpfs
from tests.support.raw_client import RawClient

BLOCKS = 40


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def _into_dram(one: RawClient, tokens: range) -> np.ndarray:  # type: ignore[type-arg]
    """A prompt whose blocks are in DRAM, as far as there is room, and shall be written down."""
    hashes, _ = one.fill(tokens)
    one.step(want_room=len(hashes))
    slots = one.receive_body("slots").slots
    room, generations = u32_of(slots.dram_slots), u32_of(slots.dram_generations)
    held = one.acquire(hashes, lease=9)
    copies = np.zeros(min(len(hashes), len(room)), dtype=COPY)
    fit = slice(len(copies))
    copies["source"], copies["source_generation"] = held.hbm[fit], held.hbm_generations[fit]
    copies["target"], copies["target_generation"] = room[fit], generations[fit]
    one.step(stores=copies.tobytes(), released_dram=room.tobytes(), released_hbm=held.hbm.tobytes())
    one.acquire(hashes[:0])
    return hashes


def test_a_path_whose_folder_is_gone_is_paused_with_one_line_and_comes_back(place: Path) -> None:
    """It stayed in service: each block was copied, queued and refused, with two notices for one cause."""
    config = small_config(place, nvme_bytes=128 * MIB)
    folder = Path(config.nvme[0].path)
    with started(config) as service:
        shutil.rmtree(folder)
        one = RawClient(service.socket).begin()
        hashes = _into_dram(one, range(4 * BLOCKS))
        wait_for("the pause", lambda: "fails all writes" in " ".join(service.stats().warnings))
        (warning,) = service.stats().warnings
        assert "paused and tried again every 5 s" in warning
        assert "No such file" in warning, warning
        assert one.acquire(hashes, lease=10).outcomes == [pb.OUTCOME_HIT_HBM] * BLOCKS
        folder.mkdir(mode=0o700)
        wait_for("all blocks on disk", lambda: service.tier("nvme").sealed_slots == BLOCKS)
        assert list(service.stats().warnings) == []
        log = service.log.read_text()
        assert log.count("path paused") == log.count("path resumed") == 1, log
        assert log.count("path fails") <= 1, log
        assert "does not have" not in log, log
        reply = one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
        assert reply.durable_blocks == BLOCKS
        assert service.faults() == []
        one.close()


def test_a_service_whose_path_is_paused_ends_soon(place: Path) -> None:
    """Nothing failed any more while it was paused, so the drain took its disk for a slow one and waited to the end."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service:
        shutil.rmtree(config.nvme[0].path)
        one = RawClient(service.socket).begin()
        _into_dram(one, range(4 * BLOCKS))
        wait_for("the pause", lambda: "fails all writes" in " ".join(service.stats().warnings))
        one.close()
        began_s = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE_S) == 0, service.tail()
        assert time.monotonic() - began_s < 25.0, "the drain's deadline is 30 s"


def test_a_full_file_system_keeps_the_slabs_that_it_has(place: Path) -> None:
    """Where no other slab could be made all writes to the path were paused, also those into others."""
    with tmpfs(place / "disk", 128 * MIB) as disk:
        config = small_config(place, nvme_extent_bytes=4 * MIB)
        config = replace(config, nvme=(NvmePath(path=str(disk / "kv"), capacity_bytes=64 * MIB),))
        with started(config) as service:
            one = RawClient(service.socket).begin()
            _into_dram(one, range(4 * BLOCKS))
            wait_for("the first slab", lambda: service.tier("nvme").sealed_slots == BLOCKS)
            with (disk / "other").open("wb") as other:
                free = os.statvfs(disk)
                os.posix_fallocate(other.fileno(), 0, free.f_bavail * free.f_frsize - MIB)
            for first in range(10, 20):
                _into_dram(one, range(1000 * first, 1000 * first + 4 * BLOCKS))
                reply = one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
                assert reply.pending_blocks == reply.unfit_blocks, "DRAM holds more than one slab"
            (warning,) = service.stats().warnings
            assert "no space for a slab" in warning
            assert "older blocks make room instead" in warning
            counters = service.stats().counters
            assert counters["nvme_slabs_refused_total"] >= 1
            assert counters["nvme_pauses_total"] == 0
            assert counters["evictions_nvme"] > 0
            assert service.log.read_text().count("path fails") == 1
            assert len(list((disk / "kv").glob("slab-*"))) == 1
            assert service.faults() == []
            one.close()


def busier(service: Service, one: RawClient) -> Path:
    """Of idle paths the one that is given what comes: that whose mover was ready first, which may be either."""
    before = {path.path: path.accepted_bytes for path in service.stats().paths}
    _into_dram(one, range(90_000, 90_000 + 4 * BLOCKS))
    assert one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S).pending_blocks == 0
    return Path(max(service.stats().paths, key=lambda path: path.accepted_bytes - before[path.path]).path)


def mover_of(service: Service, folder: Path) -> int:
    """The mover that has files of this path open."""
    return next(
        pid
        for pid in service.mover_pids()
        if any(str(fd.resolve()).startswith(f"{folder}/") for fd in Path(f"/proc/{pid}/fd").iterdir())
    )


def test_a_hung_disk_is_a_miss_soon_and_the_other_disk_goes_on(place: Path) -> None:
    """For a minute every request that hit a disk without an answer waited for it."""
    paths = tuple(NvmePath(path=str(place / name), capacity_bytes=64 * MIB) for name in ("a", "b"))
    with started(replace(small_config(place, dram_bytes=16 * MIB), nvme=paths)) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        chains = [_into_dram(one, range(10_000 * n, 10_000 * n + 4 * BLOCKS)) for n in range(1, 5)]
        flushed = one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
        assert flushed.durable_blocks == 4 * BLOCKS
        sizes = [sum(file.stat().st_blocks for file in (place / name).glob("slab-*")) for name in ("a", "b")]
        assert all(sizes), "both disks have some"
        stopped = mover_of(service, busier(service, one))
        os.kill(stopped, signal.SIGSTOP)
        try:
            tokens = itertools.count(300_000, 1_000)

            def warned() -> bool:
                first = next(tokens)  # more and more: few blocks may all go to the other disk
                _into_dram(one, range(first, first + 4 * BLOCKS))
                return "does not answer" in " ".join(service.stats().warnings)

            wait_for("the warning", warned)
            began_s = time.monotonic()
            evict_memory(service, one)
            outcomes = [one.acquire(hashes, lease=40 + n).outcomes for n, hashes in enumerate(chains)]
            assert time.monotonic() - began_s < DEADLINE_S
            assert any(pb.OUTCOME_MISS in told for told in outcomes)
            _into_dram(one, range(95_000, 95_000 + 4 * BLOCKS))
            assert service.stats().counters["nvme_hangs_total"] == 1
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_for("no warning", lambda: not service.stats().warnings)
        flushed = one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
        assert flushed.pending_blocks == 0
        assert service.faults() == []
        assert "path answers again" in service.log.read_text() or service.config.log_level != "info"
        one.close()


def evict_memory(service: Service, one: RawClient) -> None:
    """Has DRAM and HBM hold other things, as far as these small tiers allow."""
    for first in range(200_000, 200_000 + 40 * 1000, 1000):
        _into_dram(one, range(first, first + 4 * BLOCKS))


def refused(place: Path, config: ServeConfig) -> str:
    """The one line that a service says which does not start; it ends with 2, and is not tried again."""
    service = start(config, place / "kv.log")
    try:
        assert service.process.wait(DEADLINE_S) == 2
    finally:
        service.stop()
    said = (place / "kv.log").read_text()
    assert "Traceback" not in said
    assert "ready" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("kvstore: ")]
    return line


def test_a_folder_of_another_user_is_no_start(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    config = small_config(place, nvme_bytes=128 * MIB)
    folder = Path(config.nvme[0].path)
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    assert "belongs to another user (uid 12345)" in refused(place, config)
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_read_is_made_private(place: Path) -> None:
    config = small_config(place, nvme_bytes=128 * MIB)
    folder = Path(config.nvme[0].path)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with started(config):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(file.stat().st_mode & 0o077 == 0 for file in folder.rglob("*"))


def test_a_read_only_file_system_is_no_start(place: Path) -> None:
    with tmpfs(place / "disk", 128 * MIB) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        config = replace(
            small_config(place), nvme=(NvmePath(path=str(disk / "kv"), capacity_bytes=64 * MIB),)
        )
        assert "Read-only file system" in refused(place, config)


def test_a_file_system_too_small_for_what_is_configured_is_no_start(place: Path) -> None:
    with tmpfs(place / "disk", 80 * MIB) as disk:
        (disk / "other").write_bytes(bytes(40 * MIB))
        config = replace(
            small_config(place), nvme=(NvmePath(path=str(disk / "kv"), capacity_bytes=64 * MIB),)
        )
        assert "has 40MiB of room" in refused(place, config)
