"""What the shell finds out about the disks of NVMe paths, and what the store does about it at once.

A disk that hangs holds what it has, and is a miss for everybody else; one without room for another slab goes on with
those it has. Volatile: a restarted daemon finds it out again. How a disk answers its moves is `kvstore.tiering.health`.
"""

from __future__ import annotations

import numpy as np

from kvstore.layout import NONE, ExtentState, Tier
from kvstore.moves import MissCause
from kvstore.state import StoreState, mover_bit
from kvstore.tiering.promoting import Promoting

__all__ = ["NO_SLAB_MS", "Paths"]

NO_SLAB_MS = 30_000
"""How long no other slab is asked for after one could not be made."""


class Paths:
    """All paths, by number."""

    __slots__ = ("_promoting", "_state")

    def __init__(self, state: StoreState, promoting: Promoting) -> None:
        self._state = state
        self._promoting = promoting

    def hangs(self, path: int) -> None:
        """The path's disk has not answered for long: nothing new goes there, and who waits for it is told so.

        What its mover has stays held. O(DRAM slots).
        """
        state = self._state
        state.hung[path] = True
        self._promoting.cancel_all(path)
        slots = state.dram.held_by(mover_bit(path))
        rows = state.dram.row[slots[state.dram.filling(slots)]]
        state.waits.resolved(rows[rows != NONE])

    def answers(self, path: int) -> None:
        """The path's disk answers again."""
        self._state.hung[path] = False

    def slab_lost(self, extent: int) -> int:
        """Somebody has deleted the extent's slab: its blocks end, and its slots can be used again. Returns how many.

        The path has no mover, so nothing is on its way into the slab or out of it. O(slots of the extent).
        """
        state = self._state
        base, size = state.extents.range(extent)
        slots = np.arange(base, base + size, dtype=np.uint32)
        sealed = slots[state.nvme.sealed(slots)]
        promoted = state.columns.dram[state.nvme.row[sealed]]
        promoted = promoted[promoted != NONE]
        self._promoting.undo(promoted[state.dram.filling(promoted)])
        if len(sealed):
            state.drop_copies(Tier.NVME, sealed, MissCause.DROPPED)
        return len(sealed)

    def slab_failed(self, extent: int) -> bool:
        """There is no slab for this extent, and none can be made now. Whether its path goes on without.

        It does where it has other slabs of the class: then no other is asked for until NO_SLAB_MS from now, and the
        moves to the extent count as not carried out. Otherwise nothing is changed, and its moves fail.
        """
        state, columns = self._state, self._state.columns
        if state.unmade[extent]:
            return True
        path, slot_bytes = int(columns.extent_device[extent]), columns.extent_slot_bytes[extent]
        of_path = np.array(state.extents.of(Tier.NVME, path, ExtentState.READY), dtype=np.int64)
        others = of_path[(columns.extent_slot_bytes[of_path] == slot_bytes) & (of_path != extent)]
        if not len(others[~state.unmade[others]]):
            return False
        state.unmade[extent] = True
        state.no_slab_until_ms[path] = state.now_ms + NO_SLAB_MS
        state.nvme.close_extent(extent)
        state.extents.drain(extent)
        return True
