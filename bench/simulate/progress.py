"""How far something is, said now and then, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Progress"]

_SAY_S = 5.0


class Progress:
    """Of one thing that takes a while; begins at once."""

    __slots__ = ("_begun", "_doing", "_said", "_say")

    def __init__(self, doing: str, say: Callable[[str], None]) -> None:
        self._doing = doing
        self._say = say
        self._said = time.perf_counter()
        self._begun = time.process_time()
        say(doing)

    def done(self, part: float) -> None:
        """So much of it is done, 0 to 1."""
        now = time.perf_counter()
        if now - self._said >= _SAY_S:
            self._said = now
            self._say(f"{self._doing}, {part:.0%}")

    def seconds(self) -> float:
        """Of this process's processor time since it began: what else runs on the machine does not count."""
        return max(time.process_time() - self._begun, 1e-9)
