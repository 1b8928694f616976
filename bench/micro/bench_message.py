"""One message: its bytes, and the way to a daemon and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import kvstore
from bench.blocks import ANSWER_S, SMALL, chains, fill, parts
from bench.service import serve
from kvstore.client import DeviceSpec, Namespace, Session, Targets
from kvstore.wire.packed import hashes_of
from kvstore.wire.v1 import kvstore_pb2 as pb

SETTINGS = {"max_rows": "65536", "hbm": "256MiB", "min_slot": "4KiB", "dram": "64MiB"}


@pytest.fixture(scope="module")
def attached() -> Iterator[tuple[Session, Namespace]]:
    """A session of a real daemon that holds 4,096 blocks."""
    with serve(SETTINGS) as service, kvstore.connect(service.socket) as client:
        device = DeviceSpec(hbm_bytes=64 << 20)
        targets = Targets(credit=0, room=0, breaker_s=ANSWER_S)
        with client.attach("bench-micro", SMALL, device, targets=targets) as session:
            namespace = session.open_namespace(parts(SMALL, "bench"))
            fill(session, namespace, chains(namespace.key, 4096, 4096, seed=1))
            yield session, namespace


def test_acquire_of_4096_to_bytes_and_back(benchmark: BenchmarkFixture) -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 64, (4096, 2), dtype=np.uint64)

    def there() -> int:
        message = pb.ClientMessage(id=1, acquire=pb.Acquire(namespace=1, lease=1, hashes=hashes.tobytes()))
        return len(hashes_of(pb.ClientMessage.FromString(message.SerializeToString()).acquire.hashes))

    assert benchmark(there) == 4096


@pytest.mark.parametrize("blocks", [0, 64, 1024, 4096])
def test_round_trip_of_an_acquire(
    benchmark: BenchmarkFixture, attached: tuple[Session, Namespace], blocks: int
) -> None:
    """From the call to the grant, and its release, which nothing waits for."""
    session, namespace = attached
    chain = chains(namespace.key, 4096, 4096, seed=1)[0][:blocks]

    def call() -> int:
        pending = session.acquire(namespace, 1, chain)
        grant = pending.result(ANSWER_S)
        pending.abandon()
        session.step()
        return len(grant.outcomes)

    assert benchmark(call) == blocks
