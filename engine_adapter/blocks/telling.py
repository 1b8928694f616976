"""When the store is told what steps have done: messages that nobody waits for leave together.

Each message costs the daemon and the session's threads about a millisecond of CPU time, and looking whether there is
one costs some 40 us, cold as the caches are behind a step's kernels; the next step wants the same cores
(docs/planner.md, the guard). So while a prefill goes on its seals leave at most ten times a second, with whatever else
there is to say. Its first and its last leave at once, and so does all that somebody may lack: blocks that decoding has
filled, slots that are let go of, slots that are wanted. A worker that is killed loses what its prefill computed in
that tenth of a second. Where all requests decode, and none has filled a block, it is looked a hundred times a second.
Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Telling"]

_TOGETHER_S = 0.1
_LOOK_S = 0.01


class Telling:
    """Asked at the end of each step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_at = -math.inf
        self._goes_on = self._filled = False

    def sealed(self, *, goes_on: bool) -> None:
        """Blocks were filled in this step. `goes_on`: by a part of a prompt, and more of it is in the next."""
        self._goes_on |= goes_on
        self._filled = True

    def hurry(self) -> None:
        """The end of this step tells, whatever was computed in it."""
        self._told_at = -math.inf

    def due(self, *, waiting: bool) -> bool:
        """A step ends: whether the store is told now. If not, one of the next steps tells. `waiting`: some request."""
        pause_s = _TOGETHER_S if self._goes_on else 0.0 if self._filled or waiting else _LOOK_S
        self._goes_on = self._filled = False
        now = self._clock()
        if now - self._told_at < pause_s:
            return False
        self._told_at = now
        return True
