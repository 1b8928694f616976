"""Starting, serving and ending as a whole: sockets, services, signals, metrics, and what bad configurations say."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvstore.client import connect
from kvstore.config import Limits, NvmePath
from kvstore.daemon.blackbox import saved_paths
from kvstore.errors import ConfigError
from kvstore.units import GIB, MIB
from kvstore.wire.v1 import health_pb2, health_pb2_grpc, kvstore_pb2_grpc
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.command import kvstore
from tests.support.daemon import DEADLINE_S, Service, small_config, start, started, wait_for
from tests.support.raw_client import RawClient

Make = Callable[[], RawClient]


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outcome(service: Service) -> tuple[int, str]:
    """Exit code and log of a service that ends by itself."""
    code = service.process.wait(DEADLINE_S)
    service.rpc.close()
    return code, service.log.read_text()


def test_sockets_are_the_users_own(service: Service) -> None:
    for path in (service.socket, f"{service.socket}.fd"):
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


def test_a_second_daemon_on_one_socket_says_so(service: Service, place: Path) -> None:
    """Elsewhere the second server took the socket of the first, whose clients then hung."""
    second = start(service.config, place / "second.log")
    code, log = outcome(second)
    assert code != 0
    assert log.count("\n") == 1, log
    assert "socket in use" in log
    assert service.stats().ready


def test_a_stale_socket_is_replaced(place: Path) -> None:
    config = small_config(place)
    for suffix in ("", ".fd"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(config.socket + suffix)
    with started(config) as service:
        assert service.stats().ready


def test_a_file_in_the_sockets_place_is_left_alone(place: Path) -> None:
    config = small_config(place)
    Path(config.socket).write_text("precious")
    code, log = outcome(start(config, place / "log"))
    assert code != 0
    assert "is no socket" in log
    assert Path(config.socket).read_text() == "precious"


def test_the_longest_path_of_a_socket_works_for_all_of_its_sockets(place: Path) -> None:
    """The daemon took paths whose sockets for descriptors or administration nobody could reach."""
    socket_path = f"{place}/".ljust(100, "s")
    with started(replace(small_config(place), socket=socket_path, tcp=f"127.0.0.1:{free_port()}")) as service:
        for transport in ("rpc", "frames"):
            RawClient(service.socket, transport).begin().close()
        with grpc.insecure_channel(f"unix:{socket_path}.admin") as channel:
            admin = kvstore_pb2_grpc.AdminStub(channel)
            assert not admin.CheckIntegrity(pb.CheckIntegrityRequest(), timeout=30).faults
    for refused in (
        lambda: replace(small_config(place), socket=f"{socket_path}s"),
        lambda: connect(f"{socket_path}s"),
    ):
        with pytest.raises(ConfigError, match="the path is 101 bytes, at most 100"):
            refused()


def test_health_and_description(service: Service) -> None:
    with grpc.insecure_channel(f"unix:{service.socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    described = service.describe()
    assert described.keeper_pid == service.process.pid
    assert described.protocol_version == 1
    assert f'socket = "{service.socket}"' in described.config_toml


def test_sigterm_is_told_to_clients_and_ends_with_zero(place: Path) -> None:
    with started(small_config(place)) as service:
        one = RawClient(service.socket).begin()
        service.process.send_signal(signal.SIGTERM)
        assert one.receive_body("draining").draining.deadline_ms == 30_000
        assert service.process.wait(DEADLINE_S) == 0
        one.close()
    assert not Path(service.socket).exists()


def test_sighup_is_ignored(service: Service) -> None:
    os.kill(service.daemon_pid, signal.SIGHUP)
    os.kill(service.keeper_pid, signal.SIGHUP)
    time.sleep(0.2)
    assert service.stats().ready


def test_sigterm_brings_dram_to_disk(place: Path) -> None:
    """Elsewhere an orderly restart lost what had not been written yet."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service:
        one = RawClient(service.socket).begin(hbm_slots=128)
        hashes, _ = one.fill(range(400))
        one.write_through(hashes)
        one.close()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE_S) == 0
    with started(config) as service:
        assert service.tier("nvme").sealed_slots == 100
        one = RawClient(service.socket).begin(hbm_slots=128)
        granted = one.acquire(hashes)
        if granted.outcomes[0] != pb.OUTCOME_HIT_DRAM:
            one.receive_body("changed")
            granted = one.acquire(hashes)
        assert granted.outcomes == [pb.OUTCOME_HIT_DRAM] * 100
        one.close()


def test_a_second_signal_ends_at_once(place: Path) -> None:
    config = replace(small_config(place, nvme_bytes=128 * MIB), limits=Limits(drain_deadline_s=60))
    environ = {"KVSTORE_FAULT": "mover.sync:sleep=20"}
    with started(config, environ=environ) as service:
        one = RawClient(service.socket).begin()
        hashes, _ = one.fill(range(40))
        one.write_through(hashes)
        service.process.send_signal(signal.SIGTERM)
        one.receive_body("draining")
        time.sleep(0.2)
        assert service.process.poll() is None, "it waits for the disk"
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        one.close()


def test_metrics_are_served_on_loopback(place: Path) -> None:
    port = free_port()
    with started(replace(small_config(place), metrics_port=port)) as service:
        one = RawClient(service.socket).begin()
        one.fill(range(40))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        assert 'kvstore_tier_sealed_slots{tier="hbm"} 10.0' in text
        assert 'kvstore_sessions{state="attached"} 1.0' in text
        assert "kvstore_messages_total " in text
        for gauge in ("moves_in_flight", "queued_reads", "queued_writes"):
            assert f"kvstore_{gauge} 0.0" in text
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=30)
        one.close()


def test_a_taken_metrics_port_says_so(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = replace(small_config(place, nvme_bytes=64 * MIB), metrics_port=taken.getsockname()[1])
        code, log = outcome(start(config, place / "log"))
    assert code != 0
    assert "metrics_port: cannot listen" in log.splitlines()[-1]
    assert not (place / "nvme").exists(), (
        "a start that failed after its disks were opened leaves them as they were"
    )


def test_tcp_serves_and_admin_is_not_there(place: Path) -> None:
    """Elsewhere administration was open to everyone who reached the port."""
    port = free_port()
    with started(replace(small_config(place), tcp=f"127.0.0.1:{port}")):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stats = kvstore_pb2_grpc.KvstoreStub(channel).Stats(pb.StatsRequest(), timeout=30)
            assert stats.ready
            admin = kvstore_pb2_grpc.AdminStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                admin.Clear(pb.ClearRequest(), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        own = place / "kv.sock.admin"
        assert stat.S_IMODE(own.stat().st_mode) == 0o600
        with grpc.insecure_channel(f"unix:{own}") as channel:
            admin = kvstore_pb2_grpc.AdminStub(channel)
            assert not admin.CheckIntegrity(pb.CheckIntegrityRequest(), timeout=30).faults


@pytest.mark.parametrize(
    "nvme, says",
    [
        (lambda place: NvmePath(path=str(place / "files"), capacity_bytes=64 * MIB), "holds other files"),
        (lambda place: NvmePath(path=str(place / "new"), capacity_bytes=1 << 42), "in all: give less"),
        (lambda place: NvmePath(path=str(place / "files" / "file"), capacity_bytes=64 * MIB), "is no folder"),
        (lambda place: NvmePath(path=str(place / "none" / "new"), capacity_bytes=64 * MIB), "does not exist"),
    ],
    ids=["foreign", "space", "file", "folder"],
)
def test_a_disk_that_cannot_be_used_is_one_line(
    place: Path, nvme: Callable[[Path], NvmePath], says: str
) -> None:
    (place / "files").mkdir()
    (place / "files" / "file").write_text("precious")
    config = replace(small_config(place), nvme=(nvme(place),), min_slot_bytes=MIB)
    code, log = outcome(start(config, place / "log"))
    assert code != 0
    assert says in log.splitlines()[-1]
    assert log.splitlines()[-1].startswith("kvstore: nvme: ")
    assert log.count("\n") == 1, log
    assert (place / "files" / "file").read_text() == "precious"
    assert sorted(path.name for path in place.iterdir()) == ["files", "kv.sock.lock", "log"]
    assert [path.name for path in (place / "files").iterdir()] == ["file"]


def test_tables_that_do_not_fit_say_what_to_lower(place: Path) -> None:
    """Sizes that make the tables larger than memory were answered with a size that nobody had written."""
    config = replace(small_config(place), hbm_bytes=8 << 40, min_slot_bytes=4096)
    code, log = outcome(start(config, place / "log"))
    assert code != 0
    assert "no memory for the tables" in log
    assert "raise min_slot" in log
    assert log.count("\n") == 1, log


@pytest.mark.parametrize("damage", ["short", "gone"])
def test_a_damaged_secret_is_one_line_and_no_new_one(place: Path, damage: str) -> None:
    """A secret of the wrong length was replaced by a new one for each start, and the disk's cache was lost silently."""
    config = small_config(place, nvme_bytes=64 * MIB)
    with started(config) as service:
        wait_for("the disk", service.mover_pids)
    secret = place / "nvme" / "secret"
    (place / "nvme" / "slab-1-8192.kv").touch()
    if damage == "short":
        secret.write_bytes(secret.read_bytes()[:-1])
    else:
        secret.unlink()
    code, log = outcome(start(config, place / "log"))
    assert code != 0
    assert log.startswith("kvstore: nvme: ")
    assert str(secret) in log
    assert log.count("\n") == 1, log
    assert (len(secret.read_bytes()) if secret.exists() else 0) == (31 if damage == "short" else 0)


def test_a_drain_does_not_wait_for_a_disk_that_is_out_of_service(place: Path) -> None:
    """A path whose disk hung kept the daemon for the whole drain deadline, though nothing could be written to it."""
    config = replace(small_config(place, nvme_bytes=64 * MIB), limits=Limits(drain_deadline_s=25.0))
    with started(config) as service:
        (mover,) = wait_for("the mover", service.mover_pids)
        os.kill(
            mover, signal.SIGSTOP
        )  # as one that hangs in its disk: the next daemon has to wait for its end
        try:
            service.kill_daemon()
            one = RawClient(service.socket).begin()
            hashes, _ = one.fill(range(40))
            one.write_through(hashes)
            one.close()
            began_s = time.monotonic()
            os.kill(service.keeper_pid, signal.SIGTERM)
            assert service.process.wait(DEADLINE_S) == 0
            assert time.monotonic() - began_s < 20.0
            assert "flushed durable=0 left=" in service.log.read_text()
        finally:
            os.kill(mover, signal.SIGKILL)


def test_ready_does_not_wait_for_all_of_dram(place: Path) -> None:
    """Elsewhere a large pool was touched before the server answered, for half a minute."""
    config = replace(small_config(place), dram_bytes=2 * GIB, dram_extent_bytes=64 * MIB)
    with started(config) as service:
        assert service.tier("dram").allocated_bytes < 2 * GIB
        assert RawClient(service.socket).begin().close() is None
        wait_for("all of it", lambda: service.tier("dram").allocated_bytes == 2 * GIB)


def test_nothing_is_left_behind(place: Path) -> None:
    """Elsewhere shared memory and sockets of killed servers stayed until the machine was restarted."""
    with started(small_config(place)) as service:
        RawClient(service.socket).begin().close()
        service.kill_daemon()
        pids = set(service.pids)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert not list(Path("/dev/shm").glob("*kvstore*"))
    recordings = {Path(name).name for name in saved_paths(service.socket)}
    assert {path.name for path in place.iterdir()} <= {"kv.log", "kv.sock.lock", *recordings}


def test_pause_makes_every_lookup_a_miss(client: Make, service: Service) -> None:
    one = client().begin()
    hashes, _ = one.fill(range(40))
    service.call("Pause", pb.PauseRequest(paused=True), service="admin")
    try:
        assert service.stats().paused
        granted = one.acquire(hashes, lease=2)
        assert granted.outcomes == [pb.OUTCOME_MISS] * 10
        assert one.seal(one.seals(hashes, granted)) == [pb.SEAL_OUTCOME_DUPLICATE] * 10
        one.release(hbm=granted.hbm.tolist())
    finally:
        service.call("Pause", pb.PauseRequest(paused=False), service="admin")
    assert one.acquire(hashes, lease=3).outcomes == [pb.OUTCOME_HIT_HBM] * 10


def test_pin_explain_and_leases(client: Make, service: Service) -> None:
    one = client().begin()
    hashes, _ = one.fill(range(40))
    longer = one.chain(range(48))
    request = pb.ExplainRequest(token=one.token, namespace=one.ns.namespace, hashes=longer.tobytes())
    told = one.stub.Explain(request, timeout=30)
    assert (told.cached_blocks, told.cause, dict(told.blocks_by_tier)) == (10, "never stored", {"hbm": 10})
    pin = pb.PinRequest(namespace=one.ns.namespace, hashes=hashes.tobytes(), ttl_s=60, owner="ops")
    assert one.admin.Pin(pin, timeout=30).pinned_blocks == 10
    assert [(pin.owner, pin.blocks) for pin in service.stats().pins] == [("ops", 10)]
    unpin = pb.UnpinRequest(namespace=one.ns.namespace, hashes=hashes.tobytes(), owner="somebody else")
    assert one.admin.Unpin(unpin, timeout=30).unpinned_blocks == 0
    unpin.owner = "ops"
    assert one.admin.Unpin(unpin, timeout=30).unpinned_blocks == 10
    assert not service.stats().pins
    leases = one.admin.Leases(pb.LeasesRequest(), timeout=30).sessions
    assert [(lease.name, lease.state, lease.held_hbm_slots) for lease in leases] == [("raw", "attached", 10)]
    with pytest.raises(grpc.RpcError) as caught:
        one.admin.Pin(pb.PinRequest(namespace=one.ns.namespace, hashes=hashes.tobytes()), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_flush_without_a_disk_says_so(client: Make) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client().stub.Flush(pb.FlushRequest(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_descriptors_do_not_leak(service: Service) -> None:
    """Each opened and closed session gives all its descriptors back, here and in the keeper."""

    def count() -> tuple[int, int]:
        return (
            len(os.listdir(f"/proc/{service.daemon_pid}/fd")),
            len(os.listdir(f"/proc/{service.keeper_pid}/fd")),
        )

    RawClient(service.socket).begin(hbm_slots=0).close()
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")
    service.call("Forget", pb.ForgetRequest(session=service.stats().sessions[0].session), service="admin")
    before = count()
    for _ in range(5):
        one = RawClient(service.socket).begin(hbm_slots=0)
        one.stub.Detach(pb.DetachRequest(token=one.token), timeout=30)
        one.close()
    wait_for("as before", lambda: count() <= before)


def test_output_of_a_start_is_a_ready_line(place: Path) -> None:
    config = small_config(place)
    service = start(config, place / "log")
    line = wait_for("the ready line", lambda: _line(place / "log"))
    assert line.startswith(f"kvstore ready on {config.socket}: DRAM 64MiB")
    service.await_ready()
    assert service.stop() == 0


def _line(log: Path) -> str:
    return next((line for line in log.read_text().splitlines() if line.startswith("kvstore ready")), "")


def test_commands_say_when_nobody_listens(place: Path) -> None:
    for command in (["status"], ["release"], ["status", "--json"]):
        done = kvstore(*command, "--socket", str(place / "none.sock"))
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1
        assert "kvstore serve" in done.stderr, done.stderr
