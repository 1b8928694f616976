"""How loaded a path is: what it has been given, and how fast its disk gets through it. Pure: the time is an argument.

Writes go to whichever path would be through with them first, so a fast disk gets more than a slow one, and one that
also reads, or does not answer, gets less; of those that are about alike, to the one that was given least. Each has
only so much ahead as it does in half a second: what a disk holds is DRAM that cannot be used for anything else.
"""

from __future__ import annotations

import math

from kvstore.units import GIB, MIB

__all__ = ["STRIPE_BYTES", "PathLoad"]

STRIPE_BYTES = 8 * MIB
"""Given to one path at a time: enough for calls that are worth it, too little to unbalance anything."""
_FIRST_RATE = float(GIB)  # bytes a second, until something was measured
_SAMPLE_S = 0.05
_WEIGHT = 0.3  # of a new sample
_AHEAD_S = 0.5
_LEAST_AHEAD_BYTES = 32 * MIB
_MOST_AHEAD_BYTES = GIB
_ALIKE = 1.5  # times within this factor of each other, more or less, count as the same
_SHORTEST_S = 1e-4
_EARLY_S = 0.005  # short, as a rate may be of a burst that the next reads do not get
_LEAST_EARLY_BYTES = MIB


class PathLoad:
    """One path, reads and writes together."""

    __slots__ = ("_answered_s", "_busy_s", "_done_bytes", "_given_bytes", "_rate", "outstanding_bytes")

    def __init__(self) -> None:
        self.outstanding_bytes = 0
        """Given and not answered."""
        self._rate = 0.0
        self._answered_s = 0.0
        self._busy_s = 0.0
        self._done_bytes = 0
        self._given_bytes = 0

    @property
    def rate(self) -> float:
        """Bytes a second while there is something to do."""
        return self._rate or _FIRST_RATE

    @property
    def ahead_bytes(self) -> int:
        """The most that should be outstanding in writes."""
        if not self._rate:
            return STRIPE_BYTES
        return int(min(max(self._rate * _AHEAD_S, _LEAST_AHEAD_BYTES), _MOST_AHEAD_BYTES))

    @property
    def early_bytes(self) -> int:
        """The most that should be outstanding in reads where nobody waits for the next: who comes waits for those."""
        return int(max(self._rate * _EARLY_S, _LEAST_EARLY_BYTES))

    def began(self, nbytes: int, now_s: float) -> None:
        """Moves of so many bytes were given to the path."""
        if not self.outstanding_bytes:
            self._answered_s = now_s
        self.outstanding_bytes += nbytes
        self._given_bytes += nbytes

    def ended(self, nbytes: int, now_s: float) -> None:
        """Moves of so many bytes were answered, however."""
        self.outstanding_bytes -= nbytes
        self._busy_s += now_s - self._answered_s
        self._done_bytes += nbytes
        self._answered_s = now_s
        if self._busy_s >= _SAMPLE_S:
            sample = self._done_bytes / self._busy_s
            self._rate = sample if not self._rate else (1 - _WEIGHT) * self._rate + _WEIGHT * sample
            self._busy_s, self._done_bytes = 0.0, 0

    def lost(self) -> None:
        """Nothing that was given will be answered any more."""
        self.outstanding_bytes = 0
        self._busy_s, self._done_bytes = 0.0, 0

    def through_s(self, now_s: float) -> float:
        """Seconds until it would be through with what it has and a stripe more, or since when it does not answer."""
        wait_s = (self.outstanding_bytes + STRIPE_BYTES) / self.rate
        return max(wait_s, now_s - self._answered_s) if self.outstanding_bytes else wait_s

    def order(self, now_s: float) -> tuple[int, int]:
        """Of several paths the one with the least of these gets the next writes."""
        return round(math.log(max(self.through_s(now_s), _SHORTEST_S), _ALIKE)), self._given_bytes
