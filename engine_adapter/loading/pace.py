"""When a request that waits will run: its place in the queue, times the pace at which requests were let in lately."""

from __future__ import annotations

__all__ = ["Pace"]

_WEIGHT = 0.2
"""Of the newest gap: a change of load is believed after about five requests."""
_FIRST_GAP_S = 0.05
"""Before anything was seen; the order is right from the start, whatever the times are."""


class Pace:
    """Pure: times are told, in seconds of any clock that never goes back."""

    __slots__ = ("_gap_s", "_latest_s", "_let_in_s")

    def __init__(self) -> None:
        self._gap_s = _FIRST_GAP_S
        self._let_in_s: float | None = None
        self._latest_s = 0.0

    def let_in(self, now_s: float, waiting: int) -> None:
        """A request begins to run, and so many still wait: the time since the one before it tells the pace."""
        if self._let_in_s is not None:
            self._gap_s += _WEIGHT * (now_s - self._let_in_s - self._gap_s)
        # Without a queue the next gap is how long nobody came.
        self._let_in_s = now_s if waiting else None
        if not waiting:
            self._latest_s = now_s

    def expect(self, now_s: float, ahead: int) -> float:
        """When a request that comes now, behind `ahead` others, is expected to run.

        Never before one that came earlier and waits further to the front: the queue keeps its order.
        """
        if not ahead:
            return now_s
        self._latest_s = max(now_s + ahead * self._gap_s, self._latest_s)
        return self._latest_s
