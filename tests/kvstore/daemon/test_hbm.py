"""HBM that outlives its worker, when it is believed, and what becomes of it where it cannot; over the twin."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import grpc
import pytest

from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, wait_for
from tests.support.hbm_scenes import (
    BLOCKS,
    a_killed_worker_leaves_its_hbm,
    killed_worker,
    plain_hbm_goes_with_its_worker,
    release,
)
from tests.support.hbm_worker import HbmWorker, finds
from tests.support.raw_client import RawClient
from tiers.twin import TwinDevice

Make = Callable[[], RawClient]


def _extent_fds(service: Service) -> list[int]:
    """The daemon's descriptors of HBM extents, opened again."""
    folder = f"/proc/{service.daemon_pid}/fd"
    found = []
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        if os.readlink(path).startswith("/memfd:kvstore-hbm"):
            found.append(os.open(path, os.O_RDWR))
    return found


def _corrupt(service: Service, slot: int, slot_bytes: int) -> None:
    """Changes one byte of a block in the only extent, which begins with slot 0."""
    (fd,) = _extent_fds(service)
    with mmap.mmap(fd, 0) as memory:
        memory[slot * slot_bytes + 100] ^= 1
    os.close(fd)


@pytest.mark.parametrize("kind", ["twin", "fake-cuda"])
def test_a_killed_worker_leaves_its_hbm(service: Service, client: Make, kind: str) -> None:
    a_killed_worker_leaves_its_hbm(service, kind)


@pytest.mark.parametrize("kind", ["twin", "fake-cuda"])
def test_plain_hbm_goes_with_its_worker(service: Service, client: Make, kind: str) -> None:
    plain_hbm_goes_with_its_worker(service, kind)


def test_hbm_that_is_not_what_it_was_is_not_used(service: Service, client: Make) -> None:
    """One flipped bit in memory that nobody owned for a while was served as a wrong block."""
    before = service.stats().counters["hbm_distrusted_total"]
    worker = killed_worker(service, "twin", "--blocks", str(BLOCKS))
    _corrupt(service, worker.report["slots"][0], worker.report["slot_bytes"])
    found = finds(service.socket, "twin")
    assert (found["outcomes"], found["wrong"]) == ({"HIT_DRAM": BLOCKS}, 0)
    stats = service.stats()
    assert stats.counters["hbm_distrusted_total"] - before == BLOCKS
    assert any("not believed" in warning for warning in stats.warnings)
    assert found["pages"] == worker.report["pages"], "the memory itself is used again"
    release(service)


def test_wrong_hbm_that_somebody_holds_is_shared_with_nobody(service: Service, client: Make) -> None:
    """A second worker would have read the blocks of which it knew that they were wrong."""
    worker = HbmWorker(service.socket, "twin")
    _corrupt(service, worker.report["slots"][0], worker.report["slot_bytes"])
    found = finds(service.socket, "twin", "--timeout", "1")
    assert found["error"] == "FailedPrecondition"
    assert "not what it was" in found["text"]
    assert service.tier("hbm").sealed_slots == BLOCKS, "nothing is taken from the worker that holds it"
    worker.process.kill()  # and at once, before its end is known:
    assert finds(service.socket, "twin")["outcomes"] == {"HIT_DRAM": BLOCKS}
    worker.kill()
    release(service)


def test_orphans_of_another_boot_or_driver_are_dropped(service: Service, client: Make) -> None:
    one = client().begin()
    hashes, _ = one.fill(range(16))
    one.stub.Detach(pb.DetachRequest(token=one.token), timeout=30)
    assert service.tier("hbm").orphan_slots == len(hashes)
    other = client()
    other.attach(device=pb.Device(identity="another boot"))
    assert service.tier("hbm").allocated_bytes == 0


def test_orphans_that_go_together_are_one_line(service: Service, client: Make) -> None:
    """Each extent had a line of its own in the log: 350 in a row when a worker's memory went."""
    one = client().begin()
    for _ in range(3):
        one.give_hbm(4)
    one.stub.Detach(pb.DetachRequest(token=one.token), timeout=30)
    before = service.log.read_text().count("hbm dropped")
    release(service)
    log = service.log.read_text()
    assert log.count("hbm dropped") == before + 1
    assert "extents=4 " in next(line for line in log.splitlines()[::-1] if "hbm dropped" in line)


def test_a_devices_number_means_one_device_at_a_time(service: Service, client: Make) -> None:
    """A worker that sees one GPU of two calls it device 0, and so does the other: their pages must not be mixed."""
    client().begin()
    with pytest.raises(grpc.RpcError, match="another one for session") as caught:
        client().attach(device=pb.Device(identity="another GPU"))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.RpcError, match="identity"):
        client().attach(device=pb.Device(index=0, identity="x" * 300))


def test_status_tells_of_devices(service: Service, client: Make) -> None:
    one = client()
    one.attach()
    one.hello()
    one.give_hbm(4)
    (device,) = service.stats().devices
    assert (device.index, device.kind, device.uuid) == (0, pb.DEVICE_KIND_TWIN, "")
    assert (device.owned_bytes, device.orphan_bytes, device.plain_bytes) == (4 * 16384, 0, 0)
    one.stub.Detach(pb.DetachRequest(token=one.token), timeout=30)
    wait_for("an orphan", lambda: service.stats().devices[0].orphan_bytes == 4 * 16384)
    assert TwinDevice().identity.startswith("twin ")
