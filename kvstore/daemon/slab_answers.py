"""What a path makes of its mover's answers about slabs: some were gone, some cannot be made. Owner loop only.

What the store does about an extent without a slab is `kvstore.paths`.
"""

from __future__ import annotations

import numpy as np

from kvstore.daemon.index_writer import IndexWriter
from kvstore.daemon.log import Log
from kvstore.daemon.nvme import SlabTable
from kvstore.daemon.owner import Owner
from kvstore.daemon.path_voice import PathVoice
from kvstore.layout import Columns, SlotState, Tier, states
from kvstore.wire import mover as wire

__all__ = ["SlabAnswers"]

_LOG = Log("mover")


class SlabAnswers:
    """One path's."""

    def __init__(
        self, *, owner: Owner, columns: Columns, table: SlabTable, index: IndexWriter, voice: PathVoice
    ) -> None:
        self._owner = owner
        self._columns = columns
        self._table = table
        self._index = index
        self._voice = voice
        self._without: set[int] = set()  # extents that the path goes on without

    def opened(self, told: wire.SlabOpened) -> None:
        """The mover has a slab."""
        self._without.discard(told.extent)
        if not self._without:
            self._voice.settled("slab")
        if not told.direct:
            _LOG.info("no O_DIRECT here: buffered", path=self._voice.number, extent=told.extent)
        blocks = self._blocks_in(told.extent) if told.made else 0
        if blocks:
            self._owner.counters.add("nvme_slabs_lost_total")
            _LOG.warning(
                "slab was gone and is made anew: its blocks are misses",
                path=self._voice.number,
                folder=self._voice.folder,
                slab=self._table.number(told.extent),
                blocks=blocks,
            )

    def _blocks_in(self, extent: int) -> int:
        """Blocks that the store has in a slab."""
        base, slots = int(self._columns.extent_slot_base[extent]), int(self._columns.extent_slots[extent])
        now = states(self._columns.pools[Tier.NVME].state[base : base + slots])
        return int(np.count_nonzero(now == SlotState.SEALED))

    def failed(self, told: wire.SlabFailed) -> None:
        """The mover cannot have a slab now."""
        if told.exists:
            self._voice.complain("slab", told.text)
            return
        number = self._table.number(told.extent)
        if number:  # there is no such file
            self._index.drop_slab(number)
            self._table.set(told.extent, 0, 0)
        self._owner.counters.add("nvme_slabs_refused_total")
        if self._owner.store.paths.slab_failed(told.extent):
            self._without.add(told.extent)
            advice = "older blocks make room instead; free space on that disk, or configure less"
            self._voice.complain("slab", f"{told.text}: {advice}")
        else:
            self._voice.complain("slab", told.text)
