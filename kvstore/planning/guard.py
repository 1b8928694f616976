"""The guard: takes a tier out of use while it costs more than it saves, and tries it again now and then.

Owns the evidence of one tier in one engine: seconds that using it took, seconds that it saved, and how much work it
was given. Evidence is weighed a window at a time, a window being so much work (for DRAM: its own size in stored bytes,
so that a window is one turn of everything in it). Nothing is weighed while a tier is filled for the first time. Two
windows in a row that cost more than they saved take it out; one does, where it was out before. It is tried again after
a pause of so many times what the last trial cost, which doubles each time: all trials together stay below a bounded
share of the time. Pure: the clock is an argument; one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["GuardLimits", "TierGuard", "Use", "Verdict"]


class Use(IntEnum):
    """Whether a tier is in use."""

    IN_USE = 0
    TRIAL = 1
    OUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """How a tier is judged."""

    window: float
    """Work between two verdicts, in whatever unit it is told."""
    filling: float
    """Work before the first window counts: what it takes until the tier can have anything to give. Also of a trial."""
    bad_windows: int = 2
    """In a row take a tier out that was in use."""
    trial_share: float = 1 / 64
    """Of the time, the most that trials may cost."""
    least_pause_s: float = 10.0
    most_pause_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A change, with what it rests on."""

    use: Use
    spent_s: float
    saved_s: float
    pause_s: float
    """Until it is tried again; 0 where it is in use."""


class TierGuard:
    """See the module."""

    __slots__ = (
        "_bad",
        "_filling",
        "_limits",
        "_pause_s",
        "_saved_s",
        "_spent_s",
        "_trial_s",
        "_until",
        "_use",
        "_work",
    )

    def __init__(self, limits: GuardLimits) -> None:
        self._limits = limits
        self._use = Use.IN_USE
        self._bad = 0
        self._pause_s = limits.least_pause_s
        self._until = 0.0
        self._trial_s = 0.0  # what this stay in use has cost so far
        self._begin()

    def _begin(self) -> None:
        self._filling = self._limits.filling
        self._trial_s = 0.0
        self._next_window()

    def _next_window(self) -> None:
        self._work = self._spent_s = self._saved_s = 0.0

    @property
    def use(self) -> Use:
        """Whether the tier is to be used."""
        return self._use

    def spent(self, seconds: float, work: float) -> None:
        """The tier was given so much work, which took so long."""
        self._trial_s += seconds
        if self._filling > 0:
            self._filling -= work
            return
        self._spent_s += seconds
        self._work += work

    def saved(self, seconds: float) -> None:
        """What the tier gave was sooner than without it, by so much."""
        if self._filling <= 0:
            self._saved_s += seconds

    def settle(self, now_s: float) -> Verdict | None:
        """Weighs a window that is over, or ends a pause; what changed, None where nothing did."""
        if self._use is Use.OUT:
            return self._try_again() if now_s >= self._until else None
        if self._work < self._limits.window:
            return None
        spent_s, saved_s = self._spent_s, self._saved_s
        self._next_window()
        if saved_s >= spent_s:
            return self._found_good(spent_s, saved_s)
        self._bad += 1
        if self._use is Use.IN_USE and self._bad < self._limits.bad_windows:
            return None
        return self._take_out(now_s, spent_s, saved_s)

    def _try_again(self) -> Verdict:
        self._use = Use.TRIAL
        self._begin()
        return Verdict(use=self._use, spent_s=0.0, saved_s=0.0, pause_s=0.0)

    def _found_good(self, spent_s: float, saved_s: float) -> Verdict | None:
        self._bad = 0
        if self._use is Use.IN_USE:
            return None
        self._use = Use.IN_USE
        self._pause_s = self._limits.least_pause_s
        return Verdict(use=self._use, spent_s=spent_s, saved_s=saved_s, pause_s=0.0)

    def _take_out(self, now_s: float, spent_s: float, saved_s: float) -> Verdict:
        limits = self._limits
        pause_s = min(max(self._pause_s, self._trial_s / limits.trial_share), limits.most_pause_s)
        self._pause_s = min(2.0 * pause_s, limits.most_pause_s)
        self._use, self._until, self._bad = Use.OUT, now_s + pause_s, 0
        return Verdict(use=self._use, spent_s=spent_s, saved_s=saved_s, pause_s=pause_s)
