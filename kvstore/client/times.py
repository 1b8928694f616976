"""How long the parts of attaching took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["PartTimes"]


class PartTimes:
    """Seconds by part, in the order in which parts began. One thread writes."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is inside is a part, or more of one."""
        self._seconds.setdefault(name, 0.0)
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - began

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of every part that has begun."""
        return dict(self._seconds)
