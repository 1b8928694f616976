"""The canary through the whole service: a bit that flips in DRAM, and what a client reports."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.errors import InvalidArgument, PermissionDenied
from kvstore.moves import Outcome
from kvstore.units import MIB
from kvstore.wire.v1 import health_pb2, health_pb2_grpc
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.kvstore.transfer.conftest import Engine, engine, many, parts
from tests.support.daemon import Service, small_config, started, wait_for


@pytest.fixture
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), nvme_bytes=128 * MIB, canary_every=1)
        with started(config) as service:
            yield service


def counter(service: Service, name: str) -> int:
    return service.stats().counters.get(name, 0)


def health(service: Service, name: str) -> int:
    with grpc.insecure_channel(f"unix:{service.socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status)


def flipped(one: Engine, hashes, block: int) -> None:  # type: ignore[no-untyped-def]
    """One bit of a block in DRAM changes, as it does where memory is bad."""
    pending = one.session.acquire(one.namespace, 1, hashes)
    grant = pending.result(30)
    assert grant.outcomes[block] == Outcome.HIT_DRAM
    one.session.dram.view(int(grant.dram_slots[block]))[12_345] ^= 4
    pending.abandon()
    one.session.step()


def serve_until_found(service: Service, one: Engine, hashes) -> None:  # type: ignore[no-untyped-def]
    """Every block is served, one at a time, until the canary has said something."""

    def serve() -> bool:
        for block in range(len(hashes)):
            pending = one.session.acquire(one.namespace, 1, hashes[block : block + 1])
            pending.result(30)
            pending.abandon()
            one.session.step()
        return counter(service, "wrong_blocks") > 0

    wait_for("a wrong block", serve)


def test_a_bit_that_flips_in_dram_is_found_said_and_served_no_more(service: Service) -> None:
    with engine(service, parts()) as one:
        hashes = one.store(many(1, 6))
        assert one.client.flush().pending_blocks == 0
        assert one.served(hashes) == 6
        wait_for("checks", lambda: counter(service, "canary_blocks") > 0)
        assert counter(service, "wrong_blocks") == 0
        assert health(service, "blocks") == health_pb2.HealthCheckResponse.SERVING
        flipped(one, hashes, 3)
        serve_until_found(service, one, hashes[3:4])
        assert one.served(hashes) == 4, (
            "the disk's copy is right; what is behind may have been computed from it"
        )
        stats = service.stats()
        assert stats.counters["wrong_blocks"] == 1
        assert any("taken back" in warning for warning in stats.warnings)
        assert health(service, "blocks") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health(service, "") == health_pb2.HealthCheckResponse.SERVING
        assert service.faults() == []
    line = next(line for line in service.log.read_text().splitlines() if "wrong block" in line)
    assert " error " in line
    assert hashes[3].tobytes().hex() in line


def test_a_bit_that_flips_in_what_only_dram_has_makes_it_a_miss() -> None:
    """Without a disk nothing has a checksum of it but the canary's first look. A mover is needed to look at all."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), nvme_bytes=128 * MIB, canary_every=1)
        with started(config) as service, engine(service, parts()) as one:
            hashes = one.store(many(1, 1))
            wait_for("a first check", lambda: (one.served(hashes), counter(service, "canary_blocks"))[1])
            flipped(one, hashes, 0)
            serve_until_found(service, one, hashes)
            assert service.faults() == []


def test_a_report_drops_blocks_everywhere_and_is_bounded(service: Service) -> None:
    with engine(service, parts()) as one:
        hashes = one.store(many(1, 5))
        assert one.client.flush().pending_blocks == 0
        token = one.session._attachment.token
        request = pb.ReportWrongRequest(
            token=token,
            namespace=one.namespace.handle,
            hashes=hashes[2:3].tobytes(),
            detail="recomputed: " + "x" * 1000,
        )
        reply = one.client.call("ReportWrong", request)
        assert reply.dropped_blocks == 1
        assert one.served(hashes) == 2
        assert counter(service, "wrong_blocks") == 1
        assert service.tier("nvme").sealed_slots == 2, "those behind it go with it"
        with pytest.raises(PermissionDenied):
            one.client.call("ReportWrong", pb.ReportWrongRequest(token=token, namespace=77))
        with pytest.raises(InvalidArgument):
            one.client.call(
                "ReportWrong",
                pb.ReportWrongRequest(token=token, namespace=one.namespace.handle, hashes=b"odd"),
            )
        assert service.faults() == []
        time.sleep(0.2)
        assert "x" * 400 not in service.log.read_text()


def test_a_lost_index_does_not_bring_back_what_was_taken_back() -> None:
    """The trailers of wrong blocks outlive them, and say that their bytes are those that were written."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        config = small_config(Path(name), nvme_bytes=128 * MIB)
        folder = Path(config.nvme[0].path)
        with started(config) as service, engine(service, parts()) as one:
            hashes = one.store(many(1, 5))
            assert one.client.flush().pending_blocks == 0
            assert one.session.report_wrong(one.namespace, hashes[2:3], "recomputed: differs") == 1
            wait_for("the note", lambda: (folder / "cleared").exists())
            noted = (folder / "cleared").read_text()
            assert [f"b{block.tobytes().hex()} " in noted for block in hashes] == [
                False,
                False,
                True,
                True,
                True,
            ]
        shutil.rmtree(folder / "index")
        with started(config) as service, engine(service, parts()) as one:
            wait_for("the others", lambda: service.tier("nvme").sealed_slots == 2)
            assert one.served(hashes) == 2
