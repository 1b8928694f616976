"""The real client over the real daemon: what must go on by itself when the daemon is killed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.client import DeviceSpec, connect
from kvstore.geometry import Geometry, LayerGroup
from kvstore.wire import descriptors as wire
from kvstore.wire.packed import SEAL
from tests.support.daemon import Service, wait_for
from tests.support.raw_client import SLOT_BYTES, RawClient

Make = Callable[[], RawClient]
GEOMETRY = Geometry(groups=(LayerGroup(layers=1, kv_heads=1, head_dim=512, block_tokens=4),), dtype="float32")
PARTS = {"model": b"m", "weights": b"w", "dtype": b"float32", "block_tokens": b"4", "groups": b"g"}


def test_a_client_goes_on_after_a_kill(client: Make, service: Service) -> None:
    """The descriptor socket goes on too: HBM that others bring after the restart is mapped."""
    with (
        connect(service.socket) as real,
        real.attach("real", GEOMETRY, DeviceSpec(hbm_bytes=64 * SLOT_BYTES)) as session,
    ):
        namespace = session.open_namespace(PARTS)
        hashes = namespace.chain(list(range(40))).hashes
        grant = session.acquire(namespace, 1, hashes).result(30)
        seals = np.zeros(len(hashes), dtype=SEAL)
        seals["slot"], seals["generation"] = grant.hbm_slots, grant.hbm_generations
        seals["namespace"], seals["depth"] = namespace.handle, np.arange(len(hashes))
        seals["hash"], seals["parent"][1:] = hashes, hashes[:-1]
        session.step(seals=seals)
        wait_for("ten blocks", lambda: service.tier("hbm").sealed_slots == 10)
        service.kill_daemon()
        assert session.match(namespace, hashes).hits == 10, "a match needs no daemon"
        wait_for("a resume", lambda: service.stats().counters["resumes_total"] == 1)
        again = wait_for("an answer", lambda: session.acquire(namespace, 2, hashes).result(30))
        assert again.outcomes.tolist() == [1] * 10
        pages = session.hbm.num_pages
        other = client().begin()
        assert isinstance(other.give_hbm(8), wire.Accepted)
        wait_for("the other's pages", lambda: session.hbm.num_pages == pages + 8)
