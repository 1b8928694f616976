"""`auto` on sessions apart from each other: what holds on one half of a trace must hold on the other.

The bounds are those that are asked for on whole traces (never 0.3 points below LRU; so much of the gap to the optimum),
with some room where a part of a trace is smaller than the whole, and learning takes as long.
"""

from __future__ import annotations

import pytest

from bench.simulate.compare import compare
from bench.simulate.readers.open import open_trace
from bench.simulate.trace import Trace
from bench.simulate.users import play
from tests.bench.simulate.traces import whole


def check(trace: Trace, gaps: dict[float, float | None]) -> None:
    """At each capacity in % `auto` closes so much of the gap, and is nowhere below LRU by more than 0.3 points."""
    found = compare(trace, ["auto"], list(gaps), 0, lambda _text: None)
    for row, lru in zip(found.rows, found.lru, strict=True):
        assert row.hit_rate >= lru - 0.003, row
        least = gaps[row.capacity_pct]
        if least is not None:
            assert row.gap_closed is not None
            assert row.gap_closed >= least, row


@pytest.mark.parametrize("half", [0, 1])
def test_chats(half: int) -> None:
    trace = open_trace(whole("mooncake_conversation")).part(half, 2)
    check(trace, {1: 0.15, 5: 0.07, 25: None})


def test_agents() -> None:
    sessions = open_trace(whole("claude_code_weka"))
    for eighth in (2, 5):
        check(play(sessions.part(eighth, 8), 16), {2: 0.1, 10: None})
