"""`kvstore bench interference` on the CPU at its tiny sizes, and the stores that run beside decode."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace

import pytest

from bench import copy_sides
from bench.copy_sides import open_bed
from bench.interference import CPU, Rate, figures, measure
from bench.offload import Offload, SealedOffload
from engine_adapter.copying.copier import Direction
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


def test_stores_of_what_is_sealed_are_no_more_than_that() -> None:
    with open_bed(1024 * KIB) as bed:
        copier = bed.copier()
        offload = SealedOffload(bed, copier, 64 * KIB, 24 * KIB)
        offload.start()
        for tokens, whole in ((2, 0), (1, 1), (32, 13), (1, 13), (2, 14), (64, 38)):
            offload.stepped(tokens)  # 38 blocks are more than the area's 16: it is gone through again
            deadline = time.monotonic() + 5.0
            while copier.stats().stored_blocks != whole:  # type: ignore[union-attr]
                assert time.monotonic() < deadline, f"not {whole} blocks after {tokens} more tokens"
                time.sleep(0.001)
        assert offload.stop() > 0
        copier.close(5.0)


def test_both_rates_of_stores_are_held_to_the_bounds_and_loads_to_none() -> None:
    cell = {"slot_bytes": 256 * KIB, "slowdown": 0.5, "stored_gb_per_s": 50.0}
    cells = [{**cell, "rate": rate} for rate in Rate]
    slower = figures({"device": "cuda:0", "cells": cells})[::2]
    assert [figure.bound for figure in slower] == [0.03, 0.03, None]
    assert [figure.name for figure in slower] == [f"256 KiB, {rate}: slower by" for rate in Rate]


@pytest.mark.parametrize("decode", ["engine", "graph"])
def test_decode_is_measured_with_and_without_stores(decode: str) -> None:
    result = asdict(measure(TINY, lambda _: None, device="cpu", decode=decode))
    assert result["decode"].startswith(decode)
    assert [cell["rate"] for cell in result["cells"]] == list(Rate)
    for cell in result["cells"]:
        assert cell["slot_bytes"] == 64 * KIB
        assert cell["quiet_tokens_per_s"] > 0
        assert cell["storing_tokens_per_s"] > 0
        assert cell["slowdown"] < 1
    assert len(figures(result)) == 6
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-copier"]


def test_another_kind_of_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither engine nor graph"):
        measure(TINY, lambda _: None, device="cpu", decode="vllm")
