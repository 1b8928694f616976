"""Memory that outlives the daemon: the extents' descriptors, growth of DRAM behind a ready daemon, orphaned HBM.

An extent is in the keeper before the store knows it, so a block can never be in memory that the next daemon would not
find. Extents enter one at a time under a lock: their number, which names the descriptor, is known beforehand. HBM of
a group of processes has one shard a process, each with a descriptor, and all of them enter and leave together.
Owner loop only; allocation runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.config import ServeConfig
from kvstore.daemon.identity import DISTRUSTED
from kvstore.daemon.kept import Kept
from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.daemon.session import Session
from kvstore.daemon.sizes import Sizes
from kvstore.errors import FailedPrecondition, InvalidArgument, KvstoreError, ResourceExhausted
from kvstore.faults import fault
from kvstore.layout import Columns, ExtentState, Tier
from kvstore.moves import ExtentId, ExtentInfo
from kvstore.units import format_size
from tiers.base import PAGE_BYTES, Sharing
from tiers.memfd import check_sealed, create_extent, give_back

__all__ = ["Memory", "Owned", "Released", "descriptor_name", "extent_plan"]

_LOG = Log("memory")
_MAX_DRAM_EXTENTS = 1024
_PAUSE_S = 0.002
_PAUSE_UNDER_LOAD_S = 0.1
_RETRY_S = 30.0
_DRAM_WARNING = "dram"
_RETIRED = 1
"""Identity of a line of the extents table whose DRAM was given back: a client that has not heard of it yet would take
memory that came under the same number for that which it still maps."""

ExtentListener = Callable[[ExtentInfo, int], None]
DropListener = Callable[[ExtentInfo], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What letting a device's orphans go freed, in bytes."""

    released_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """HBM of one device, in bytes."""

    total_bytes: int
    orphan_bytes: int  # of these, mapped by no session
    plain_bytes: int  # of these, gone with their process


def descriptor_name(tier: Tier, extent: int, shard: int = 0) -> str:
    """What the keeper calls an extent, or a later shard of it."""
    return f"{tier.name.lower()}-{extent}" + (f".{shard}" if shard else "")


def extent_plan(config: ServeConfig) -> tuple[int, int]:
    """(bytes of one DRAM extent, number of them). Extents grow with the tier, so that there are at most 1,024."""
    size = config.dram_extent_bytes
    while config.dram_bytes // size > _MAX_DRAM_EXTENTS:
        size *= 2
    return size, config.dram_bytes // size


class Memory:
    """Extents of DRAM and HBM, with their descriptors."""

    def __init__(self, owner: Owner, kept: Kept, columns: Columns, sizes: Sizes) -> None:
        self._owner = owner
        self._sizes = sizes
        self._kept = kept
        self._columns = columns
        self._fds: dict[ExtentId, tuple[int, ...]] = {}  # one a shard
        self._dram_extents = 0
        self._resized = asyncio.Event()
        self._lock = asyncio.Lock()
        self._orphan_since_s: dict[ExtentId, float] = {}
        self._on_extent: list[ExtentListener] = []
        self._on_drop: list[DropListener] = []

    def listen(self, on_extent: ExtentListener, on_drop: DropListener) -> None:
        """Has somebody told of every extent that comes, with its descriptor, or goes."""
        self._on_extent.append(on_extent)
        self._on_drop.append(on_drop)

    def adopt(self, info: ExtentInfo, fds: Sequence[int]) -> None:
        """An extent that the keeper had, already in the tables; nobody is told. `fds`: of its shards, in order."""
        self._fds[info.extent] = tuple(fds)
        self._dram_extents += info.tier is Tier.DRAM

    def extents(self, tier: Tier) -> list[tuple[ExtentInfo, int]]:
        """Extents of a tier with their descriptors (of a sharded one, its first shard's), by slot position."""
        infos = [info for info in self._owner.store.extents(tier) if info.extent in self._fds]
        return [(info, self._fds[info.extent][0]) for info in sorted(infos, key=lambda info: info.slot_base)]

    def shards(self, extent: ExtentId) -> tuple[int, ...]:
        """Descriptors of the shards of an extent, one where it is whole."""
        return self._fds[extent]

    # ------------------------------------------------------------ arriving

    async def _enter(
        self,
        *,
        tier: Tier,
        device: int,
        nbytes: int,
        slot_bytes: int,
        fds: Sequence[int],
        identity: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> ExtentInfo:
        """Keeper first, then the store, then everybody who maps it. `fds` become ours, also on failure.

        `check` raises where it may not enter; nothing else enters between it and this extent.
        """
        try:
            async with self._lock:
                check()
                free = self.free_extent()
                names = [descriptor_name(tier, free, shard) for shard in range(len(fds))]
                await self._kept.add(dict(zip(names, fds, strict=True)))
                fault("extent.stored")
                try:
                    extent = self._owner.store.add_extent(
                        tier=tier,
                        device=device,
                        nbytes=nbytes,
                        slot_bytes=slot_bytes,
                        extent=free,
                        identity=identity,
                    )
                except KvstoreError:
                    self._kept.remove(names)
                    raise
        except BaseException:
            _close_all(fds)
            raise
        self._fds[extent] = tuple(fds)
        self._dram_extents += tier is Tier.DRAM
        info = next(info for info in self._owner.store.extents(tier) if info.extent == extent)
        for listener in self._on_extent:
            listener(info, fds[0])
        self._owner.settle_soon()
        return info

    async def add_dram(self, nbytes: int) -> None:
        """One more DRAM extent. Raises ResourceExhausted where memory is short."""
        fd = await asyncio.to_thread(create_extent, "kvstore-dram", nbytes)
        await self._enter(
            tier=Tier.DRAM,
            device=0,
            nbytes=nbytes,
            slot_bytes=0,
            fds=[fd],
            check=lambda: self._check_dram(nbytes),
        )

    def _check_dram(self, nbytes: int) -> None:
        if self._dram_extents and nbytes > self.dram_lacking_bytes:
            raise ResourceExhausted("dram: the tier was made smaller meanwhile")

    # ------------------------------------------------------------ the size of DRAM

    @property
    def dram_extent_bytes(self) -> int:
        """One extent of DRAM."""
        return extent_plan(self._owner.config)[0]

    @property
    def dram_bytes(self) -> int:
        """The size of the DRAM tier: the configuration's, or what it was resized to since the service was started."""
        size, count = extent_plan(self._owner.config)
        return self._sizes.dram_bytes or size * count

    @property
    def dram_lacking_bytes(self) -> int:
        """What the tier has not got yet of its size."""
        return max(0, self.dram_bytes - self._dram_extents * self.dram_extent_bytes)

    def resize_dram(self, nbytes: int) -> None:
        """From now on the tier has this size, in whole extents; what lacks is added. Less: the caller drops extents."""
        self._sizes.dram_bytes = nbytes
        self._resized.set()

    async def drop_dram(self, info: ExtentInfo) -> None:
        """Gives the memory of an empty extent back. Raises FailedPrecondition while a mover is at work in it."""
        self._owner.store.disown_extent(info.extent, _RETIRED)
        self._owner.store.drop_extent(info.extent)
        (fd,) = self._fds.pop(info.extent)
        self._dram_extents -= 1
        self._kept.remove([descriptor_name(Tier.DRAM, info.extent)])
        for listener in self._on_drop:
            listener(info)
        try:
            await asyncio.to_thread(give_back, fd, info.nbytes)  # also where a stopped process maps it still
        finally:
            os.close(fd)

    @property
    def free_extents(self) -> int:
        """Lines of the extents table that may be used."""
        return len(self._usable())

    def free_extent(self) -> int:
        """The first of them. Raises ResourceExhausted."""
        usable = self._usable()
        if not len(usable):
            raise ResourceExhausted(f"all {len(self._columns.extent_state)} extents are in use")
        return int(usable[0])

    def _usable(self) -> NDArray[np.intp]:
        """Without those under whose number a session may still map other memory."""
        columns = self._columns
        usable = columns.extent_state == ExtentState.FREE
        if self._owner.sessions:
            usable &= ~((columns.extent_tier == Tier.DRAM) & (columns.extent_identity == _RETIRED))
        return np.flatnonzero(usable)

    async def add_hbm(
        self, session: Session, *, slots: int, nbytes: int, sharing: Sharing, fds: Sequence[int]
    ) -> ExtentInfo:
        """An HBM extent that a worker made, or the processes of a group: then with one descriptor for each shard.

        `nbytes` is its size, all shards together. `fds` become ours, also on failure.

        Raises ResourceExhausted where the device's pages of that size, which all its workers share, would become more
        than the giver's own budget: so two workers that start at once make one pool and not two.
        """
        try:
            if session.device is None:
                raise InvalidArgument("this session owns no HBM")
            if nbytes != slots * session.slot_bytes or not slots:
                raise InvalidArgument(f"{nbytes} bytes are not {slots} slots of {session.slot_bytes}")
            for fd in fds:
                _check_descriptor(fd, nbytes // len(fds), sharing)
        except BaseException:
            _close_all(fds)
            raise
        info = await self._enter(
            tier=Tier.HBM,
            device=session.device,
            nbytes=nbytes,
            slot_bytes=session.slot_bytes,
            fds=fds,
            identity=session.identity,
            check=lambda: self._check_hbm(session, nbytes, sharing, fds),
        )
        if sharing is Sharing.NONE and (topic := f"plain {info.device}") not in self._owner.warnings:
            text = f"HBM of device {info.device} cannot be exported: its blocks go with their worker"
            self._owner.warnings[topic] = text
            _LOG.warning("plain hbm", device=info.device, session=session.id)
        return info

    def _check_hbm(self, session: Session, nbytes: int, sharing: Sharing, fds: Sequence[int]) -> None:
        device = session.device
        infos = [info for info, _ in self.extents(Tier.HBM) if info.device == device]
        shared = sum(info.nbytes for info in infos if info.slot_bytes == session.slot_bytes)
        if shared + nbytes > session.hbm_bytes:
            raise ResourceExhausted(
                f"device {device} has {format_size(shared)} of the {format_size(session.hbm_bytes)} "
                "that this session may have"
            )
        used = sum(_on_one_device(info.nbytes, self._fds[info.extent]) for info in infos)
        most = self._owner.config.hbm_bytes
        if used + _on_one_device(nbytes, fds) > most:
            raise ResourceExhausted(f"device {device} has {format_size(used)} of at most {format_size(most)}")
        if sharing is Sharing.NONE and len(self._mapping(session.device, session.slot_bytes)) > 1:
            raise FailedPrecondition("another session would need this memory, which its driver cannot export")

    async def grow_forever(self) -> None:
        """Adds DRAM extents while the tier has not its size; slowly under load, again later where memory is short."""
        size = self.dram_extent_bytes
        while True:
            self._resized.clear()
            if self.dram_lacking_bytes < size:
                self._owner.warnings.pop(_DRAM_WARNING, None)
                _LOG.info("dram complete", extents=self._dram_extents, size=format_size(self.dram_bytes))
                await self._resized.wait()
                continue
            before = self._owner.counters.values()["messages_total"]
            try:
                await self.add_dram(size)
            except (OSError, KvstoreError) as error:
                have = self._dram_extents * size
                text = f"DRAM tier has {format_size(have)} of {format_size(self.dram_bytes)}: {error}"
                if self._owner.warnings.get(_DRAM_WARNING) != text:
                    _LOG.warning("dram extent failed", error=error)
                self._owner.warnings[_DRAM_WARNING] = text
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._resized.wait(), _RETRY_S)
                continue
            self._owner.warnings.pop(_DRAM_WARNING, None)
            loaded = self._owner.counters.values()["messages_total"] > before
            await asyncio.sleep(_PAUSE_UNDER_LOAD_S if loaded else _PAUSE_S)

    # ------------------------------------------------------------ leaving

    def make_room(self, device: int, slot_bytes: int, hbm_bytes: int, identity: int) -> None:
        """Before a new worker takes HBM: orphans that it must not have go, and those beyond its budget.

        Not its own are those of another slot class or device, distrusted ones, and what went with its process. Raises
        FailedPrecondition where the number is another device's now, ResourceExhausted where a live session has memory
        of this class that cannot be shared.
        """
        for session in self._owner.sessions.values():
            if session.device == device and session.identity != identity:
                raise FailedPrecondition(
                    f"device {device} is another one for session {session.name!r}: give this one another index"
                )
        budget, useless = hbm_bytes, list[ExtentInfo]()
        for info, _ in self.extents(Tier.HBM):
            if info.device != device:
                continue
            plain, same_class = self._is_plain(info), info.slot_bytes == slot_bytes
            if not self._orphaned(info):
                if plain and same_class:
                    raise ResourceExhausted(
                        f"device {device} is taken: its driver cannot export memory, so one session has all of it",
                        retry_after_s=1.0,
                    )
            elif not same_class or plain or info.identity != identity or info.nbytes > budget:
                useless.append(info)
            else:
                budget -= info.nbytes
        self._drop(useless)

    def sweep(self) -> None:
        """Drops HBM that no live session has mapped for the configured time; at once where it is of no use any more."""
        now_s = asyncio.get_running_loop().time()
        orphans = {info.extent: info for info, _ in self.extents(Tier.HBM) if self._orphaned(info)}
        self._orphan_since_s = {extent: self._orphan_since_s.get(extent, now_s) for extent in orphans}
        ttl_s = self._owner.config.orphan_ttl_s
        self._drop(
            [
                info
                for extent, info in orphans.items()
                if now_s - self._orphan_since_s[extent] >= ttl_s
                or info.identity == DISTRUSTED
                or self._is_plain(info)
            ]
        )

    def release(self, device: int) -> Released:
        """Drops a device's HBM that no live session maps, now."""
        here = [info for info, _ in self.extents(Tier.HBM) if info.device == device]
        orphans = [info for info in here if self._orphaned(info)]
        self._drop(orphans)
        released = sum(info.nbytes for info in orphans)
        return Released(released_bytes=released, kept_bytes=sum(info.nbytes for info in here) - released)

    def _drop(self, infos: Sequence[ExtentInfo]) -> None:
        """Takes HBM extents out of the store, then lets their memory go; one line in the log for each device."""
        for info in infos:
            self._drop_one(info)
        for device in sorted({info.device for info in infos}):
            sizes = [info.nbytes for info in infos if info.device == device]
            _LOG.info("hbm dropped", device=device, extents=len(sizes), size=format_size(sum(sizes)))

    def _drop_one(self, info: ExtentInfo) -> None:
        self._owner.store.drop_extent(info.extent)
        fds = self._fds.pop(info.extent)
        self._kept.remove([descriptor_name(info.tier, info.extent, shard) for shard in range(len(fds))])
        _close_all(fds)
        self._owner.warnings.pop(f"plain {info.device}", None)
        self._owner.counters.add("orphan_bytes_dropped_total", info.nbytes)
        for listener in self._on_drop:
            listener(info)
        self._owner.settle_soon()

    def distrust(self, extent: int, session: Session) -> ExtentInfo:
        """A worker found that what earlier ones left in an extent is not what it was: its blocks end.

        Raises InvalidArgument for an extent that is not the session's, FailedPrecondition where a slot of it is held.
        """
        info = next((info for info, _ in self.extents(Tier.HBM) if info.extent == extent), None)
        if info is None or (info.device, info.slot_bytes) != (session.device, session.slot_bytes):
            raise InvalidArgument(f"this session maps no HBM extent {extent}")
        forgotten = self._owner.store.forget_blocks(info.extent)
        self._note_distrust(info.device, forgotten, "a sample of it differs from its DRAM copies")
        return info

    def distrust_devices(self, concerned: Callable[[int], bool], reason: str) -> None:
        """A GPU has had a fault: what is on it now is for no later session. Orphans go at once.

        `concerned` says of a device's number whether it is, or may be, that GPU. Twins are not.
        """
        orphans: list[ExtentInfo] = []
        for info, fd in self.extents(Tier.HBM):
            host = stat.S_ISREG(os.fstat(fd).st_mode) and not self._is_plain(info)
            if host or info.identity == DISTRUSTED or not concerned(info.device):
                continue
            self._owner.store.disown_extent(info.extent, DISTRUSTED)
            self._note_distrust(info.device, info.slots - info.free_slots, reason)
            if self._orphaned(info):
                orphans.append(info)
        self._drop(orphans)

    def _note_distrust(self, device: int, blocks: int, reason: str) -> None:
        self._owner.counters.add("hbm_distrusted_total", blocks)
        self._owner.warnings[f"distrust {device}"] = f"HBM of device {device} is not believed: {reason}"
        _LOG.warning("hbm distrusted", device=device, blocks=blocks, reason=reason)
        self._owner.settle_soon()

    def owned_bytes(self) -> dict[int, Owned]:
        """HBM of each device that has some; of a group of processes on GPUs, that of the first one's device."""
        found: dict[int, Owned] = {}
        for info, _ in self.extents(Tier.HBM):
            had = found.get(info.device, Owned(total_bytes=0, orphan_bytes=0, plain_bytes=0))
            nbytes = _on_one_device(info.nbytes, self._fds[info.extent])
            found[info.device] = Owned(
                total_bytes=had.total_bytes + nbytes,
                orphan_bytes=had.orphan_bytes + nbytes * self._orphaned(info),
                plain_bytes=had.plain_bytes + nbytes * self._is_plain(info),
            )
        return found

    def _is_plain(self, info: ExtentInfo) -> bool:
        """Whether an extent's descriptor only stands for memory that goes with its process."""
        fds = self._fds[info.extent]
        status = os.fstat(fds[0])
        return stat.S_ISREG(status.st_mode) and status.st_size < info.nbytes // len(fds)

    def _orphaned(self, info: ExtentInfo) -> bool:
        """Whether no session, in whatever state, can have it mapped."""
        return not self._mapping(info.device, info.slot_bytes)

    def _mapping(self, device: int | None, slot_bytes: int) -> list[Session]:
        """Sessions that map the HBM of a class."""
        return [
            session
            for session in self._owner.sessions.values()
            if session.device == device and session.slot_bytes == slot_bytes
        ]


def _check_descriptor(fd: int, nbytes: int, sharing: Sharing) -> None:
    """Raises InvalidArgument where a worker's descriptor is not what it says."""
    status = os.fstat(fd)
    if sharing is Sharing.NONE:
        if not stat.S_ISREG(status.st_mode) or status.st_size >= nbytes:
            raise InvalidArgument("plain HBM comes with a memfd that is shorter than the extent")
        check_sealed(fd, PAGE_BYTES)
    elif stat.S_ISREG(status.st_mode):  # a memfd; a CUDA allocation's descriptor is none
        check_sealed(fd, nbytes)


def _on_one_device(nbytes: int, fds: Sequence[int]) -> int:
    """Of an extent, what lies on the device whose number it has.

    Each shard of GPU memory is on a device of its own; twins of all of them are in the memory of one host.
    """
    status = os.fstat(fds[0])
    in_host = stat.S_ISREG(status.st_mode) and status.st_size >= nbytes // len(
        fds
    )  # else it stands for GPU memory
    return nbytes if in_host else nbytes // len(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
