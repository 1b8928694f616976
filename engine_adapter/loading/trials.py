"""When a disk that a request is not to wait for is read all the same, so that it stays known how fast it is.

Loads tell how fast a disk is that is worth reading. One that is not is tried now and then: by itself, where the request
waits for a moment, or beside a computation that waits for nothing. Either makes the request a little later, the
second since its steps end where pieces may come. So the pause before the next trial doubles with each that changes
nothing, and is never less than 16 times what the request takes to compute. Pure: the clock is an argument.
"""

from __future__ import annotations

import math
from enum import IntEnum

from kvstore.planning.planner import Plan, Way

__all__ = ["Trial", "Trials"]

_LEAST_PAUSE_S, _MOST_PAUSE_S = 3.0, 60.0
_LEAST_PAUSE = 16.0
"""Times what the request takes to compute."""
_BETTER = 2.0 / 3.0
"""A disk that takes less than this of what it took is on its way to be worth reading: it is tried again soon."""


class Trial(IntEnum):
    """How a disk is tried."""

    ALONE = 0
    BESIDE = 1


class Trials:
    """Of the disks of one engine, by its thread; `measured` may come from any."""

    def __init__(self) -> None:
        self._at = [-math.inf, -math.inf]  # by Trial: when the disk was measured, or tried, last
        self._tried_at = -math.inf
        self._pause_s = _LEAST_PAUSE_S
        self._share = math.inf  # of what computing takes, what loading was expected to take at the last trial

    def measured(self, how: Trial, now_s: float) -> None:
        """A load has told how fast the disk is."""
        self._at[how] = now_s

    def soon(self) -> None:
        """The disk is in use, or to be tried again: the pause is the shortest."""
        self._pause_s, self._share = _LEAST_PAUSE_S, math.inf

    def begin(self, plan: Plan, *, beside: bool, now_s: float) -> Trial | None:
        """How this request, planned like this with blocks on disk, tries it; then the next pause has begun.

        `beside`: whether it can be read beside its computation. None: it does not try.
        """
        if plan.way is Way.LOAD:
            self.soon()
            return None
        if not plan.compute_all_s:
            return None  # not measured: loads are under way
        share = plan.load_all_s / plan.compute_all_s
        if share < _BETTER * self._share:
            self._pause_s = _LEAST_PAUSE_S
        how = Trial.BESIDE if beside and self._at[Trial.BESIDE] < self._at[Trial.ALONE] else Trial.ALONE
        pause_s = max(self._pause_s, _LEAST_PAUSE * plan.compute_all_s)
        if now_s - max(self._at[how], self._tried_at) < pause_s:
            return None
        self._at[how] = self._tried_at = now_s
        self._pause_s, self._share = min(2.0 * self._pause_s, _MOST_PAUSE_S), share
        return how
