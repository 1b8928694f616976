"""Checksums of the blocks in DRAM slots, in the shared tables: who stored a block says it, and who loads it compares.

One is the xxh3-128 of the whole slot, as a trailer on disk has it. It is of a slot under one generation, so nothing has
to be cleared when a slot is given away: the checksum is written first, then whose it is, and both before the slot
becomes SEALED. The daemon writes; a client that holds a slot reads what does not change any more, but for one that
becomes known.

*Unread*: a mover has put the block there without looking at its bytes, and nobody has since. Its checksum is the word
of its trailer. It is given to sessions that compare alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT, Columns, Tier
from kvstore.moves import U32, U64

__all__ = ["Checksums"]

_UNREAD = np.uint64(1 << 63)
_ONE = np.uint64(1)


class Checksums:
    """Of all DRAM slots. Operations take arrays of slots, none of them NONE; no duplicates where something is noted."""

    __slots__ = ("_of", "_some_unread", "_state", "_sums")

    def __init__(self, columns: Columns) -> None:
        self._state = columns.pool(Tier.DRAM).state
        self._sums = columns.dram_checksum
        self._of = columns.dram_checksum_of
        self._some_unread: bool | None = None  # not looked at so far

    @property
    def some_unread(self) -> bool:
        """Whether any slot was ever unread: mostly it is not where anybody would ask which are. O(slots) once."""
        if self._some_unread is None:
            self._some_unread = bool((self._of & _UNREAD).any())
        return self._some_unread

    def known(self, slots: U32) -> NDArray[np.bool_]:
        """[n] of which there is one."""
        found: NDArray[np.bool_] = (self._of.take(slots) & ~_UNREAD) == self._now(slots)
        return found

    def unread(self, slots: U32) -> NDArray[np.bool_]:
        """[n] whose bytes nobody has compared with theirs."""
        found: NDArray[np.bool_] = self._of.take(slots) == (self._now(slots) | _UNREAD)
        return found

    def of(self, slots: U32) -> U64:
        """[n, 2] as far as they are `known`."""
        sums: U64 = self._sums.take(slots, axis=0)
        return sums

    def note(self, slots: U32, sums: U64) -> None:
        """The blocks in these slots, complete or about to be, have these checksums, and somebody has looked."""
        self._sums[slots] = sums
        self._of[slots] = self._now(slots)

    def note_unread(self, slots: U32, sums: U64) -> None:
        """As `note`, by the word of a trailer."""
        self._some_unread = self._some_unread or len(slots) > 0
        self._sums[slots] = sums
        self._of[slots] = self._now(slots) | _UNREAD

    def forget(self, slots: U32) -> None:
        """Nothing is known of these."""
        self._of[slots] = 0

    def _now(self, slots: U32) -> U64:
        """[n] what is written of a checksum of a slot as it is."""
        words: U64 = (self._state.take(slots) >> GENERATION_SHIFT) + _ONE
        return words
