"""How long the daemon has been away from an engine, and the two lines about it in the worker's log. One thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Absence"]

_LOG = logging.getLogger("kvstore.worker")


class Absence:
    """Told again and again whether the daemon answers; logs when it is lost and when it is back, once each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._since: float | None = None

    def note(self, available: bool) -> None:
        """Whether the daemon answers now."""
        if not available and self._since is None:
            self._since = self._clock()
            _LOG.warning("the daemon is away: going on without a cache, in the slots in hand")
        elif available and self._since is not None:
            _LOG.warning("the daemon is back after %.0f s", self._clock() - self._since)
            self._since = None

    def seconds(self) -> float:
        """Since when it has been away; 0 while it answers."""
        return 0.0 if self._since is None else self._clock() - self._since
