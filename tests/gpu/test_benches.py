"""The engine's benchmarks on a GPU, at sizes that take seconds: that they run there, and measure what they say."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from bench import decode, prefill, pressure, pressure_plan, ttft
from bench.rates import pinned_copy_bytes_per_s, product_flops_per_s, read_bytes_per_s

pytestmark = pytest.mark.gpu

needs_daemon = pytest.mark.skipif(importlib.util.find_spec("lmdb") is None, reason="the daemon needs lmdb")


def silent(_: str) -> None: ...


def test_the_ceilings_are_those_of_a_gpu() -> None:
    import torch

    device = torch.device("cuda:0")
    assert read_bytes_per_s(device, 1 << 30) > 200e9
    assert product_flops_per_s(device, 4096) > 20e12
    assert 2e9 < pinned_copy_bytes_per_s(device, 256 << 20) < 200e9


def test_decode_reads_no_faster_than_its_ceiling() -> None:
    plan = replace(decode.CUDA_SHORT, batches=(1, 4), contexts=(1024,), steps=16)
    found = decode.measure(plan, silent, device="cuda:0", model="llama-tiny")
    assert [cell.batch for cell in found.cells] == [1, 4]
    assert all(0 < cell.share < 1.05 for cell in found.cells)


def test_prefill_computes_no_faster_than_its_ceiling() -> None:
    plan = replace(prefill.CUDA_SHORT, lengths=(512, 2048), rounds=2)
    found = prefill.measure(plan, silent, device="cuda:0", model="llama-tiny")
    assert all(0 < row.share < 1.05 for row in found.rows)


@needs_daemon
@pytest.mark.timeout(400)
def test_ttft_finds_every_prompt_in_every_tier() -> None:
    plan = replace(ttft.CUDA_SHORT, lengths=(512, 7168), samples=2, raw_bytes=64 << 20, disk="512MiB")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        found = ttft.measure(plan, silent, device="cuda:0", model="llama-tiny", parent=Path(folder))
    for row in found.rows:
        assert None not in (row.hbm_s, row.dram_s, row.disk_s)
        assert row.equal
    assert found.kill.cached_by_tier["hbm"] >= 0.75 * 7136


@needs_daemon
@pytest.mark.timeout(200)
def test_a_cell_of_pressure() -> None:
    plan = replace(
        pressure_plan.CUDA_SHORT,
        model="llama-tiny",
        hbm="8MiB",
        dram="64MiB",
        dram_extent="4MiB",
        shortest_tokens=1024,
        longest_tokens=4096,
        visits=4,
    )
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        cell = pressure_plan.parse_cell("2/round_robin/dram")
        found = pressure.measure_cell(plan, cell, silent, device="cuda:0", parent=Path(folder))
    assert found.hit_rate > 0.5
