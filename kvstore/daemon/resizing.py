"""Another size for a tier while it is in use: what an administrator asks for, checked, noted and brought about.

An NVMe path's size is noted beside its slabs and holds over every restart, until the configuration says another one.
DRAM's is kept by the keeper and holds over restarts of the daemon; a new start of the service takes the configured one.
Either is a bound from the moment that a call is answered as complete. Owner loop only; the disk is touched in threads.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvstore.config import NvmePath
from kvstore.daemon.log import Log
from kvstore.daemon.machine import check_memory
from kvstore.daemon.memory import Memory
from kvstore.daemon.mover_path import MoverPath
from kvstore.daemon.movers import Movers
from kvstore.daemon.owner import Owner
from kvstore.daemon.resizer import Resizer
from kvstore.daemon.space import PathSpace
from kvstore.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from kvstore.layout import Tier
from kvstore.moves import ExtentInfo
from kvstore.tenant import check_reserves
from kvstore.units import format_size
from kvstore.wire.v1 import kvstore_pb2 as pb
from tiers.base import PAGE_BYTES
from tiers.nvme.capacity import check_room, default_map_bytes, plan
from tiers.nvme.index import index_file_bytes

__all__ = ["DramResizable", "Resizing"]

_LOG = Log("resize")
_ANSWER_S = 3.0
"""Below the deadline of a call."""
_INDEX_SHARE = 4
"""An index that is larger than a new, smaller capacity would give it keeps a quarter more than it has."""


class DramResizable:
    """The DRAM tier: what the resizer does to it."""

    tier = Tier.DRAM
    device = 0
    name = "dram"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def cost(self, nbytes: int) -> int:
        """See Resizable."""
        return nbytes

    def room(self) -> int:
        """See Resizable."""
        return self._memory.dram_bytes

    async def drop(self, info: ExtentInfo) -> None:
        """See Resizable."""
        await self._memory.drop_dram(info)

    async def settle(self) -> None:
        """See Resizable. What lacks is added by Memory.grow_forever."""


class Resizing:
    """What administrators ask for, and its tasks."""

    def __init__(self, owner: Owner, memory: Memory, movers: Movers) -> None:
        self._owner = owner
        self._memory = memory
        self._movers = movers
        self._asking = asyncio.Lock()
        self.dram = Resizer(owner, DramResizable(memory))

    async def resize_dram(self, nbytes: int) -> pb.ResizeReply:
        """Raises InvalidArgument, ConfigError, ResourceExhausted for a size that cannot be."""
        async with self._asking:
            size = self._memory.dram_extent_bytes
            if nbytes < size:
                raise InvalidArgument(
                    f"dram: {format_size(nbytes)} is less than one extent ({format_size(size)})"
                )
            target = nbytes // size * size
            if target != self._memory.dram_bytes:
                check_memory(replace(self._owner.config, dram_bytes=target))
                check_reserves(self._owner.config.tenants, "dram", target)
                self._check_tables(Tier.DRAM, target - self._memory.dram_bytes, size)
                _LOG.info("dram resized", before=self._memory.dram_bytes, now=target)
                self._memory.resize_dram(target)
                self.dram.changed()
        await self.dram.settled(_ANSWER_S)
        lacking = self._memory.dram_lacking_bytes
        lacks = f"{format_size(lacking)} are still to be taken" if lacking else ""
        return pb.ResizeReply(
            complete=self.dram.done and not lacking,
            capacity_bytes=self._memory.dram_bytes,
            used_bytes=sum(info.nbytes for info, _ in self._memory.extents(Tier.DRAM)),
            leaving_extents=self.dram.leaving,
            waits_for=self.dram.waits_for or lacks,
        )

    async def resize_path(self, name: str, nbytes: int) -> pb.ResizeReply:
        """Raises NotFound for a path that is not configured, and as `resize_dram`."""
        async with self._asking:
            mover, resizer = self._path(name)
            space = mover.space
            if nbytes != space.capacity_bytes:
                together = sum(path.capacity_bytes for path in self._movers.path_stats())
                check_reserves(self._owner.config.tenants, "nvme", together - space.capacity_bytes + nbytes)
                map_bytes = await self._check_path(space, nbytes)
                _LOG.info("path resized", path=name, before=space.capacity_bytes, now=nbytes)
                await space.take(nbytes, map_bytes)
                mover.size_changed()
                await mover.index.catch_up()  # the index has its new bound from here on
                resizer.changed()
            elif resizer.done:
                resizer.changed()  # looks whether it still holds
        await resizer.settled(_ANSWER_S)
        return pb.ResizeReply(
            complete=resizer.done,
            capacity_bytes=space.capacity_bytes,
            used_bytes=await space.measure(),
            leaving_extents=resizer.leaving,
            waits_for=resizer.waits_for,
        )

    def _path(self, name: str) -> tuple[MoverPath, Resizer]:
        names = [path.path for path in self._owner.config.nvme]
        if name not in names:
            there = ", ".join(names) or "none"
            raise NotFound(f"no NVMe path {name} is configured (there is: {there})")
        found = self._movers.path(names.index(name))
        if found is None:
            raise Unavailable(f"nvme path {name} is not open yet, or not to be had", retry_after_s=1.0)
        return found

    async def _check_path(self, space: PathSpace, nbytes: int) -> int:
        """Bytes of the index's map for a path of that size. Raises ConfigError, ResourceExhausted."""
        place = NvmePath(path=space.configured.path, capacity_bytes=nbytes)  # the least size
        index = await asyncio.to_thread(index_file_bytes, space.directory.path)
        map_bytes = default_map_bytes(nbytes)
        if index > map_bytes:
            map_bytes = -(-(index + index // _INDEX_SHARE) // PAGE_BYTES) * PAGE_BYTES
        wanted = plan(place.capacity_bytes, space.slab_bytes, map_bytes)
        if nbytes > space.capacity_bytes:
            await asyncio.to_thread(check_room, space.directory.path, wanted)
            self._check_tables(Tier.NVME, nbytes - space.capacity_bytes, space.slab_bytes)
        return map_bytes

    def _check_tables(self, tier: Tier, more_bytes: int, extent_bytes: int) -> None:
        """Raises ResourceExhausted where the shared tables, which were sized at the start, have no lines for it."""
        if more_bytes <= 0:
            return
        left, needed = self._owner.store.slots_for(tier, more_bytes, self._owner.config.min_slot_bytes)
        extents = self._memory.free_extents
        if needed > left or more_bytes // extent_bytes > extents:
            name = tier.name.lower()
            raise ResourceExhausted(
                f"{name}: the tables have {left} slots and {extents} extents left, and {format_size(more_bytes)} more "
                f"need {needed} and {more_bytes // extent_bytes}: configure the larger {name}, and start again"
            )
