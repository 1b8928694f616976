"""What slots that are kept free ahead are worth: who calls waits for no eviction."""

from __future__ import annotations

from bench.reserve import measure


def test_a_reserve_takes_evictions_out_of_calls() -> None:
    with_reserve = measure(clean_percent=5, rows=40_000, calls=200)
    without = measure(clean_percent=0, rows=40_000, calls=200)
    assert with_reserve.evicted > 40_000
    assert with_reserve.evicted_inline == 0
    assert without.evicted_inline == without.evicted > 40_000
