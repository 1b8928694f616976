"""Blocks that were read ahead of use: how many lie in DRAM unused, and what became of each.

A block is *useful* when the request for it finds it in DRAM, *late* when the request comes while it is still on its
way, and *wasted* when it leaves DRAM before anybody asked for it. What is undone before it was read is none of them.
Owns one mark a DRAM slot. Counts go into the store's counters, by who wished for the read.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.moves import U8, U32
from kvstore.tables.slots import SlotPool

__all__ = ["EarlyReads", "Wish"]


class Wish(IntEnum):
    """Why a block is read ahead; the name in lower case begins its counters."""

    PREFETCH = 1
    """A queued request will ask for it."""
    NEXT_TURN = 2
    """A conversation is expected to go on."""


_HERE = 4  # beside the wish: it was read
_WISH = 3
_ENDS = ("useful", "late", "wasted")


class EarlyReads:
    """See the module. All operations take DRAM slots and pass over those that are no early reads. O(n)."""

    __slots__ = ("_counters", "_dram", "_mark", "_unused")

    def __init__(self, dram: SlotPool, counters: Counter[str]) -> None:
        self._dram = dram
        self._counters = counters
        self._mark: U8 = np.zeros(len(dram), dtype=np.uint8)
        self._unused: Counter[int] = Counter()
        for name in (f"{wish.name.lower()}_{end}_bytes" for wish in Wish for end in _ENDS):
            counters[name] += 0  # a metric exists from the start

    def unused(self, slot_bytes: int) -> int:
        """Slots of a size whose blocks are on their way, or here, and were not asked for."""
        return self._unused[slot_bytes]

    def awaited(self, slots: U32) -> NDArray[np.bool_]:
        """[n] whether each was read ahead, or is to be, and was not asked for."""
        found: NDArray[np.bool_] = self._mark[slots] != 0
        return found

    def begin(self, slots: U32, wish: Wish) -> None:
        """These are to be read ahead."""
        self._end(slots, "")
        self._mark[slots] = wish
        self._count(slots, 1)

    def arrived(self, slots: U32) -> None:
        """The bytes are there."""
        slots = self._marked(slots)
        if len(slots):
            self._mark[slots] |= _HERE

    def asked(self, slots: U32) -> None:
        """Somebody wants these now: useful where they are there, else late."""
        slots = self._marked(slots)
        if len(slots):
            here = self._mark[slots] >= _HERE
            self._end(slots[here], "useful")
            self._end(slots[~here], "late")

    def gone(self, slots: U32) -> None:
        """These become free: wasted where they were read."""
        slots = self._marked(slots)
        if len(slots):
            here = self._mark[slots] >= _HERE
            self._end(slots[here], "wasted")
            self._end(slots[~here], "")

    def faults(self) -> list[str]:
        """What is wrong, for `check_integrity`."""
        marked = np.flatnonzero(self._mark).astype(np.uint32)
        if len(marked) != self._unused.total():
            return [f"{self._unused.total()} early reads are counted, {len(marked)} are marked"]
        return []

    def _marked(self, slots: U32) -> U32:
        if not self._unused.total():
            return slots[:0]
        found: U32 = slots[self._mark[slots] != 0]
        return found

    def _end(self, slots: U32, name: str) -> None:
        slots = self._marked(slots)
        if not len(slots):
            return
        if name:
            sizes = self._dram.slot_bytes(slots)
            for wish in Wish:
                of_wish = (self._mark[slots] & _WISH) == wish
                if of_wish.any():
                    self._counters[f"{wish.name.lower()}_{name}_bytes"] += int(sizes[of_wish].sum())
        self._count(slots, -1)
        self._mark[slots] = 0

    def _count(self, slots: U32, sign: int) -> None:
        for size, count in zip(*np.unique(self._dram.slot_bytes(slots), return_counts=True), strict=True):
            self._unused[int(size)] += sign * int(count)
