"""What the daemon learns from NVML, a fake one, and what it does about a GPU's faults."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvstore.wire import descriptors as wire
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.test_commands import run
from tests.support import fake_nvml
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import RawClient

XID, ECC = fake_nvml.nvmlEventTypeXidCriticalError, fake_nvml.nvmlEventTypeDoubleBitEccError
SLOTS = 16


class Gpus:
    """The fake's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(fake_nvml.__file__, folder / "pynvml.py")
        (folder / "events").touch()
        self.state(ecc=0)

    def state(self, **values: int) -> None:
        (self.folder / "state.tmp").write_text(json.dumps(values))
        (self.folder / "state.tmp").rename(self.folder / "state.json")

    def event(self, gpu: int, kind: int, data: int) -> None:
        with (self.folder / "events").open("a") as file:
            file.write(f"{gpu} {kind} {data}\n")


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with tempfile.TemporaryDirectory(prefix="nvml") as name:
        yield Gpus(Path(name))


@pytest.fixture
def gpu_service(gpus: Gpus) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = small_config(Path(name), metrics_port=port)
        with started(config, environ={"PYTHONPATH": str(gpus.folder)}) as service:
            wait_for("the GPUs", lambda: len(service.stats().gpus) == 2)
            yield service


@pytest.fixture
def worker(gpu_service: Service) -> Iterator[Callable[[], RawClient]]:
    made: list[RawClient] = []

    def make() -> RawClient:
        """A session of GPU-a with one extent, whose descriptor is no memfd, as that of CUDA memory is none."""
        one = RawClient(gpu_service.socket)
        made.append(one)
        device = pb.Device(kind=pb.DEVICE_KIND_CUDA, uuid="GPU-a", identity="a")
        one.attach(device=device)
        one.hello()
        if not one.hbm:
            answer = one.give_hbm(SLOTS, fd=os.open("/dev/null", os.O_RDWR))
            assert isinstance(answer, wire.Accepted)
        one.open_stream()
        one.ns = one.namespace()
        return one

    yield make
    for one in made:
        one.close()


def leave_orphans(service: Service, worker: Callable[[], RawClient]) -> None:
    """4 blocks in HBM that nobody maps."""
    one = worker()
    one.fill(range(16))
    detach(one)
    assert service.tier("hbm").orphan_slots == 4


def detach(one: RawClient) -> None:
    one.stub.Detach(pb.DetachRequest(token=one.token), timeout=30)


def test_gpus_are_shown(gpu_service: Service, gpus: Gpus) -> None:
    first, second = gpu_service.stats().gpus
    assert (first.uuid, first.name, first.pci_bus_id) == ("GPU-a", "Fake 0", "00000000:00:00.0")
    assert (first.memory_total_bytes, first.memory_free_bytes) == (100 << 30, 70 << 30)
    assert (first.numa_node, list(first.links)) == (-1, [0, 30]), "no answer of the library is no error"
    assert (second.ecc_uncorrected, list(second.links)) == (0, [30, 0])
    with urlopen(f"http://127.0.0.1:{gpu_service.config.metrics_port}/metrics", timeout=30) as answer:
        lines = dict(line.rpartition(" ")[::2] for line in answer.read().decode().splitlines())
    assert float(lines['kvstore_gpu_memory_free_bytes{gpu="GPU-b"}']) == 70 << 30
    shown = run("status", "--socket", gpu_service.socket).stdout
    assert "Fake 0" in shown
    assert "70GiB" in shown
    assert "…" not in shown, "nothing is cut on 80 columns"
    machine = json.loads(run("status", "--socket", gpu_service.socket, "--json").stdout)
    assert machine["gpus"][1]["links"] == [30, 0]
    gpus.state(ecc=0, lost=1)
    wait_for("the lost GPU to be left out", lambda: len(gpu_service.stats().gpus) == 1)


@pytest.mark.parametrize("kind, data", [(XID, 94), (XID, 31), (ECC, 0)])
def test_a_fault_takes_the_gpus_orphans(
    gpu_service: Service, gpus: Gpus, worker: Callable[[], RawClient], kind: int, data: int
) -> None:
    """Blocks in memory that had an uncorrected error were served to the next worker."""
    leave_orphans(gpu_service, worker)
    gpus.event(0, kind, data)
    wait_for("the drop", lambda: gpu_service.tier("hbm").allocated_bytes == 0)
    stats = gpu_service.stats()
    assert stats.counters["hbm_distrusted_total"] == 4
    assert any("GPU-a" in warning for warning in stats.warnings)
    assert (stats.gpus[0].xid_events, stats.gpus[0].last_xid) == ((1, data) if kind == XID else (0, 0))
    assert gpu_service.faults() == []


def test_more_ecc_errors_than_before_are_a_fault(
    gpu_service: Service, gpus: Gpus, worker: Callable[[], RawClient]
) -> None:
    leave_orphans(gpu_service, worker)
    gpus.state(ecc=2)
    wait_for("the drop", lambda: gpu_service.tier("hbm").allocated_bytes == 0)
    assert gpu_service.stats().gpus[0].ecc_uncorrected == 2


def test_a_killed_program_and_another_gpu_are_no_fault(
    gpu_service: Service, gpus: Gpus, worker: Callable[[], RawClient]
) -> None:
    """Every kill -9 of a busy worker may raise Xid 45: it would have cost exactly the blocks that are to survive it."""
    leave_orphans(gpu_service, worker)
    gpus.event(0, XID, 45)
    gpus.event(1, XID, 94)
    wait_for("the events", lambda: [gpu.xid_events for gpu in gpu_service.stats().gpus] == [1, 1])
    assert gpu_service.tier("hbm").orphan_slots == 4
    assert gpu_service.stats().counters["hbm_distrusted_total"] == 0


def test_what_a_live_worker_maps_is_for_nobody_after_it(
    gpu_service: Service, gpus: Gpus, worker: Callable[[], RawClient]
) -> None:
    one = worker()
    one.fill(range(16))
    gpus.event(0, XID, 94)
    wait_for("the event", lambda: gpu_service.stats().gpus[0].xid_events)
    assert gpu_service.tier("hbm").sealed_slots == 4
    gpu_service.kill_daemon()
    detach(one)
    wait_for("the drop", lambda: gpu_service.tier("hbm").allocated_bytes == 0)


def test_a_library_that_breaks_ends_the_watch_alone(gpu_service: Service, gpus: Gpus) -> None:
    pid = gpu_service.daemon_pid
    gpus.event(0, -1, 0)
    wait_for("the warning", lambda: any("no longer watched" in text for text in gpu_service.stats().warnings))
    assert gpu_service.daemon_pid == pid
