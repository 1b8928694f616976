"""Workers that are killed, stopped or forked: their slots are free exactly when nothing can touch them any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvstore.config import Limits
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.daemon.conftest import MemberProcess
from tests.support.daemon import Service, small_config, started, wait_for
from tests.support.raw_client import RawClient

Make = Callable[[], RawClient]
MakeMember = Callable[..., MemberProcess]


def test_a_killed_workers_blocks_stay_and_its_slots_come_back(
    client: Make, member: MakeMember, service: Service
) -> None:
    """Elsewhere GPU memory and pinned blocks of killed workers leaked until the server was restarted."""
    worker = member()
    assert service.tier("hbm").held_slots == 16
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)
    tier = service.tier("hbm")
    assert (tier.held_slots, tier.filling_slots, tier.sealed_slots, tier.orphan_slots) == (0, 0, 10, 10)
    one = client().begin()
    assert len(one.hbm) == 1, "the next worker is sent the extent that outlived the last"
    hashes = np.frombuffer(bytes.fromhex(worker.report["hashes"]), dtype="<u8").reshape(-1, 2)
    granted = one.acquire(hashes)
    assert granted.outcomes == [pb.OUTCOME_HIT_HBM] * 10
    assert granted.hbm.tolist() == worker.report["filled"]


def test_a_stopped_workers_slots_stay_held(client: Make, member: MakeMember, service: Service) -> None:
    """Elsewhere leases expired under a stopped process, which then went on to read somebody else's blocks."""
    worker = member()
    worker.signal(signal.SIGSTOP)
    time.sleep(1.0)
    assert service.tier("hbm").held_slots == 16
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)


def test_a_worker_stopped_past_every_time_out_keeps_its_slots(tmp_path: Path) -> None:
    """After a time-out the pages of a stopped worker were given to others; it went on and wrote into them."""
    limits = Limits(session_lost_s=0.5, call_deadline_s=1.0, drain_deadline_s=0.5, flush_deadline_s=0.5)
    config = replace(small_config(tmp_path), limits=limits, orphan_ttl_s=0.2)
    with started(config) as service:
        worker = MemberProcess(service.socket)
        try:
            worker.signal(signal.SIGSTOP)
            time.sleep(2.0)
            held = {*worker.report["filled"], *worker.report["half"]}
            assert service.tier("hbm").held_slots == len(held) == 16
            service.kill_daemon()
            time.sleep(1.5)  # and past those of the next daemon, for which it does not resume
            assert service.tier("hbm").held_slots == 16
            other = RawClient(service.socket).begin(hbm_slots=0)
            granted = other.acquire(other.chain(range(5000, 5400)), reserve_slots=0)
            given = {int(slot) for slot in granted.hbm.tolist() if slot != 0xFFFFFFFF}
            assert given
            assert not given & held, "a stopped worker's pages were given away"
            other.close()
            worker.kill()
            wait_for("the end of the session", lambda: service.tier("hbm").held_slots == len(given))
        finally:
            worker.close()
        assert service.faults() == []


def test_a_forked_child_keeps_everything_held(member: MakeMember, service: Service) -> None:
    """A pidfd fires while a forked child still has the memory mapped: the socket's end is waited for too."""
    worker = member("--fork")
    worker.kill()
    time.sleep(1.0)
    assert service.tier("hbm").held_slots == 16
    os.kill(worker.report["child"], signal.SIGKILL)
    wait_for("the end of the session", lambda: not service.stats().sessions)
    assert service.tier("hbm").held_slots == 0


def test_a_closed_socket_alone_frees_nothing(client: Make, service: Service) -> None:
    """The end of the socket comes before the driver has stopped a dead process's copies."""
    one = client().begin()
    one.fill(range(40))
    assert one.connection is not None
    one.connection.close()
    one.drop_stream()
    wait_for("lost", lambda: service.stats().sessions[0].state == "lost")
    time.sleep(0.3)
    assert service.tier("hbm").held_slots == 10


def test_forget_is_the_administrators_word(client: Make, member: MakeMember, service: Service) -> None:
    worker = member()
    worker.signal(signal.SIGSTOP)
    request = pb.ForgetRequest(session=worker.report["session"])
    reply = service.call("Forget", request, service="admin")
    assert isinstance(reply, pb.ForgetReply)
    assert reply.freed_slots == 16
    assert not service.stats().sessions


def test_orphans_go_when_their_time_is_over() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = replace(small_config(Path(name)), orphan_ttl_s=2.0)  # there for long enough to be seen
        with started(config) as service:
            worker = MemberProcess(service.socket)
            worker.kill()
            worker.close()
            wait_for("orphans", lambda: service.tier("hbm").orphan_slots == 10)
            wait_for("no orphans", lambda: service.tier("hbm").allocated_bytes == 0)
            assert service.stats().rows == 0
            assert service.faults() == []
            service.kill_daemon()
            assert service.tier("hbm").allocated_bytes == 0, "the keeper has let go of it too"


def test_orphans_make_room_for_a_worker_of_another_shape(
    client: Make, member: MakeMember, service: Service
) -> None:
    worker = member()
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)
    one = client()
    group = pb.LayerGroup(rule=pb.HIT_RULE_ALL, layers=2, kv_heads=1, head_dim=512, block_tokens=4)
    request = pb.AttachRequest(
        protocol_version=1, groups=[group], dtype="float32", device=pb.Device(kind=1), hbm_bytes=1 << 20
    )
    one.attached = one.stub.Attach(request, timeout=30)
    assert service.tier("hbm").allocated_bytes == 0


def test_orphans_beyond_the_budget_go(client: Make, member: MakeMember, service: Service) -> None:
    worker = member()
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)
    one = client()
    one.attach()
    assert service.tier("hbm").allocated_bytes == 64 * 16_384, "within the budget it stays"
    service.call("Detach", pb.DetachRequest(token=one.token))
    request = pb.AttachRequest(
        protocol_version=1,
        groups=[pb.LayerGroup(rule=pb.HIT_RULE_ALL, layers=1, kv_heads=1, head_dim=512, block_tokens=4)],
        dtype="float32",
        device=pb.Device(kind=1),
        hbm_bytes=16_384,
    )
    one.attached = one.stub.Attach(request, timeout=30)
    assert service.tier("hbm").allocated_bytes == 0


def test_release_drops_orphans_and_nothing_else(client: Make, member: MakeMember, service: Service) -> None:
    worker = member()
    reply = service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    assert isinstance(reply, pb.ReleaseDeviceReply)
    assert (reply.released_bytes, reply.kept_bytes) == (0, 64 * 16_384)
    worker.kill()
    wait_for("the end of the session", lambda: not service.stats().sessions)
    reply = service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    assert isinstance(reply, pb.ReleaseDeviceReply)
    assert (reply.released_bytes, reply.kept_bytes) == (64 * 16_384, 0)
    assert service.tier("hbm").allocated_bytes == 0
