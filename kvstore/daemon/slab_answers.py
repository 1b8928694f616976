"""What a path makes of its mover's answers about slabs: some were gone, some cannot be made. Owner loop only.

What the store does about an extent without a slab is `kvstore.tiering.paths`. An answer about a slab that its extent is
no more, as one that was to be deleted, changes nothing: the extent may be another path's by now, or in another tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from kvstore.daemon.index_writer import IndexWriter
from kvstore.daemon.log import Log
from kvstore.daemon.nvme import SlabTable
from kvstore.daemon.owner import Owner
from kvstore.daemon.path_voice import PathVoice
from kvstore.layout import Columns, ExtentState, SlotState, Tier, states
from kvstore.wire import mover as wire
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.slab import slab_name

__all__ = ["SlabAnswers"]

_LOG = Log("mover")
_LOOK_S = 2.0  # for a folder's names; a disk that hangs longer is found out by its mover


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

    def _is_now(self, extent: int, number: int) -> bool:
        """Whether the extent is this slab of this path."""
        columns = self._columns
        return (
            self._table.number(extent) == number
            and columns.extent_state[extent] != ExtentState.FREE
            and columns.extent_tier[extent] == Tier.NVME
            and int(columns.extent_device[extent]) == self._voice.number
        )

    def opened(self, told: wire.SlabOpened) -> None:
        """The mover has a slab."""
        if not self._is_now(told.extent, told.number):
            return
        self._without.discard(told.extent)
        if not self._without:
            self._voice.settled("slab")
        if not told.direct:
            _LOG.info("no O_DIRECT here: buffered", path=self._voice.number, extent=told.extent)

    def left(self, extent: int) -> None:
        """The path has become smaller by this extent, and no longer goes on without its slab."""
        if extent in self._without:
            self._without.discard(extent)
            if not self._without:
                self._voice.settled("slab")

    async def deleted(self, directory: NvmeDirectory) -> dict[int, int]:
        """Numbers, by extent, of the slabs that have blocks of the store, and no file any more."""
        expected = self._with_blocks()
        if not expected:
            return {}
        try:
            look = asyncio.to_thread(directory.disk.files, directory.path)
            names = {name for name, _ in await asyncio.wait_for(look, _LOOK_S)}
        except FileNotFoundError:
            names = set()
        except (OSError, TimeoutError):
            return {}
        now = self._with_blocks()  # one that was given up on purpose meanwhile is not lost
        return {
            extent: number
            for extent, number in expected.items()
            if now.get(extent) == number and slab_name(number, self._table.slot_bytes(extent)) not in names
        }

    def _with_blocks(self) -> dict[int, int]:
        """Number of each slab that blocks of the store are in, by extent. O(slots of the path)."""
        return {
            info.extent: number
            for info in self._owner.store.extents(Tier.NVME)
            if info.device == self._voice.number
            and (number := self._table.number(info.extent))
            and self._blocks_in(info.extent)
        }

    def lost(self, slabs: Mapping[int, int]) -> None:
        """Somebody has deleted these slabs, by extent, and no mover has them open: their blocks end."""
        for extent, number in slabs.items():
            if not self._is_now(extent, number):
                continue
            self._owner.counters.add("nvme_slabs_lost_total")
            _LOG.warning(
                "slab was deleted while in use: its blocks are misses; find out who deletes files there",
                path=self._voice.number,
                folder=self._voice.folder,
                slab=number,
                blocks=self._owner.store.paths.slab_lost(extent),
            )

    def _blocks_in(self, extent: int) -> int:
        """Blocks that the store has in a slab."""
        base, slots = int(self._columns.extent_slot_base[extent]), int(self._columns.extent_slots[extent])
        now = states(self._columns.pools[Tier.NVME].state[base : base + slots])
        return int(np.count_nonzero(now == SlotState.SEALED))

    def failed(self, told: wire.SlabFailed) -> None:
        """The mover cannot have a slab now."""
        if not self._is_now(told.extent, told.number):
            return
        if told.exists:
            self._voice.complain("slab", told.text)
            return
        self._index.drop_slab(told.number)  # there is no such file
        self._table.set(told.extent, 0, 0)
        self._owner.counters.add("nvme_slabs_refused_total")
        if self._owner.store.paths.slab_failed(told.extent):
            self._without.add(told.extent)
            advice = "older blocks make room instead; free space on that disk, or configure less"
            self._voice.complain("slab", f"{told.text}: {advice}")
        else:
            self._voice.complain("slab", told.text)
