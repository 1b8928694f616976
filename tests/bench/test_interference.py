"""`kvstore bench interference` on the CPU at its tiny sizes, and the stores that run beside decode."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace

import pytest

from bench import copy_sides
from bench.copy_sides import open_bed
from bench.interference import CPU, figures, measure
from bench.offload import Offload
from engine_adapter.copier import Direction
from kvstore.errors import ConfigError

KIB = 1024
TINY = replace(CPU, slot_bytes=(64 * KIB,), steps=2, rounds=2, area_bytes=1024 * KIB, batch_bytes=256 * KIB)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_sides, "cuda_devices", lambda: 0)


def test_stores_run_until_they_are_stopped_and_no_longer() -> None:
    with open_bed(1024 * KIB) as bed:
        copier = bed.copier()
        offload = Offload(bed, copier, 64 * KIB, 192 * KIB)
        for _ in range(2):
            offload.start()
            time.sleep(0.05)
            assert offload.stop() > 0
            after = copier.stats().stored_blocks  # type: ignore[union-attr]
            time.sleep(0.02)
            assert copier.stats().stored_blocks == after  # type: ignore[union-attr]
        assert after >= 16, "every block of the area was stored"
        area = bed.areas[Direction.STORE]
        sent = {bed.read(Direction.STORE, "source", at, 64 * KIB) for at in range(0, area.nbytes, 64 * KIB)}
        came = {bed.read(Direction.STORE, "target", at, 64 * KIB) for at in range(0, area.nbytes, 64 * KIB)}
        assert sent == came
        copier.close(5.0)


@pytest.mark.parametrize("decode", ["engine", "graph"])
def test_decode_is_measured_with_and_without_stores(decode: str) -> None:
    result = asdict(measure(TINY, lambda _: None, device="cpu", decode=decode))
    assert result["decode"].startswith(decode)
    (cell,) = result["cells"]
    assert (cell["slot_bytes"], cell["route"]) == (64 * KIB, "default")
    assert cell["quiet_tokens_per_s"] > 0
    assert cell["storing_tokens_per_s"] > 0
    assert cell["slowdown"] < 1
    assert len(figures(result)) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-copier"]


def test_another_kind_of_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither engine nor graph"):
        measure(TINY, lambda _: None, device="cpu", decode="vllm")
