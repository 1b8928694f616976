"""A service for each module of these tests, and clients that are closed at the end of each test."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest

from kvstore.units import MIB
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.test_nvme import Written, filled
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import RawClient


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: a unix socket's has at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    """A service of the module's own, without disks."""
    with started(small_config(folder)) as service:
        yield service


@pytest.fixture(scope="module")
def disk_service(folder: Path) -> Iterator[Service]:
    """A service of the module's own, with one NVMe path."""
    with started(small_config(folder, nvme_bytes=128 * MIB)) as service:
        yield service


@pytest.fixture(scope="session")
def written() -> Iterator[Written]:
    """Filled once: it is the same for every test that does something to it afterwards."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        hashes = filled(small_config(Path(name), nvme_bytes=128 * MIB))
        yield Written(folder=Path(name) / "nvme", hashes=hashes)


@pytest.fixture
def transport() -> Literal["rpc", "frames"]:
    """Of the clients' streams; a module that holds for both overrides it."""
    return "rpc"


@pytest.fixture
def client(service: Service, transport: Literal["rpc", "frames"]) -> Iterator[Callable[[], RawClient]]:
    """Makes clients; closes them and detaches their sessions; then the store must be sound and nothing held."""
    made: list[RawClient] = []

    def make() -> RawClient:
        made.append(RawClient(service.socket, transport))
        return made[-1]

    yield make
    for client in made:
        finish(client)
    empty(service)


def empty(service: Service) -> None:
    """At the end of a test nothing is held, the store is sound, and everything can be let go."""
    wait_for("no session", lambda: not service.stats().sessions)
    assert service.faults() == []
    assert service.tier("hbm").held_slots == 0
    assert service.tier("dram").held_slots == 0
    service.call("Clear", pb.ClearRequest(namespace=0xFFFFFFFF), service="admin")
    service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    assert service.stats().rows == 0
    assert service.tier("hbm").allocated_bytes == 0


def finish(client: RawClient) -> None:
    """Ends a client's session, whatever has become of it, and the client."""
    client.connect()
    if client.attached is not None:
        with contextlib.suppress(grpc.RpcError):
            client.stub.Detach(pb.DetachRequest(token=client.token), timeout=30, wait_for_ready=True)
    client.close()


class MemberProcess:
    """A worker in a process of its own."""

    def __init__(self, socket: str, *arguments: str, within: Sequence[str] = ()) -> None:
        """`within`: a command that runs it, in namespaces of its own."""
        command = [sys.executable, "-m", "tests.support.raw_member", socket, *arguments]
        self.process = subprocess.Popen([*within, *command], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the member process ended early"
        self.report: dict[str, Any] = json.loads(line)

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reaps it."""
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        """Ends it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def member(service: Service, client: object) -> Iterator[Callable[..., MemberProcess]]:
    """Starts worker processes; none outlives the test. What they leave is checked and let go as `client` does."""
    made: list[MemberProcess] = []

    def make(*arguments: str, within: Sequence[str] = ()) -> MemberProcess:
        made.append(MemberProcess(service.socket, *arguments, within=within))
        return made[-1]

    yield make
    for process in made:
        process.close()
