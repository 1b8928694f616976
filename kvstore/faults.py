"""Named fault points: places where tests make a process die or stall, no effect where the environment names none.

    KVSTORE_FAULT="move.done:kill:3"                   SIGKILL to itself when `move.done` is passed for the third time
    KVSTORE_FAULT="seal.commit:sleep=0.5;move.start:kill"   half a second, once, at the first; death at the second

Each rule acts once, at the given passing (the first where none is given). The variable is read once in a process's
life. Standard library only.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvstore.errors import ConfigError

__all__ = ["DISK_FAULTS_VARIABLE", "FAULT_VARIABLE", "FaultRule", "fault", "parse_faults"]

FAULT_VARIABLE = "KVSTORE_FAULT"
DISK_FAULTS_VARIABLE = "KVSTORE_DISK_FAULTS"
"""Names a file of faults of disks, which movers obey (`tiers.nvme.faulty`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """What happens at one point, at which passing."""

    action: str
    """`kill` or `sleep`."""
    seconds: float = 0.0
    passing: int = 1
    _passed: Iterator[int] = field(default_factory=lambda: itertools.count(1), compare=False, repr=False)

    def passes(self, act: Callable[[FaultRule], None]) -> None:
        """Counts a passing, and acts if it is the one. The counter is atomic: several threads may pass."""
        if next(self._passed) == self.passing:
            act(self)


def parse_faults(text: str) -> Mapping[str, tuple[FaultRule, ...]]:
    """Rules by point. Raises ConfigError for anything that is not `point:kill[:n]` or `point:sleep=seconds[:n]`."""
    rules: dict[str, tuple[FaultRule, ...]] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        point, _, rest = item.partition(":")
        action, _, passing = rest.partition(":")
        name, _, seconds = action.partition("=")
        try:
            if not point or name not in ("kill", "sleep") or (name == "sleep") != bool(seconds):
                raise ValueError
            rule = FaultRule(action=name, seconds=float(seconds or 0), passing=int(passing or 1))
        except ValueError:
            raise ConfigError(
                f"{FAULT_VARIABLE}: {item!r} is not point:kill[:n] or point:sleep=seconds[:n]"
            ) from None
        rules[point] = (*rules.get(point, ()), rule)
    return rules


def fault(point: str) -> None:
    """Passes the fault point `point`."""
    for rule in _rules().get(point, ()):
        rule.passes(_act)


@functools.cache
def _rules() -> Mapping[str, tuple[FaultRule, ...]]:
    return parse_faults(os.environ.get(FAULT_VARIABLE, ""))


def _act(rule: FaultRule) -> None:
    if rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # the signal comes to the process, perhaps not to this thread at once
    time.sleep(rule.seconds)
