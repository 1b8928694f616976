"""What sizes of DRAM and NVMe bring, in hits and in money."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from typer import Typer
from typer.testing import CliRunner

from bench.simulate.advice import Advice, Prices, advise
from bench.simulate.advise_command import advise as command
from bench.simulate.command import simulate
from bench.simulate.hardware import Hardware, Model, model_of
from bench.simulate.stack import lru_curve
from tests.bench.simulate.traces import DATA, random_chains, trace_of

MODEL = model_of("llama-3.1-8b", Hardware())
PRICES = Prices(gpu_hour=2.5, dram_gib=5.0, nvme_gib=0.1, years=4.0)


def ask(model: Model = MODEL, prices: Prices = PRICES) -> Advice:
    chains = random_chains(600, 1, most=40, width=2)
    return advise(trace_of(chains, [100 * number for number in range(600)]), model, prices)


def test_sizes_reach_from_a_few_blocks_to_all_and_hit_what_lru_does() -> None:
    advice = ask()
    trace = trace_of(random_chains(600, 1, most=40, width=2))
    block_bytes = MODEL.token_bytes * 16
    sizes = [row.size_bytes for row in advice.rows]
    assert sizes[0] <= 16 * block_bytes
    assert sizes[-1] >= advice.working_set_bytes == trace.unique_blocks * block_bytes
    assert all(later == 2 * size for size, later in pairwise(sizes))
    for row in advice.rows:
        assert row.hit_rate == pytest.approx(lru_curve(trace).hit_rate(row.size_bytes // block_bytes))
    assert sum(row.points_by_doubling for row in advice.rows) == pytest.approx(100 * advice.rows[-1].hit_rate)
    assert advice.rows[-1].hit_rate == pytest.approx(advice.infinite_hit_rate)


def test_what_is_saved_is_less_than_computing_and_more_from_dram_than_from_disk() -> None:
    for row in ask().rows:
        assert row.saved_s_from_disk <= row.saved_s_from_dram < ask().prefill_s


def test_dear_memory_is_not_bought_and_free_memory_holds_all_that_is_hit() -> None:
    dear = ask(prices=Prices(gpu_hour=2.5, dram_gib=1e9, nvme_gib=1e9, years=4.0))
    assert (dear.dram_bytes, dear.nvme_bytes, dear.saved_s) == (0, 0, 0.0)
    assert "DRAM: none" in dear.words[1]
    free = ask(prices=Prices(gpu_hour=2.5, dram_gib=1e-12, nvme_gib=1e-12, years=4.0))
    best = max(row.saved_s_from_dram for row in free.rows)
    assert free.saved_s == pytest.approx(best, rel=1e-3)


def test_a_disk_slower_than_computing_is_not_bought() -> None:
    slow = model_of("llama-3.1-8b", Hardware(disk_read_bytes_per_s=1e8))
    advice = ask(slow)
    assert advice.nvme_bytes == 0
    assert any("NVMe: none" in line for line in advice.words)


def test_a_cheap_disk_stands_behind_dear_dram() -> None:
    fast = model_of("llama-3.1-8b", Hardware(disk_read_bytes_per_s=5e10))
    prices = Prices(gpu_hour=2.5, dram_gib=300.0, nvme_gib=0.001, years=4.0)
    advice = ask(fast, prices)
    assert 0 < advice.dram_bytes < advice.nvme_bytes
    assert any(line.startswith("NVMe: ") and "points more" in line for line in advice.words)


def test_the_command() -> None:
    app = Typer()
    app.command()(command)
    path = str(DATA / "mooncake.jsonl")
    shown = CliRunner().invoke(app, [path], catch_exceptions=False).stdout
    assert "points by doubling" in shown.replace("\n", " ") or "doubling" in shown
    assert "have been there before" in " ".join(shown.split())
    found = json.loads(CliRunner().invoke(app, [path, "--json"], catch_exceptions=False).stdout)
    assert {"dram_bytes", "nvme_bytes", "rows", "words"} <= set(found)


def test_where_no_ids_are_no_hit_rate_is_said() -> None:
    """It advised against DRAM, and `simulate` printed hit rates of 0, which nobody had measured."""
    app = Typer()
    app.command("advise")(command)
    app.command("simulate")(simulate)
    for name in ("advise", "simulate"):
        done = CliRunner().invoke(app, [name, str(DATA / "lengths.jsonl")], catch_exceptions=False)
        assert done.exit_code == 0
        shown = " ".join(done.output.split())
        assert "no hit rate can be known from it" in shown
        assert "none" not in shown
        assert "hit rate (gap closed)" not in shown
