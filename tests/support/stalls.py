"""How long the machine stood still: a thread that does nothing but sleep, and how late it woke up.

A test of who waits for whom takes that off what it measured: while the machine paused everybody waited.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Stalls"]

_NAP_S = 0.02
_NOTED_S = 0.05


class Stalls:
    """What the sleeper saw for the length of a `with`. A test that waits for something holds no lock of its."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # when it should have woken up, and when it did
        self._ended = threading.Event()
        self._sleeper = threading.Thread(target=self._sleep, daemon=True)

    def __enter__(self) -> Self:
        self._sleeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._sleeper.join()

    def _sleep(self) -> None:
        while not self._ended.is_set():
            due_s = time.monotonic() + _NAP_S
            time.sleep(_NAP_S)
            woke_s = time.monotonic()
            if woke_s - due_s > _NOTED_S:
                self._late.append((due_s, woke_s))

    def within(self, began_s: float, ended_s: float) -> float:
        """Seconds of this time, of `time.monotonic`, in which nothing ran that should have."""
        return sum(
            max(0.0, min(ended_s, woke_s) - max(began_s, due_s)) for due_s, woke_s in tuple(self._late)
        )
