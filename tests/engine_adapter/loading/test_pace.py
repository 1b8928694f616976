"""When a waiting request is expected to run."""

from __future__ import annotations

import pytest

from engine_adapter.loading.pace import Pace


def test_the_next_request_runs_now() -> None:
    assert Pace().expect(5.0, 0) == 5.0


def test_the_pace_is_learned_from_requests_that_were_let_in() -> None:
    pace = Pace()
    for number in range(40):
        pace.let_in(2.0 * number, waiting=9)
    assert pace.expect(100.0, 3) == pytest.approx(106.0, rel=0.01)


def test_a_time_without_a_queue_says_nothing_of_the_pace() -> None:
    """After a quiet hour the next request in a queue was expected to run an hour later."""
    pace = Pace()
    pace.let_in(0.0, waiting=0)
    pace.let_in(3600.0, waiting=5)
    assert pace.expect(3600.0, 1) < 3601.0


def test_a_queue_keeps_its_order_when_the_pace_changes() -> None:
    pace = Pace()
    for number in range(40):
        pace.let_in(10.0 * number, waiting=9)
    late = pace.expect(400.0, 5)
    for number in range(40):
        pace.let_in(400.0 + 0.001 * number, waiting=9)
    assert pace.expect(400.1, 6) >= late
    assert pace.expect(400.1, 0) == 400.1  # preempted, and first again
    pace.let_in(401.0, waiting=0)
    assert pace.expect(402.0, 1) < late
