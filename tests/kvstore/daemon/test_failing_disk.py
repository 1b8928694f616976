"""A disk that fails all that it is given, under a whole service."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.units import MIB
from kvstore.wire.packed import COPY, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb
from tests.support.daemon import DEADLINE_S, small_config, started, wait_for
from tests.support.raw_client import RawClient

BLOCKS = 40


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def _into_dram(one: RawClient, tokens: range) -> np.ndarray:  # type: ignore[type-arg]
    """A prompt whose blocks are in DRAM, and shall be written down."""
    hashes, _ = one.fill(tokens)
    one.step(want_room=len(hashes))
    slots = one.receive_body("slots").slots
    room, generations = u32_of(slots.dram_slots), u32_of(slots.dram_generations)
    held = one.acquire(hashes, lease=9)
    copies = np.zeros(len(hashes), dtype=COPY)
    copies["source"], copies["source_generation"] = held.hbm, held.hbm_generations
    copies["target"], copies["target_generation"] = room[: len(hashes)], generations[: len(hashes)]
    one.step(stores=copies.tobytes(), released_dram=room.tobytes(), released_hbm=held.hbm.tobytes())
    one.acquire(hashes[:0])
    return hashes


def test_a_path_whose_folder_is_gone_is_paused_with_one_line_and_comes_back(place: Path) -> None:
    """It stayed in service: each block was copied, queued and refused, with two notices for one cause."""
    config = small_config(place, nvme_bytes=128 * MIB)
    folder = Path(config.nvme[0].path)
    with started(config) as service:
        shutil.rmtree(folder)
        one = RawClient(service.socket).begin()
        hashes = _into_dram(one, range(4 * BLOCKS))
        wait_for("the pause", lambda: "fails all writes" in " ".join(service.stats().warnings))
        (warning,) = service.stats().warnings
        assert "paused and tried again every 5 s" in warning
        assert "No such file" in warning, warning
        assert one.acquire(hashes, lease=10).outcomes == [pb.OUTCOME_HIT_HBM] * BLOCKS
        folder.mkdir(mode=0o700)
        wait_for("all blocks on disk", lambda: service.tier("nvme").sealed_slots == BLOCKS)
        assert list(service.stats().warnings) == []
        log = service.log.read_text()
        assert log.count("path paused") == log.count("path resumed") == 1, log
        assert log.count("path fails") <= 1, log
        assert "does not have" not in log, log
        reply = one.stub.Flush(pb.FlushRequest(deadline_ms=20_000), timeout=DEADLINE_S)
        assert reply.durable_blocks == BLOCKS
        assert service.faults() == []
        one.close()


def test_a_service_whose_path_is_paused_ends_soon(place: Path) -> None:
    """Nothing failed any more while it was paused, so the drain took its disk for a slow one and waited to the end."""
    config = small_config(place, nvme_bytes=128 * MIB)
    with started(config) as service:
        shutil.rmtree(config.nvme[0].path)
        one = RawClient(service.socket).begin()
        _into_dram(one, range(4 * BLOCKS))
        wait_for("the pause", lambda: "fails all writes" in " ".join(service.stats().warnings))
        one.close()
        began_s = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE_S) == 0, service.tail()
        assert time.monotonic() - began_s < 10.0, "the drain's deadline is 30 s"
