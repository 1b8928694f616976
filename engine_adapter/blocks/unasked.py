"""Requests that the engine asks for no more, while one that it does ask for lacks room. One engine thread.

An engine asks for the first of its queue alone once that was passed over often, as it mostly is after a preemption.
Those behind it have asked before: they hold what an answer gave them, which nobody takes, and their turn for room in
DRAM, in which the store serves in the order in which requests asked. So the first waits for those who run after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine_adapter.base import RequestId
from engine_adapter.blocks.entry import MAX_UNUSED_S, Entry, Phase

__all__ = ["Unasked"]

_LOOK_S = 0.1
"""How often all requests are looked at."""


class Unasked:
    """Of the requests of one engine; changes nothing."""

    def __init__(self, requests: Mapping[RequestId, Entry], clock: Callable[[], float]) -> None:
        """`requests` are all that the engine has, then and later."""
        self._requests = requests
        self._clock = clock
        self._look_at = 0.0

    def in_the_way(self) -> list[Entry]:
        """Those that were not asked for lately, do not run, and have what one that is asked for lacks: an answer that
        nobody takes, or a turn before it. The last turn first: ending one must not give room to another that ends.

        None most of the time. O(requests), ten times a second.
        """
        now = self._clock()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        since, requests = now - MAX_UNUSED_S, self._requests.values()
        lacking = [entry.turn_at for entry in requests if entry.lacks_room and entry.asked_at >= since]
        if not lacking:
            return []
        last = max(lacking)
        found = [
            entry
            for entry in requests
            if entry.phase is not Phase.ADMITTED
            and entry.asked_at < since
            and entry.turn_at > 0.0
            and (entry.turn_at < last or entry.gives_back)
        ]
        return sorted(found, key=lambda entry: -entry.turn_at)
