"""Whether a daemon knows all that its disks hold.

One that was started anew serves before it has read the index of a large disk, and one that was restarted reads nothing
from a disk until its mover is there. A miss of that moment may be a hit a moment later, so the store's link asks once
a stream, and again until every disk is open or the time for it is over: a disk that cannot be opened is no reason to
wait for.

`known` is asked by the engine's scheduler and never waits; `look` is called by one thread, which may.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.client import Client, Session
from kvstore.errors import KvstoreError

__all__ = ["Settling"]


class Settling:
    """Of one session."""

    def __init__(self, patience_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience_s`: for the disks, from the first look at a stream on."""
        self._patience_s = patience_s
        self._clock = clock
        self._known_stream = 0
        self._looked_stream = 0
        self._until = 0.0

    def known(self, session: Session) -> bool:
        """Whether the daemon of the session's stream has read its disks, or is not waited for any longer."""
        return session.streams == self._known_stream

    def look(self, session: Session, client: Client) -> None:
        """Asks the daemon: one call."""
        stream = session.streams
        if stream != self._looked_stream:
            self._looked_stream, self._until = stream, self._clock() + self._patience_s
        try:
            settled = all(path.in_service for path in client.stats().paths)
        except KvstoreError:  # away again: a later look, at a later stream
            settled = False
        if settled or self._clock() >= self._until:
            self._known_stream = stream
