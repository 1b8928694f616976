"""What the resizer does to one NVMe path: takes extents out with their slabs, deletes files, adds extents.

A slab is deleted by the mover that has it open. The order holds over a kill at any point: first the slab loses its
extent, then the extent goes, then the index forgets it, then the file goes; a file that no extent names is deleted when
the path is next settled.
"""

from __future__ import annotations

import asyncio

from kvstore.daemon.log import Log
from kvstore.daemon.memory import Memory
from kvstore.daemon.mover_path import MoverPath
from kvstore.daemon.nvme import SlabTable
from kvstore.daemon.owner import Owner
from kvstore.errors import KvstoreError, ResourceExhausted, Unavailable
from kvstore.layout import Tier
from kvstore.moves import ExtentInfo
from kvstore.units import format_size
from tiers.nvme.capacity import slab_file_bytes
from tiers.nvme.slab import SlabFile, remove_slab, sync_directory

__all__ = ["PathResizable"]

_LOG = Log("resize")
_GONE_S = 0.02
_EXTENTS_A_TURN = 64


class PathResizable:
    """One path. Owner loop only."""

    tier = Tier.NVME

    def __init__(self, *, owner: Owner, memory: Memory, mover: MoverPath, slabs: SlabTable) -> None:
        self.device = mover.number
        self.name = f"nvme path {mover.space.configured.path}"
        self._space = mover.space
        self._owner = owner
        self._memory = memory
        self._mover = mover
        self._slabs = slabs
        self._doomed: list[tuple[int, SlabFile]] = []
        """Slabs, by what their extents were, that no extent has any more and whose files may still be there."""
        self._strays_known = False
        self._unsynced = False
        """Whether a power cut might bring a slab back that was deleted."""

    def cost(self, nbytes: int) -> int:
        """See Resizable."""
        return slab_file_bytes(nbytes)

    def room(self) -> int:
        """See Resizable."""
        return self._space.room_bytes

    async def drop(self, info: ExtentInfo) -> None:
        """See Resizable."""
        number, slot_bytes = self._slabs.number(info.extent), self._slabs.slot_bytes(info.extent)
        # First, so that a kill in between leaves a slab that nobody names: `settle` deletes it.
        self._slabs.set(info.extent, 0, 0)
        try:
            self._owner.store.drop_extent(info.extent)
        except KvstoreError:
            self._slabs.set(info.extent, number, slot_bytes)
            raise
        self._mover.slab_answers.left(info.extent)
        if number:
            self._mover.index.drop_slab(number)
            file = SlabFile(number=number, slot_bytes=slot_bytes, nbytes=info.nbytes)
            self._doomed.append((info.extent, file))

    async def settle(self) -> None:
        """See Resizable."""
        if not self._strays_known:
            await self._find_strays()
        if self._doomed:  # the index names no slab that is missing: a strict recovery would not start
            await self._mover.index.catch_up()
        while self._doomed:
            self._unsynced = True
            await self._delete(*self._doomed[0])
            del self._doomed[0]
        if self._unsynced:
            directory = self._space.directory
            await asyncio.to_thread(sync_directory, directory.path, directory.disk)
            self._unsynced = False
        used = await self._space.measure()
        if used > self._space.capacity_bytes:
            raise ResourceExhausted(
                self._space.foreign_warning
                or f"{self._space.directory.path} takes {format_size(used)} of "
                f"{format_size(self._space.capacity_bytes)}: something in it is not the service's"
            )
        self._grow()

    async def _find_strays(self) -> None:
        """Slabs that no extent has: a daemon was killed before they were deleted."""
        known = {self._slabs.number(info.extent) for info in self._infos()}
        files = await asyncio.to_thread(self._space.directory.slabs)
        known |= {self._slabs.number(info.extent) for info in self._infos()}  # made meanwhile
        strays = [file for file in files if file.number not in known]
        for file in strays:
            _LOG.info("stray slab", path=self._space.directory.path, slab=file.number)
            self._mover.index.drop_slab(file.number)
        if strays:
            await self._mover.index.catch_up()
        for file in strays:
            self._unsynced = True
            await asyncio.to_thread(remove_slab, self._space.directory.path, file, self._space.directory.disk)
        self._strays_known = True

    def _infos(self) -> list[ExtentInfo]:
        return [info for info in self._owner.store.extents(Tier.NVME) if info.device == self.device]

    async def _delete(self, extent: int, file: SlabFile) -> None:
        """Returns when the slab's file is gone. Raises Unavailable where it has to be tried again, OSError."""
        directory = self._space.directory
        there = await asyncio.to_thread(directory.disk.exists, directory.path / file.name)
        if there and not self._mover.delete_slab(extent, file):
            # Nobody has it open.
            await asyncio.to_thread(remove_slab, directory.path, file, directory.disk)
        elif there:
            await asyncio.sleep(_GONE_S)
            raise Unavailable(f"slab {file.number} is being deleted")

    def _grow(self) -> None:
        """Adds extents while there is room for another slab."""
        store, size = self._owner.store, self._space.slab_bytes
        taken = sum(self.cost(info.nbytes) for info in self._infos())
        count = max(0, (self._space.slabs_bytes - taken) // self.cost(size))
        topic = f"extents-{self.device}"
        try:
            for _ in range(min(count, _EXTENTS_A_TURN)):
                extent = store.add_extent(
                    tier=Tier.NVME,
                    device=self.device,
                    nbytes=size,
                    slot_bytes=0,
                    extent=self._memory.free_extent(),
                )
                self._slabs.set(extent, 0, 0)
        except ResourceExhausted as error:
            self._owner.warnings[topic] = f"{self._space.directory.path} is not used in full: {error}"
            return
        self._owner.warnings.pop(topic, None)
        if count > _EXTENTS_A_TURN:
            raise Unavailable(f"{count - _EXTENTS_A_TURN} slabs are still to be added")
