"""kill -9 of the daemon or the keeper under connected clients: what was sealed is a hit, nothing held is reused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import grpc
import pytest

from kvstore.wire import descriptors as wire
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.conftest import MemberProcess
from tests.support.daemon import DEADLINE_S, Service, small_config, started, wait_for
from tests.support.raw_client import Granted, RawClient

Make = Callable[[], RawClient]


def pairs(granted: Granted) -> list[tuple[int, int]]:
    """(slot, generation) of a grant's HBM slots."""
    return list(zip(granted.hbm.tolist(), granted.hbm_generations.tolist(), strict=True))


def come_back(one: RawClient, statement: list[tuple[int, int]]) -> None:
    """What a client does after its daemon died."""
    one.connect()
    assert one.resume(hbm=statement).resumed
    one.open_stream()
    one.ns = one.namespace()


def test_sealed_blocks_are_hits_after_a_kill(client: Make, service: Service) -> None:
    one = client().begin()
    hashes, granted = one.fill(range(40))
    key = one.ns.key
    epoch = one.attached.boot_epoch if one.attached else 0
    service.kill_daemon()
    come_back(one, pairs(granted))
    assert one.attached is not None
    assert one.attached.boot_epoch != epoch
    assert one.ns.key == key, "the tenant's secret outlives the daemon, or every block would be lost"
    assert service.stats().sessions[0].held_hbm_slots == 10
    assert one.acquire(hashes).outcomes == [pb.OUTCOME_HIT_HBM] * 10
    assert service.faults() == []


def test_half_filled_slots_are_no_hits_after_a_kill(client: Make, service: Service) -> None:
    """Elsewhere a restart turned reserved slots into visible blocks."""
    one, other = client().begin(), client().begin()
    hashes = one.chain(range(100, 140))
    granted = one.acquire(hashes)
    service.kill_daemon()
    come_back(other, [])
    assert other.acquire(hashes).outcomes[0] in (pb.OUTCOME_MISS, pb.OUTCOME_PENDING)
    come_back(one, pairs(granted))
    seals = one.seals(hashes, granted)
    assert set(one.seal(seals)) <= {pb.SEAL_OUTCOME_PUBLISHED, pb.SEAL_OUTCOME_DUPLICATE}


def test_slots_of_a_living_client_that_has_not_resumed_are_not_reused(client: Make, service: Service) -> None:
    """A freed slot reused while somebody writes it by DMA is the worst fault there is."""
    one = client().begin()
    _, granted = one.fill(range(40))
    service.kill_daemon()
    other = client().begin(hbm_slots=0)
    taken = other.acquire(other.chain(range(1000, 1000 + 4 * 60)))
    given = {slot for slot in taken.hbm.tolist() if slot != 0xFFFFFFFF}
    assert given
    assert not given & set(granted.hbm.tolist())


def test_unstated_slots_are_free_after_a_resume(client: Make, service: Service) -> None:
    """A grant whose answer was lost with the daemon must not stay held for ever."""
    one = client().begin()
    hashes = one.chain(range(200, 240))
    granted = one.acquire(hashes)
    service.kill_daemon()
    come_back(one, pairs(granted)[:3])
    assert service.stats().sessions[0].held_hbm_slots == 3


def test_a_worker_that_dies_while_the_daemon_is_dead_is_noticed(
    client: Make, member: Callable[..., MemberProcess], service: Service
) -> None:
    """Pids mean nothing after a restart: the keeper's pidfds and sockets tell."""
    worker = member()
    pid = service.daemon_pid
    os.kill(pid, signal.SIGKILL)
    worker.kill()
    service.await_restart(pid)
    wait_for("the end of the session", lambda: not service.stats().sessions)
    assert service.tier("hbm").held_slots == 0
    assert service.faults() == []


def test_a_member_can_give_memory_to_the_next_daemon(client: Make, service: Service) -> None:
    """What a client sends while no daemon runs waits in its socket."""
    one = client().begin()
    service.kill_daemon()
    assert isinstance(one.give_hbm(8), wire.Accepted)


def test_dram_survives_a_kill(client: Make, service: Service) -> None:
    one = client().begin()
    hashes, _ = one.fill(range(300, 340))
    room = one.write_through(hashes)
    before = service.tier("dram").sealed_slots
    service.kill_daemon()
    assert service.tier("dram").sealed_slots == before == 10
    assert room


@pytest.mark.kill
def test_many_kills_in_a_row(client: Make, service: Service) -> None:
    one = client().begin()
    hashes, granted = one.fill(range(400, 440))
    for _ in range(4):
        service.kill_daemon()
        come_back(one, pairs(granted))
        assert one.acquire(hashes).outcomes == [pb.OUTCOME_HIT_HBM] * 10
        assert service.faults() == []


def test_the_keeper_may_die_too(client: Make, service: Service) -> None:
    """The daemon gives its descriptors to another keeper; after that it may die itself."""
    one = client().begin()
    hashes, granted = one.fill(range(500, 540))
    old = service.keeper_pid
    daemon = service.daemon_pid
    os.kill(old, signal.SIGKILL)
    new = wait_for("another keeper", lambda: (pid := service.keeper_pid) not in (0, old) and pid)
    assert service.daemon_pid == daemon
    assert one.acquire(hashes).outcomes == [pb.OUTCOME_HIT_HBM] * 10
    wait_for("its descriptors", lambda: service.stats().counters["keeper_restarts_total"] == 1)
    os.kill(daemon, signal.SIGKILL)
    service.await_restart(daemon)
    assert service.keeper_pid == new
    come_back(one, pairs(granted))
    assert one.acquire(hashes).outcomes == [pb.OUTCOME_HIT_HBM] * 10
    assert service.faults() == []


@pytest.mark.kill
@pytest.mark.parametrize(
    "point",
    [
        "grant.commit",
        "grant.sent",
        "seal.commit",
        "hello.stored",
        "extent.stored",
        "slots.held",
        "slots.filling",
    ],
)
def test_a_kill_at_a_named_point(point: str) -> None:
    """Between any two steps of the shell the daemon may die: afterwards the store is sound and goes on."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="kv") as name:
        # The first extent is DRAM's, stored before the daemon is ready: the fault is for the one that a worker gives.
        passing = 5 if point == "extent.stored" else 1
        environ = {"KVSTORE_FAULT": f"{point}:kill:{passing}"}
        with started(small_config(Path(name)), environ=environ) as service:
            first = service.daemon_pid
            one = RawClient(service.socket)
            died = False
            try:
                wait_for("all of DRAM", lambda: service.tier("dram").allocated_bytes == 64 << 20)
                one.begin()
                one.fill(range(40))
            except (grpc.RpcError, EOFError, AssertionError, OSError):
                died = True
            assert service.await_restart(first)
            assert died
            one.close()
            other = RawClient(service.socket).begin()
            hashes, _ = other.fill(range(2000, 2040))
            assert other.acquire(hashes).outcomes == [pb.OUTCOME_HIT_HBM] * 10
            assert service.faults() == []
            other.close()


def test_a_restart_is_quick(service: Service) -> None:
    started_s = time.monotonic()
    service.kill_daemon()
    assert time.monotonic() - started_s < DEADLINE_S / 2
