"""What is said rarely."""

from __future__ import annotations

from typing import Any

from kvstore.daemon.log import Rarely


class Noting:
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def warning(self, event: str, **fields: object) -> None:
        """One line."""
        self.lines.append({"event": event, **fields})


def test_a_flood_is_a_few_lines_and_a_count() -> None:
    """Each stranger that sent garbage, on a connection of its own, cost a line."""
    log, now_s = Noting(), [100.0]
    noting: Any = log
    rarely = Rarely(noting, lines=2, interval_s=10.0, clock=lambda: now_s[0])
    for number in range(7):
        rarely.warning("refused", number=number)
    assert [line["number"] for line in log.lines] == [0, 1]
    now_s[0] += 10.0
    rarely.warning("refused", number=7)
    rarely.warning("refused", number=8)
    assert log.lines[2:] == [
        {"event": "refused", "number": 7, "passed_over": 5},
        {"event": "refused", "number": 8},
    ]
