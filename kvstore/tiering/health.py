"""Whether a path's disk does what it is asked for: what fails many times in a row is paused, and tried by one move.

A bad block fails alone; a disk that is full, read-only or gone fails all that it is given, and each of those blocks
would be copied, refused and given up. Reads and writes are judged apart: a full disk still reads. Pure: time is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FAILURES_IN_A_ROW", "FIRST_RETRY_MS", "RETRY_MS", "PathHealth", "Streak"]

FAILURES_IN_A_ROW = 32
"""Without a success in between. A piece that a mover carries out in one call has as many."""
FIRST_RETRY_MS = 500
RETRY_MS = 5_000
"""Pauses between tries: the first, doubled each time, and the longest."""


@dataclass(slots=True)
class Streak:
    """One direction of one path."""

    failures: int = 0
    """In a row, up to now."""
    trying: bool = False
    """Whether a move is under way that shall tell if the pause ends."""
    probing: bool = False
    """Whether that move is one that nobody asked for."""
    _retry_ms: int = 0
    """While paused: when one move may be tried."""
    _pause_ms: int = FIRST_RETRY_MS
    """From a failure to the next try."""

    @property
    def paused(self) -> bool:
        """Whether the last many all failed; also while one is tried."""
        return self.failures >= FAILURES_IN_A_ROW

    def open(self, now_ms: int) -> bool:
        """Whether a move may go to the disk now."""
        return not self.paused or now_ms >= self._retry_ms

    def allowed(self, limit: int, now_ms: int) -> int:
        """How many of `limit` moves may go to the disk now."""
        return limit if not self.paused else min(limit, int(self.open(now_ms)))

    def began(self, now_ms: int) -> None:
        """A move has gone to the disk: while paused the next one has to wait for its answer, or as long again."""
        if self.paused:
            self.trying = True
            self._retry_ms = now_ms + RETRY_MS

    def ended(self, *, good: int, failed: int, now_ms: int) -> None:
        """What became of moves; those that nobody carried out are not told."""
        if good:
            self.failures, self._pause_ms = 0, FIRST_RETRY_MS
        elif failed:
            self.failures += failed
            self._retry_ms = now_ms + self._pause_ms
            if self.trying:
                self._pause_ms = min(2 * self._pause_ms, RETRY_MS)
        if good or failed:
            self.trying = self.probing = False


@dataclass(frozen=True, slots=True)
class PathHealth:
    """Both directions of one path."""

    reads: Streak = field(default_factory=Streak)
    writes: Streak = field(default_factory=Streak)
