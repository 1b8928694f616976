"""Memory that outlives the daemon: the extents' descriptors, growth of DRAM behind a ready daemon, orphaned HBM.

An extent is in the keeper before the store knows it, so a block can never be in memory that the next daemon would not
find. Extents enter one at a time under a lock: their number, which names the descriptor, is known beforehand.
Owner loop only; allocation runs in a thread.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.config import ServeConfig
from kvstore.daemon.kept import Kept
from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.errors import InvalidArgument, KvstoreError, ResourceExhausted
from kvstore.faults import fault
from kvstore.layout import Columns, ExtentState, Tier
from kvstore.moves import ExtentId, ExtentInfo
from kvstore.units import format_size
from tiers.memfd import check_sealed, create_memfd

__all__ = ["Memory", "Released", "descriptor_name", "extent_plan"]

_LOG = Log("memory")
_MAX_DRAM_EXTENTS = 1024
_PAUSE_S = 0.002
_PAUSE_UNDER_LOAD_S = 0.1
_RETRY_S = 30.0
_DRAM_WARNING = "dram"

ExtentListener = Callable[[ExtentInfo, int], None]
DropListener = Callable[[ExtentInfo], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What letting a device's orphans go freed, in bytes."""

    released_bytes: int
    kept_bytes: int


def descriptor_name(tier: Tier, extent: int) -> str:
    """What the keeper calls an extent."""
    return f"{tier.name.lower()}-{extent}"


def extent_plan(config: ServeConfig) -> tuple[int, int]:
    """(bytes of one DRAM extent, number of them). Extents grow with the tier, so that there are at most 1,024."""
    size = config.dram_extent_bytes
    while config.dram_bytes // size > _MAX_DRAM_EXTENTS:
        size *= 2
    return size, config.dram_bytes // size


class Memory:
    """Extents of DRAM and HBM, with their descriptors."""

    def __init__(self, owner: Owner, kept: Kept, columns: Columns) -> None:
        self._owner = owner
        self._kept = kept
        self._columns = columns
        self._fds: dict[ExtentId, int] = {}
        self._dram_extents = 0
        self._lock = asyncio.Lock()
        self._orphan_since_s: dict[ExtentId, float] = {}
        self._on_extent: list[ExtentListener] = []
        self._on_drop: list[DropListener] = []

    def listen(self, on_extent: ExtentListener, on_drop: DropListener) -> None:
        """Has somebody told of every extent that comes, with its descriptor, or goes."""
        self._on_extent.append(on_extent)
        self._on_drop.append(on_drop)

    def adopt(self, info: ExtentInfo, fd: int) -> None:
        """An extent that the keeper had, already in the tables; nobody is told."""
        self._fds[info.extent] = fd
        self._dram_extents += info.tier is Tier.DRAM

    def extents(self, tier: Tier) -> list[tuple[ExtentInfo, int]]:
        """Extents of a tier with their descriptors, by slot position."""
        infos = [info for info in self._owner.store.extents(tier) if info.extent in self._fds]
        return [(info, self._fds[info.extent]) for info in sorted(infos, key=lambda info: info.slot_base)]

    # ------------------------------------------------------------ arriving

    async def _enter(self, *, tier: Tier, device: int, nbytes: int, slot_bytes: int, fd: int) -> ExtentInfo:
        """Keeper first, then the store, then everybody who maps it. `fd` becomes ours, also on failure."""
        try:
            async with self._lock:
                free = np.flatnonzero(self._columns.extent_state == ExtentState.FREE)
                if not len(free):
                    raise ResourceExhausted(f"all {len(self._columns.extent_state)} extents are in use")
                name = descriptor_name(tier, int(free[0]))
                await self._kept.add({name: fd})
                fault("extent.stored")
                try:
                    extent = self._owner.store.add_extent(
                        tier=tier, device=device, nbytes=nbytes, slot_bytes=slot_bytes, extent=int(free[0])
                    )
                except KvstoreError:
                    self._kept.remove([name])
                    raise
        except BaseException:
            os.close(fd)
            raise
        self._fds[extent] = fd
        self._dram_extents += tier is Tier.DRAM
        info = next(info for info in self._owner.store.extents(tier) if info.extent == extent)
        for listener in self._on_extent:
            listener(info, fd)
        self._owner.settle_soon()
        return info

    async def add_dram(self, nbytes: int) -> None:
        """One more DRAM extent. Raises ResourceExhausted where memory is short."""
        fd = await asyncio.to_thread(create_memfd, "kvstore-dram", nbytes)
        await self._enter(tier=Tier.DRAM, device=0, nbytes=nbytes, slot_bytes=0, fd=fd)

    async def add_hbm(self, *, device: int, slot_bytes: int, slots: int, nbytes: int, fd: int) -> ExtentInfo:
        """An HBM extent that a worker made. `fd` becomes ours, also on failure."""
        try:
            if nbytes != slots * slot_bytes or not slots:
                raise InvalidArgument(f"{nbytes} bytes are not {slots} slots of {slot_bytes}")
            if stat.S_ISREG(os.fstat(fd).st_mode):  # a memfd; a CUDA allocation's descriptor is none
                check_sealed(fd, nbytes)
            used = sum(info.nbytes for info, _ in self.extents(Tier.HBM) if info.device == device)
            if used + nbytes > self._owner.config.hbm_bytes:
                raise ResourceExhausted(
                    f"device {device} has {format_size(used)} of at most {format_size(self._owner.config.hbm_bytes)}"
                )
        except BaseException:
            os.close(fd)
            raise
        return await self._enter(tier=Tier.HBM, device=device, nbytes=nbytes, slot_bytes=slot_bytes, fd=fd)

    async def grow_forever(self) -> None:
        """Adds DRAM extents until the tier has its size; slowly under load, again later where memory is short."""
        size, count = extent_plan(self._owner.config)
        while self._dram_extents < count:
            before = self._owner.counters.values()["messages_total"]
            try:
                await self.add_dram(size)
            except (OSError, KvstoreError) as error:
                have = self._dram_extents * size
                text = f"DRAM tier has {format_size(have)} of {format_size(count * size)}: {error}"
                if self._owner.warnings.get(_DRAM_WARNING) != text:
                    _LOG.warning("dram extent failed", error=error)
                self._owner.warnings[_DRAM_WARNING] = text
                await asyncio.sleep(_RETRY_S)
                continue
            self._owner.warnings.pop(_DRAM_WARNING, None)
            loaded = self._owner.counters.values()["messages_total"] > before
            await asyncio.sleep(_PAUSE_UNDER_LOAD_S if loaded else _PAUSE_S)
        _LOG.info("dram complete", extents=count, size=format_size(count * size))

    # ------------------------------------------------------------ leaving

    def make_room(self, device: int, slot_bytes: int, hbm_bytes: int) -> None:
        """Before a new worker takes HBM: orphans of another slot class go, and those beyond its budget."""
        orphans = [
            info for info, _ in self.extents(Tier.HBM) if info.device == device and self._orphaned(info)
        ]
        budget = hbm_bytes
        for info in orphans:
            if info.slot_bytes != slot_bytes or info.nbytes > budget:
                self.drop(info)
            else:
                budget -= info.nbytes

    def sweep(self) -> None:
        """Drops HBM that no live session has mapped for the configured time."""
        now_s = asyncio.get_running_loop().time()
        hbm = [info for info, _ in self.extents(Tier.HBM)]
        orphans = {info.extent: info for info in hbm if self._orphaned(info)}
        self._orphan_since_s = {extent: self._orphan_since_s.get(extent, now_s) for extent in orphans}
        for extent, info in orphans.items():
            if now_s - self._orphan_since_s[extent] >= self._owner.config.orphan_ttl_s:
                self.drop(info)

    def release(self, device: int) -> Released:
        """Drops a device's HBM that no live session maps, now."""
        released = kept = 0
        for info, _ in self.extents(Tier.HBM):
            if info.device == device:
                if self._orphaned(info):
                    self.drop(info)
                    released += info.nbytes
                else:
                    kept += info.nbytes
        return Released(released_bytes=released, kept_bytes=kept)

    def drop(self, info: ExtentInfo) -> None:
        """Takes one HBM extent out of the store, then lets its memory go."""
        self._owner.store.drop_extent(info.extent)
        self._kept.remove([descriptor_name(info.tier, info.extent)])
        os.close(self._fds.pop(info.extent))
        self._owner.counters.add("orphan_bytes_dropped_total", info.nbytes)
        _LOG.info("hbm extent dropped", device=info.device, extent=info.extent, size=format_size(info.nbytes))
        for listener in self._on_drop:
            listener(info)
        self._owner.settle_soon()

    def _orphaned(self, info: ExtentInfo) -> bool:
        """Whether no session, in whatever state, can have it mapped."""
        return not any(
            session.device == info.device and session.slot_bytes == info.slot_bytes
            for session in self._owner.sessions.values()
        )
