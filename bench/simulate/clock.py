"""A virtual clock, and things that serve one request after the other on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

__all__ = ["Channel", "Clock"]


class Clock:
    """Runs actions at their times, in order; at equal times in the order in which they were asked for."""

    __slots__ = ("_actions", "_order", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """`action` runs at that time, or now where it is past."""
        heapq.heappush(self._actions, (max(time_s, self.now_s), next(self._order), action))

    def step(self) -> bool:
        """Runs the next action; False where there is none."""
        if not self._actions:
            return False
        self.now_s, _, action = heapq.heappop(self._actions)
        action()
        return True


class Channel:
    """A link, a direction of a disk, or a processor: one job after the other, at its full speed."""

    __slots__ = ("_free_s", "busy_s")

    def __init__(self) -> None:
        self._free_s = 0.0
        self.busy_s = 0.0

    def take(self, now_s: float, seconds: float) -> float:
        """Queues a job of so many seconds; when it will be done."""
        self._free_s = max(self._free_s, now_s) + seconds
        self.busy_s += seconds
        return self._free_s
