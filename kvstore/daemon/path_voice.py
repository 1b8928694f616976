"""What a path says to people: warnings in the status, and one line in the log at each change. Owner loop only.

A disk that fails everything would say so with each block; once it is paused that one warning says all that single
ones would. A warning stands as long as what it says is so.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.recorder import Event
from kvstore.tiering.health import RETRY_MS

__all__ = ["PathVoice"]

_LOG = Log("mover")
_DIRECTIONS = ("reads", "writes")


class PathVoice:
    """One path."""

    def __init__(self, owner: Owner, number: int, folder: Path) -> None:
        self._owner = owner
        self.number = number
        self.folder = folder
        self._reason = ""
        """What was said last about what failed."""

    def notice(self, text: str) -> None:
        """A line of the mover."""
        self._reason = text
        log = _LOG.debug if self._pauses else _LOG.warning
        log("notice", path=self.number, text=text)

    def complain(self, what: str, text: str) -> None:
        """Something is wrong from now on: a warning, and one line in the log while it stays the same."""
        self._reason = text
        if not self._pauses:
            self.warn(what, text)

    def warn(self, what: str, text: str) -> None:
        """As `complain`, also while the path is paused, and no reason of that."""
        topic = self._topic(what)
        if self._owner.warnings.get(topic) != text:
            _LOG.warning("path fails", path=self.number, error=text)
        self._owner.warnings[topic] = text

    def settled(self, what: str) -> bool:
        """It is well again; whether there was anything to settle."""
        return self._owner.warnings.pop(self._topic(what), None) is not None

    def say_hangs(self) -> None:
        """Its disk has not answered for long."""
        self._owner.counters.add("nvme_hangs_total")
        advice = "nothing is read from it or written to it until it does; look at its disk (dmesg, smartctl)"
        self.warn("stall", f"nvme path {self.folder} does not answer: {advice}")

    def say_answers(self) -> None:
        """Its disk answers again."""
        self.settled("stall")
        _LOG.info("path answers again", path=self.number)

    def say_health(self) -> None:
        """One line when the path's disk is paused and one when it is not any more."""
        health = self._owner.store.health(self.number)
        for what in _DIRECTIONS:
            paused = (health.reads if what == "reads" else health.writes).paused
            topic = self._topic(f"failing-{what}")
            if paused and topic not in self._owner.warnings:
                again = f"{what} are paused and tried again every {RETRY_MS // 1000} s"
                for single in ("slab", "sync"):
                    self.settled(single)
                text = f"nvme path {self.folder} fails all {what}: {again} ({self._reason})"
                self._owner.warnings[topic] = text
                self._owner.counters.add("nvme_pauses_total")
                _LOG.warning("path paused", path=self.number, what=what, error=self._reason)
                self._owner.recorder.note(Event.PATH_PAUSED, self.number)
            elif not paused and self._owner.warnings.pop(topic, None) is not None:
                _LOG.info("path resumed", path=self.number, what=what)
                self._owner.recorder.note(Event.PATH_RESUMED, self.number)

    def mover_started(self, pid: int) -> None:
        """A new process works for the path."""
        _LOG.info("mover started", path=self.number, pid=pid)
        self._owner.recorder.note(Event.MOVER_START, self.number, a=pid)

    def mover_ended(self, code: int | None) -> None:
        """It is gone; `code` as `subprocess` says it, negative for a signal."""
        _LOG.warning("mover ended", path=self.number, code=code)
        self._owner.recorder.note(Event.MOVER_END, self.number, a=abs(code or 0))

    @property
    def _pauses(self) -> bool:
        """Whether the disk fails all that it is given, which has been said."""
        return any(self._topic(f"failing-{what}") in self._owner.warnings for what in _DIRECTIONS)

    def _topic(self, what: str) -> str:
        return f"{what}-{self.number}"
