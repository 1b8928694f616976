"""`kvstore bench planner` and `guard`: what their tables say, and that they run, at tiny sizes on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import guard, planner


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets stay below the 107 bytes of a unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


def silent(_: str) -> None: ...


def row(*, auto_s: float, noise: float) -> dict[str, object]:
    found = planner.PlannerRow(
        read_mb_per_s=100.0,
        always_s=2.0,
        never_s=1.0,
        auto_s=auto_s,
        ratio=auto_s,
        excess_s=auto_s - 1.052,
        loaded_share=0.5,
        noise=noise,
    )
    return {"rows": [asdict(found)]}


@pytest.mark.parametrize("auto_s,noise,kept", [(1.05, 0.0, True), (1.06, 0.0, False), (1.10, 0.05, True)])
def test_the_promise_allows_for_the_noise_and_for_no_more(auto_s: float, noise: float, kept: bool) -> None:
    *_, chosen = planner.figures(row(auto_s=auto_s, noise=noise))
    assert chosen.reached is kept


@pytest.mark.parametrize("ratio, noise, kept", [(1.02, 0.0, True), (1.05, 0.0, False), (1.05, 0.03, True)])
def test_the_guard_is_held_to_3_percent_and_the_noise(ratio: float, noise: float, kept: bool) -> None:
    case = guard.GuardCase(
        case="disk",
        ttft_ratio=ratio,
        ttft_noise=noise,
        step_ratio=1.0,
        step_noise=0.0,
        ttft_s=1.0,
        step_s=0.01,
        tiers_out=1,
    )
    ttft, step = guard.figures({"cases": [asdict(case)]})
    assert (ttft.reached, step.reached) == (kept, True)


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_what_is_chosen_is_measured_beside_both_ways(short_path: Path) -> None:
    plan = replace(planner.CPU_SHORT, tokens=512, samples=2)
    found = planner.measure(plan, silent, device="cpu", parent=short_path, rates=(1.0,))
    (only,) = found.rows
    assert min(only.always_s, only.never_s, only.auto_s) > 0
    assert list(short_path.iterdir()) == [], "nothing is left on the disk"


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_dram_that_is_too_small_is_taken_out_of_use(short_path: Path) -> None:
    plan = replace(guard.CPU_SHORT, samples=2, new_tokens=4)
    found = guard.measure(plan, silent, device="cpu", parent=short_path)
    assert [case.case for case in found.cases] == ["dram", "disk"]
    assert found.cases[0].tiers_out >= 1
