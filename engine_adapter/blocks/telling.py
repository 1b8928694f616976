"""When the store is told what a prefill has computed: the seals of small steps leave together.

Each message costs the daemon and the session's threads about a millisecond of CPU time, while the next step wants the
same cores (docs/planner.md, the guard). So while a prefill goes on its seals leave at most ten times a second, with
whatever else there is to say. Its first and its last leave at once, and so does all that somebody may lack: slots
that are let go of, slots that are wanted. A worker that is killed loses what it computed in that tenth of a second.
Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Telling"]

_TOGETHER_S = 0.1


class Telling:
    """Asked at the end of each step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_at = -math.inf
        self._goes_on = False

    def goes_on(self) -> None:
        """A part of a prompt was computed in this step, and more of it is in the next."""
        self._goes_on = True

    def hurry(self) -> None:
        """The end of this step tells, whatever was computed in it."""
        self._told_at = -math.inf

    def due(self) -> bool:
        """A step ends: whether the store is told now. If not, one of the next steps tells: a prefill has some."""
        goes_on, self._goes_on = self._goes_on, False
        now = self._clock()
        if goes_on and now - self._told_at < _TOGETHER_S:
            return False
        self._told_at = now
        return True
