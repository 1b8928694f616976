"""Which of the blocks that are served are looked at again: every so many-th, from a bounded queue."""

from __future__ import annotations

from collections import deque

from kvstore.moves import U32

__all__ = ["Sample"]

_MAX_WAITING = 64


class Sample:
    """DRAM slots whose bytes are to be checked. Slots are checked against the tables when they are taken."""

    __slots__ = ("_every", "_served", "_waiting")

    def __init__(self, every: int) -> None:
        """`every`: one of so many served blocks; 0: none."""
        self._every = every
        self._served = 0
        self._waiting: deque[int] = deque(maxlen=_MAX_WAITING)

    def served(self, slots: U32) -> None:
        """These were given to somebody. O(1)."""
        if not self._every:
            return
        self._served += len(slots)
        if self._served >= self._every:
            self._waiting.append(int(slots[self._served % len(slots)]))
            self._served = 0

    def ask(self, slots: U32) -> None:
        """Somebody can only be given these once they were looked at. As many as there is place for."""
        self._waiting.extend(slots[: _MAX_WAITING - len(self._waiting)].tolist())

    def take(self, count: int) -> list[int]:
        """Up to `count` of them, each once."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
