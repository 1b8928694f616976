"""DRAM of the simulated machine, as the daemon's `Memory` gives it: extents that come and go with the tier's size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.daemon.owner import Owner
from kvstore.layout import Tier
from kvstore.moves import ExtentInfo
from tests.simulation.shape import SLOT_BYTES

if TYPE_CHECKING:
    from tests.simulation.machine import Machine

__all__ = ["SimMemory"]


class SimMemory:
    """Its size outlives the daemon, as the keeper holds it; its extents too."""

    def __init__(self, machine: Machine, owner: Owner) -> None:
        self._machine = machine
        self._owner = owner
        self._extent_bytes = machine.shape.dram_slots * SLOT_BYTES
        self._on_extent: Callable[[ExtentInfo, int], None] = lambda info, fd: None
        self._on_drop: Callable[[ExtentInfo], None] = lambda info: None

    def listen(
        self, on_extent: Callable[[ExtentInfo, int], None], on_drop: Callable[[ExtentInfo], None]
    ) -> None:
        """As Memory.listen, of one listener."""
        self._on_extent, self._on_drop = on_extent, on_drop

    def extents(self, tier: Tier) -> list[tuple[ExtentInfo, int]]:
        """Each with its descriptor: a place in `Machine.memories`."""
        return [(info, self._descriptor(int(info.extent))) for info in self._owner.store.extents(tier)]

    def _descriptor(self, extent: int) -> int:
        memory = self._machine.dram[extent]
        return next(fd for fd, other in enumerate(self._machine.memories) if other is memory)

    def free_extent(self) -> None:
        """Any: nobody maps memory by its number for longer than it is there."""
        return

    @property
    def dram_bytes(self) -> int:
        """The size of the tier."""
        return self._machine.dram_extents * self._extent_bytes

    def restore(self) -> None:
        """A life begins: a death between two writes left an extent without memory, or memory without an extent."""
        known = {int(info.extent) for info in self._owner.store.extents(Tier.DRAM)}
        for extent in known - set(self._machine.dram):
            self._owner.store.drop_extent(extent)
        for extent in set(self._machine.dram) - known:
            del self._machine.dram[extent]

    def add(self) -> None:
        """One extent more."""
        store = self._owner.store
        extent = int(store.add_extent(tier=Tier.DRAM, device=0, nbytes=self._extent_bytes))
        self._machine.dram[extent] = bytearray(self._extent_bytes)
        self._machine.memories.append(self._machine.dram[extent])
        for info, fd in self.extents(Tier.DRAM):
            if info.extent == extent:
                self._on_extent(info, fd)

    async def drop_dram(self, info: ExtentInfo) -> None:
        """As Memory.drop_dram."""
        self._owner.store.drop_extent(info.extent)
        self._machine.dram.pop(info.extent)
        self._on_drop(info)
        await asyncio.sleep(0)

    async def grow_forever(self) -> None:
        """As Memory.grow_forever."""
        while True:
            if len(self._owner.store.extents(Tier.DRAM)) < self._machine.dram_extents:
                self.add()
                self._owner.settle_soon()
            await asyncio.sleep(0.05)
