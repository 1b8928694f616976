"""When a disk that a request is not to wait for is read all the same, so that it stays known how fast it is.

Loads tell how fast a disk is that is worth reading. One that is not is tried now and then: by itself, where the request
waits for a moment, or beside a computation that waits for nothing. Either makes the request a little later, the second
since its steps end where pieces may come. So the pause before the next trial doubles with each, up to a minute, and is
never less than 16 times what the request takes to compute. What is much faster than it was taken for is tried again at
once, until that is believed, and so is a disk that the guard gives another chance. Pure: the clock is an argument.
"""

from __future__ import annotations

import math
from enum import IntEnum

from kvstore.planning.planner import Plan, Way

__all__ = ["Trial", "Trials"]

_LEAST_PAUSE_S, _MOST_PAUSE_S = 3.0, 60.0
_LEAST_PAUSE = 16.0
"""Times what the request takes to compute."""
_AT_ONCE = 3
"""A change that stays is believed with the third measurement (`kvstore.planning.speeds`)."""


class Trial(IntEnum):
    """How a disk is tried."""

    ALONE = 0
    BESIDE = 1


class Trials:
    """Of the disks of one engine, by its thread; `measured` may come from any."""

    def __init__(self) -> None:
        self._at = [-math.inf, -math.inf]  # by Trial: when the disk was measured, or tried, last
        self._at_once = [0, 0]  # by Trial: so many wait for no pause
        self._tried_at = -math.inf
        self._pause_s = _LEAST_PAUSE_S

    def measured(self, how: Trial, now_s: float, *, surprising: bool) -> None:
        """A load has told how fast the disk is. `surprising`: much faster than it was taken for."""
        self._at[how] = now_s
        self._at_once[how] = _AT_ONCE if surprising else 0

    def soon(self) -> None:
        """The disk was out of use and is to be tried again."""
        self._pause_s, self._at_once = _LEAST_PAUSE_S, [_AT_ONCE, _AT_ONCE]

    def begin(self, plan: Plan, *, beside: bool, now_s: float) -> Trial | None:
        """How this request, planned like this with blocks on disk, tries it; then the next pause has begun.

        `beside`: whether it can be read beside its computation. None: it does not try.
        """
        if plan.way is not Way.COMPUTE:  # it is in use, and measured by that
            self._pause_s = _LEAST_PAUSE_S
        if plan.way is Way.LOAD or not plan.compute_all_s:  # or nothing is known yet, and loads are under way
            return None
        how = self._next(beside=beside)
        pause_s = max(self._pause_s, _LEAST_PAUSE * plan.compute_all_s)
        if not self._at_once[how] and now_s - max(self._at[how], self._tried_at) < pause_s:
            return None
        self._at[how] = self._tried_at = now_s
        self._at_once[how] = max(0, self._at_once[how] - 1)
        self._pause_s = min(2.0 * self._pause_s, _MOST_PAUSE_S)
        return how

    def _next(self, *, beside: bool) -> Trial:
        """The way that is to be tried at once, else that of which least is known."""
        if not beside:
            return Trial.ALONE
        return max(Trial, key=lambda how: (min(self._at_once[how], 1), -self._at[how], -how))
