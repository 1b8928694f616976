"""`kvstore bench prefetch`: its sums, and at a tiny size the whole of it."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import prefetch

_CASE = prefetch.PrefetchCase(
    case="thrash",
    requests=12,
    goodput_ratio=0.9,
    ttft_ratio=1.1,
    noise=0.02,
    seconds=3.0,
    ttft_s=1.0,
    useful_bytes=1 << 20,
    late_bytes=0,
    wasted_bytes=0,
)


def reached(case: prefetch.PrefetchCase) -> bool:
    result = prefetch.PrefetchResult(model="m", device="cpu", tokens=1, documents=6, cases=(case,))
    return all(figure.reached for figure in prefetch.figures(asdict(result)))


def test_goodput_is_held_to_its_bound_within_the_noise() -> None:
    assert not reached(_CASE)
    assert reached(replace(_CASE, noise=0.06))
    assert reached(replace(_CASE, goodput_ratio=0.95))


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_both_cases_run_and_leave_nothing() -> None:
    plan = replace(prefetch.CPU_SHORT, documents=4, tokens=512, new_tokens=16, turns=1)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        found = prefetch.measure(plan, lambda _: None, device="cpu", parent=Path(folder))
        assert list(Path(folder).iterdir()) == []
    queue, thrash = found.cases
    assert (queue.requests, thrash.requests) == (4, 8)
    assert queue.useful_bytes > 0
    assert thrash.wasted_bytes == 0
