"""Files that somebody deletes under a running service: what lies in them is never called durable."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.config import Durability, ServeConfig
from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.test_disk_faults import BLOCKS, store
from tests.kvstore.daemon.test_nvme import kill_all
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.raw_client import RawClient


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def flush(one: RawClient, deadline_ms: int = 20_000) -> pb.FlushReply:
    return one.stub.Flush(pb.FlushRequest(deadline_ms=deadline_ms), timeout=DEADLINE_S)


def delete_slabs(folder: Path) -> int:
    slabs = list(folder.glob("slab-*.kv"))
    for slab in slabs:
        slab.unlink()
    return len(slabs)


def in_service(service: Service) -> bool:
    return all(path.in_service for path in service.stats().paths)


@contextmanager
def deleted_before_opened(config: ServeConfig) -> Iterator[tuple[Service, RawClient]]:
    """A service, started again over durable blocks whose slab was deleted before its mover opened it; and a client."""
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        store(one, "first")
        assert flush(one).durable_blocks == BLOCKS
        one.close()
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        wait_for("the blocks", lambda: service.tier("nvme").sealed_slots == BLOCKS)
        delete_slabs(Path(config.nvme[0].path))
        yield service, one


@pytest.mark.parametrize("durability", [Durability.POWER, Durability.PROCESS])
def test_a_flush_calls_nothing_durable_that_lies_in_a_deleted_slab(
    place: Path, durability: Durability
) -> None:
    """Writes into a slab that was deleted while it was open were synced, and called durable without a word."""
    config = small_config(place, nvme_bytes=128 * MIB, durability=durability)
    folder = Path(config.nvme[0].path)
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        store(one, "first")
        assert flush(one).pending_blocks == 0
        assert delete_slabs(folder) == 1
        store(one, "second")
        told = flush(one)
        assert told.pending_blocks or told.durable_blocks <= 2 * BLOCKS
        wait_for("the count", lambda: service.stats().counters["nvme_slabs_lost_total"] == 1)
        wait_for("the path", lambda: in_service(service))
        assert "slab was deleted while in use" in service.log.read_text()
        told = flush(one)
        assert told.pending_blocks == 0
        assert list(folder.glob("slab-*.kv")), "what is durable is in a file"
        durable = told.durable_blocks
        assert service.faults() == []
        one.close()
        kill_all(service)
    with started(config) as service:
        wait_for("the blocks", lambda: service.tier("nvme").sealed_slots == durable)


def test_a_deleted_slab_that_nothing_has_opened_yet_is_found_by_a_flush(place: Path) -> None:
    """A mover opens a slab with the first move, so after a start nobody saw that one was deleted."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with deleted_before_opened(config) as (service, one):
        assert flush(one).pending_blocks >= 1
        wait_for("the loss", lambda: service.tier("nvme").sealed_slots == 0)
        wait_for("the path", lambda: in_service(service))
        told = flush(one)
        assert (told.pending_blocks, told.durable_blocks) == (0, 0)
        assert service.faults() == []
        one.close()


def test_a_deleted_slab_that_a_write_opens_first_is_not_made_anew_under_its_blocks(place: Path) -> None:
    """It was, empty, with a line in the log: a flush went on to call durable what had been in the old one."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with deleted_before_opened(config) as (service, one):
        store(one, "second")
        wait_for("the count", lambda: service.stats().counters.get("nvme_slabs_lost_total") == 1)
        wait_for("the path", lambda: in_service(service))
        wait_for("a flush", lambda: flush(one).pending_blocks == 0)
        assert flush(one).durable_blocks == BLOCKS
        one.close()
        kill_all(service)
    with started(config) as service:
        wait_for("the second's blocks", lambda: service.tier("nvme").sealed_slots == BLOCKS)
        assert service.faults() == []


def test_an_index_that_was_deleted_is_made_anew_with_all_there_is(place: Path) -> None:
    """LMDB went on in a file without a name, so a flush called durable what no later start could look up."""
    config = small_config(place, nvme_bytes=128 * MIB)
    index = Path(config.nvme[0].path) / "index" / "data.mdb"
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        store(one, "first")
        assert flush(one).pending_blocks == 0
        index.unlink()
        store(one, "second")
        flush(one)
        assert flush(one).pending_blocks == 0
        assert index.exists()
        assert service.stats().counters["nvme_indexes_lost_total"] == 1
        one.close()
        kill_all(service)
    with started(config) as service:
        wait_for("the blocks", lambda: service.tier("nvme").sealed_slots == 2 * BLOCKS)
        assert "index rebuilt" not in service.log.read_text().split("ready")[-1]


def test_a_folder_that_was_deleted_with_all_in_it_is_durable_again_once_it_is_back(place: Path) -> None:
    """After `rm -rf` of a path in use a flush went on to call durable what was in files without names."""
    config = small_config(place, nvme_bytes=128 * MIB)
    folder = Path(config.nvme[0].path)
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        store(one, "first")
        assert flush(one).pending_blocks == 0
        shutil.rmtree(folder)
        store(one, "second")
        began_s = time.monotonic()
        assert flush(one).pending_blocks >= 1
        assert time.monotonic() - began_s < 18.0
        folder.mkdir(mode=0o700)
        store(one, "third")
        wait_for("a flush that goes well", lambda: flush(one).pending_blocks == 0)
        durable = service.tier("nvme").sealed_slots
        assert durable >= BLOCKS
        assert service.faults() == []
        one.close()
        kill_all(service)
    with started(config) as service:
        wait_for("the blocks", lambda: service.tier("nvme").sealed_slots == durable)


def test_a_flush_of_a_disk_that_hangs_ends_soon(place: Path) -> None:
    """It was answered after a minute, when the mover was killed, though the hang had been known after 3 s."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=512)
        store(one, "first")
        assert flush(one).pending_blocks == 0
        (mover,) = service.mover_pids()
        os.kill(mover, signal.SIGSTOP)
        try:
            store(one, "second")
            began_s = time.monotonic()
            assert flush(one, deadline_ms=60_000).pending_blocks >= 1
            assert time.monotonic() - began_s < DEADLINE_S
        finally:
            os.kill(mover, signal.SIGCONT)
        wait_for("no warning", lambda: not service.stats().warnings)
        assert flush(one).pending_blocks == 0
        assert service.faults() == []
        one.close()
