"""What must hold of HBM behind a real daemon when its processes are killed: for the twin and for a GPU."""

from __future__ import annotations

from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import Service, wait_for
from tests.support.hbm_worker import HbmWorker, finds

__all__ = ["a_killed_worker_leaves_its_hbm", "plain_hbm_goes_with_its_worker", "release"]

BLOCKS = 48


def killed_worker(service: Service, kind: str, *arguments: str) -> HbmWorker:
    """A worker that has stored a prompt and was killed; its session has ended."""
    worker = HbmWorker(service.socket, kind, *arguments)
    assert worker.report["copied"] == BLOCKS
    worker.kill()
    wait_for("the session's end", lambda: not service.stats().sessions)
    return worker


def release(service: Service) -> None:
    """`kvstore release --gpu 0`; nothing stays."""
    reply = service.call("ReleaseDevice", pb.ReleaseDeviceRequest(device=0), service="admin")
    assert isinstance(reply, pb.ReleaseDeviceReply)
    assert reply.kept_bytes == 0
    assert service.tier("hbm").allocated_bytes == 0
    assert service.faults() == []


def a_killed_worker_leaves_its_hbm(service: Service, kind: str) -> None:
    """Kill the worker, then the daemon too: every block is a hit in HBM, byte for byte; after a release, in DRAM."""
    killed_worker(service, kind)
    assert service.tier("hbm").orphan_slots == BLOCKS
    assert finds(service.socket, kind)["outcomes"] == {"HIT_HBM": BLOCKS}
    service.kill_daemon()
    found = finds(service.socket, kind)
    assert (found["outcomes"], found["wrong"]) == ({"HIT_HBM": BLOCKS}, 0)
    assert service.stats().counters["hbm_distrusted_total"] == 0
    release(service)
    found = finds(service.socket, kind)
    assert (found["outcomes"], found["wrong"]) == ({"HIT_DRAM": BLOCKS}, 0)
    release(service)


def plain_hbm_goes_with_its_worker(service: Service, kind: str) -> None:
    """Memory that the driver cannot export: the session works, nobody else gets it, and its end is the blocks' end."""
    worker = HbmWorker(service.socket, kind, "--sharing", "none")
    assert worker.report["sharing"] == "none"
    device = service.stats().devices[0]
    assert device.plain_bytes == device.owned_bytes > 0
    assert finds(service.socket, kind, "--sharing", "none")["error"] == "ResourceExhausted"
    service.kill_daemon()
    assert service.tier("hbm").sealed_slots == BLOCKS, "the worker lives, and so does its memory"
    worker.kill()
    wait_for("the session's end", lambda: not service.stats().sessions)
    found = finds(service.socket, kind)
    assert (found["outcomes"], found["wrong"]) == ({"HIT_DRAM": BLOCKS}, 0)
    assert service.stats().devices[0].plain_bytes == 0
    release(service)
