"""Which slabs the mover of a path has open: opened before the first move that names them, deleted when too many.

Owner loop only; what it says to the mover is answered later, and moves may follow at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.daemon.index_writer import IndexWriter
from kvstore.daemon.nvme import SlabTable
from kvstore.layout import Columns, SlotState, Tier, states
from kvstore.mover.link import MoverLink
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.slab import SlabFile

__all__ = ["PathSlabs"]


class PathSlabs:
    """What one mover was told of slabs."""

    def __init__(
        self, *, columns: Columns, table: SlabTable, directory: NvmeDirectory, index: IndexWriter
    ) -> None:
        self._columns = columns
        self._table = table
        self._directory = directory
        self._index = index
        self.waits = False
        """Whether the last `open` said that its moves must wait."""
        self._known: dict[int, int] = {}
        """Number of the slab that it was told to open, by extent."""
        self._doomed: set[int] = set()
        """Numbers of slabs that it was told to delete."""

    def forget(self) -> None:
        """There is another mover, which knows none."""
        self._known.clear()
        self._doomed.clear()

    def failed(self, extent: int, number: int) -> None:
        """A slab is not open: it is tried again by the next move that names it, or when it is to be deleted."""
        self._doomed.discard(number)
        if self._known.get(extent) == number:
            del self._known[extent]

    def open(self, moves: NDArray[np.void], link: MoverLink) -> bool:
        """A slab is made, or made anew for another slot size, before the first move that names its extent.

        False: the moves must wait until the index has forgotten a slab that has to go first, for one commit.
        """
        self.waits = False
        for extent in np.unique(moves["nvme_extent"]).tolist():
            slot_bytes = int(self._columns.extent_slot_bytes[extent])
            number = self._table.number(extent)
            if number and self._table.slot_bytes(extent) != slot_bytes:
                # The store cuts an extent anew only when none of its slots is in use, so no move names the old slab.
                if not self._index.has_forgotten(number):
                    self.waits = True
                    continue
                self._send(link, extent, number, self._table.slot_bytes(extent))
                link.send_drop(Tier.NVME, extent)
                self._known.pop(extent, None)
                number = 0
            if not number:
                # The table may name slabs that no mover has come to make, as a daemon before left them.
                number = max(self._directory.new_slab_number(), self._table.newest + 1)
                self._table.set(extent, number, slot_bytes)
            self._send(link, extent, number, slot_bytes)
        return not self.waits

    def _send(self, link: MoverLink, extent: int, number: int, slot_bytes: int) -> None:
        if extent not in self._known:
            self._known[extent] = number
            nbytes = int(self._columns.extent_bytes[extent])
            link.send_slab(extent, number, nbytes, slot_bytes, self._blocks_in(extent))

    def _blocks_in(self, extent: int) -> int:
        base, slots = int(self._columns.extent_slot_base[extent]), int(self._columns.extent_slots[extent])
        now = states(self._columns.pools[Tier.NVME].state[base : base + slots])
        return int(np.count_nonzero(now == SlotState.SEALED))

    def delete(self, extent: int, file: SlabFile, link: MoverLink) -> None:
        """Has the mover delete a slab that was the extent's, and is no extent's any more. Raises ResourceExhausted."""
        if file.number in self._doomed:
            return
        link.send_slab(extent, file.number, file.nbytes, file.slot_bytes)
        link.send_drop(Tier.NVME, extent)
        self._doomed.add(file.number)
        self._known.pop(extent, None)
