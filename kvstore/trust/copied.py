"""HBM slots that are private copies of a block: loaded while another slot had it already.

No row names them, so who looks for the copies of a block asks here. In memory alone: what was FILLING when this daemon
took the tables over may be a copy of anything.
"""

from __future__ import annotations

import numpy as np

from kvstore.moves import U32, U64
from kvstore.tables.slots import SlotPool

__all__ = ["PrivateCopies"]

_MOST = 4096


class PrivateCopies:
    """Which they are, and of what."""

    __slots__ = ("_copies", "_pool", "_unknown")

    def __init__(self, pool: SlotPool) -> None:
        """`pool`: of HBM; what is FILLING in it now is a copy of nobody knows what."""
        self._pool = pool
        every = np.arange(len(pool), dtype=np.uint32)
        filling = every[pool.filling(every)]
        self._unknown = dict(zip(filling.tolist(), pool.generations(filling).tolist(), strict=True))
        self._copies: dict[int, tuple[int, int, int]] = {}  # slot → its generation, row, the row's word

    def note(self, slots: U32, rows: U32, words: U64) -> None:
        """[n] slots, still FILLING, that hold the blocks that these rows had at these words."""
        generations = self._pool.generations(slots)
        for slot, *of in zip(*(each.tolist() for each in (slots, generations, rows, words)), strict=True):
            self._copies[slot] = (of[0], of[1], of[2])
        if len(self._copies) > _MOST:
            self._forget_ended()

    def copies_of(self, rows: U32, words: U64) -> U32:
        """Slots that are, or may be, copies of these rows as they were at these words."""
        if not (self._copies or self._unknown):
            return np.empty(0, dtype=np.uint32)
        self._forget_ended()
        wanted = set(zip(rows.tolist(), words.tolist(), strict=True))
        found = [slot for slot, (_, row, word) in self._copies.items() if (row, word) in wanted]
        return np.unique(np.array([*found, *self._unknown], dtype=np.uint32))

    def _forget_ended(self) -> None:
        """Slots that were let go of since."""
        known = np.array([*self._copies, *self._unknown], dtype=np.uint32)
        if not len(known):
            return
        filling = self._pool.filling(known)
        now = dict(zip(known[filling].tolist(), self._pool.generations(known[filling]).tolist(), strict=True))
        self._copies = {slot: of for slot, of in self._copies.items() if now.get(slot) == of[0]}
        self._unknown = {slot: of for slot, of in self._unknown.items() if now.get(slot) == of}
