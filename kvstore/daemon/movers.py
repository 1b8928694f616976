"""All NVMe paths: opens them behind a ready daemon, feeds them, flushes them.

A path is used only when its old mover (of a daemon that died) has certainly ended: its pidfd has fired and the
directory's lock is free. Until then, and while its disk cannot be read, it is out of service with a warning. What a
path holds is read from disk only where the tables are new. Owner loop only; the disk is touched in threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

from kvstore.config import NvmePath
from kvstore.daemon.kept import Kept
from kvstore.daemon.load_path import load_path
from kvstore.daemon.log import Log
from kvstore.daemon.memory import Memory
from kvstore.daemon.mover_path import MoverPath, StartLink
from kvstore.daemon.nvme import FoundPath, OpenPath, OpensPath, SlabTable, open_path, slabs_to_keep
from kvstore.daemon.owner import Owner
from kvstore.daemon.path_resizable import PathResizable
from kvstore.daemon.recovery import Tables
from kvstore.daemon.resizer import Resizer
from kvstore.daemon.space import PathSpace, resized
from kvstore.daemon.write_down import Flushed, WriteDown
from kvstore.errors import AlreadyExists, ConfigError, KvstoreError, ResourceExhausted
from kvstore.layout import Tier
from kvstore.mover.link import MoverLink
from kvstore.moves import ExtentInfo
from kvstore.recorder import Event
from kvstore.wire.v1 import kvstore_pb2 as pb
from tiers.nvme.capacity import slab_file_bytes
from tiers.nvme.cleared import block_key, note_cleared
from tiers.nvme.recover import Found
from tiers.nvme.slab import SlabFile

__all__ = ["Movers", "PathStart"]

_LOG = Log("movers")
_RETRY_S = 0.05
_WARN_AFTER_S = 5.0
_BUSY_AT_START_S = (
    2.5  # an old mover ends its I/O in less; below the time that a fresh start waits for its paths
)
_OPEN_RETRY_S = 30.0
_CLEAR_PATIENCE_S = 2.0  # for a path that is just coming into service


class PathStart:
    """How far the start of one path is."""

    def __init__(self) -> None:
        self.ours = False
        """Whether it is locked and can be used."""
        self.large = False
        """Whether finding what it holds takes longer than a start should wait."""
        self.counted = False
        """Whether what it holds is counted, and a strict recovery has nothing to say against it."""
        self.loaded = asyncio.Event()
        """Set when all that it holds is known."""


class Movers:
    """The NVMe tier's processes."""

    def __init__(
        self,
        *,
        owner: Owner,
        kept: Kept,
        memory: Memory,
        tables: Tables,
        secret: bytes,
        inherited: Mapping[str, int],
        open_path: OpensPath = open_path,
        start_link: StartLink = MoverLink.start,
    ) -> None:
        self._owner = owner
        self._kept = kept
        self._memory = memory
        self._tables = tables
        self._secret = secret
        self._open_path = open_path
        self._start_link = start_link
        self._old = {name: fd for name, fd in inherited.items() if name.startswith("mover-")}
        self._found: dict[int, FoundPath] = {}
        """Paths that are ours, whether or not in service yet."""
        self._paths: dict[int, MoverPath] = {}
        self._resizers: dict[int, Resizer] = {}
        self._cleared: dict[bytes, int] = {}
        """What was cleared in this life, for paths that come into service later."""
        self._noting = asyncio.Lock()
        self._telling: asyncio.Task[None] | None = None
        self.slabs = SlabTable(tables.columns, {} if tables.fresh else inherited)
        self.serving = False
        """Whether the daemon is ready: from then on a path that cannot be used is a warning, never the end."""
        owner.on_settle(self.pump)
        owner.on_settle(self._note_wrong)
        memory.listen(self._extent_added, self._extent_dropped)

    async def run_path(self, number: int, path: NvmePath, start: PathStart) -> None:
        """Brings one path into service and keeps it there."""
        await self._old_mover_ended(number)
        self._owner.store.mover_dead(number, self._owner.now_ms())
        sized, opened = path, None
        while opened is None:
            self._drop_unfinished(number)
            sized = await asyncio.to_thread(resized, path)
            opened = await self._bring_in(number, sized, start)
        start.loaded.set()
        _LOG.info("path open", path=path.path, slabs=opened.plan.slabs)
        self._owner.recorder.note(Event.PATH_OPEN, number, a=opened.plan.slabs)
        space = PathSpace(
            number=number,
            owner=self._owner,
            configured=path,
            capacity_bytes=sized.capacity_bytes,
            directory=opened.directory,
            plan=opened.plan,
        )
        space.foreign_found(self._found[number].foreign)
        await space.restore_budget()
        mover = MoverPath(
            number=number,
            owner=self._owner,
            kept=self._kept,
            memory=self._memory,
            columns=self._tables.columns,
            slabs=self.slabs,
            opened=opened,
            space=space,
            start_link=self._start_link,
        )
        resizable = PathResizable(owner=self._owner, memory=self._memory, mover=mover, slabs=self.slabs)
        self._paths[number], self._resizers[number] = mover, Resizer(self._owner, resizable)
        space.on_crowd = lambda: self._crowded(number)
        self._resizers[number].changed()  # an earlier daemon may have been killed before the size held
        await asyncio.gather(mover.run_forever(), self._resizers[number].run_forever())

    def _crowded(self, number: int) -> None:
        """Files of others came into a path's folder, or went."""
        self._paths[number].size_changed()
        self._resizers[number].changed()

    def _drop_unfinished(self, number: int) -> None:
        """Extents of a path that was not brought in to the end, by us or by a daemon that was killed then."""
        if not self.slabs.entered(number):
            for info in self._owner.store.extents(Tier.NVME):
                if info.device == number:
                    self._owner.store.drop_extent(info.extent)

    async def _bring_in(self, number: int, path: NvmePath, start: PathStart) -> OpenPath | None:
        """Opens a path and takes over what it holds; None, after a wait, where that failed."""
        place, found = await self._open(number, path, start)
        self._found[number] = place
        try:
            await self._note_earlier(place)
            removed = await self._enter(number, place, found)
            opened = await asyncio.to_thread(place.open, removed)
        except (KvstoreError, OSError) as error:
            del self._found[number]
            await asyncio.to_thread(place.abandon)
            self._owner.warnings[f"open-{path.path}"] = str(error)
            _LOG.warning("path not open", path=path.path, error=error)
            await asyncio.sleep(_OPEN_RETRY_S)
            return None
        finally:
            if found is not None:
                await asyncio.to_thread(found.close)
        if opened.renewed:
            self._owner.store.index_changes.all_changed(number)
        self.slabs.note_entered(number)
        self._owner.warnings.pop(f"open-{path.path}", None)
        return opened

    async def _old_mover_ended(self, number: int) -> None:
        """The mover of a daemon before: until it has ended, its disk and its DRAM slots are its own."""
        name = f"mover-{number}"
        pidfd = self._old.pop(name, None)
        if pidfd is None:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), _WARN_AFTER_S)
            except TimeoutError:
                self._owner.warnings[name] = (
                    f"nvme path {number} waits for the mover of an earlier daemon to end"
                )
        loop.remove_reader(pidfd)
        self._owner.warnings.pop(name, None)
        self._kept.remove([name])
        os.close(pidfd)

    async def _open(self, number: int, path: NvmePath, start: PathStart) -> tuple[FoundPath, Found | None]:
        topic = f"open-{path.path}"
        began_s = asyncio.get_running_loop().time()
        while True:
            try:
                place = await asyncio.to_thread(
                    self._open_path,
                    path,
                    self._owner.config,
                    self._secret,
                    read_index=not self.slabs.entered(number),
                )
                start.ours, start.large = True, place.large
                found = await self._find(place)
                start.counted = True
            except (KvstoreError, OSError) as error:
                waited_s = asyncio.get_running_loop().time() - began_s
                starting = self._tables.fresh and not self.serving
                patience_s = _BUSY_AT_START_S if starting else _WARN_AFTER_S
                busy = isinstance(error, AlreadyExists) and waited_s < patience_s
                if starting and not busy and isinstance(error, ConfigError | AlreadyExists):
                    raise  # nothing is lost yet: better no start than a service without its disk
                if not busy and self._owner.warnings.get(topic) != str(error):
                    _LOG.warning("path not open", path=path.path, error=error)
                    self._owner.warnings[topic] = str(error)
                delay_s = _RETRY_S if isinstance(error, AlreadyExists) else _OPEN_RETRY_S
                await asyncio.sleep(delay_s)
                continue
            self._owner.warnings.pop(topic, None)
            return place, found

    async def _find(self, place: FoundPath) -> Found | None:
        """What the path holds. Raises KvstoreError, having let go of the path."""
        if place.find is None:
            return None
        try:
            return await asyncio.to_thread(place.find)
        except BaseException:
            place.abandon()
            raise

    # ------------------------------------------------------------ extents and what is in them

    async def _enter(self, number: int, place: FoundPath, found: Found | None) -> list[SlabFile]:
        """Makes the path's slabs extents of the store, and its blocks rows, where the tables do not have them.

        Returns slabs that are to be removed. Raises KvstoreError, with nothing of it done.
        """
        if self.slabs.entered(number):
            return []
        store, slabs = self._owner.store, list(place.slabs)
        if found is not None:
            slabs = slabs_to_keep(place.directory.path, slabs, found.blocks, place.plan)
            if slabs:
                await load_path(
                    number=number,
                    path=place,
                    found=found,
                    slabs=slabs,
                    owner=self._owner,
                    table=self.slabs,
                    cleared=self._cleared,
                )
        # Nothing is awaited between the load and this: blocks would be evicted for want of slots that are here.
        room = place.plan.slabs_bytes - place.crowded_bytes
        room -= sum(slab_file_bytes(slab.nbytes) for slab in slabs)
        try:
            for _ in range(room // slab_file_bytes(place.plan.slab_bytes)):
                store.add_extent(tier=Tier.NVME, device=number, nbytes=place.plan.slab_bytes, slot_bytes=0)
        except ResourceExhausted as error:
            self._owner.warnings[f"extents-{number}"] = f"{place.directory.path} is not used in full: {error}"
        self._owner.settle_soon()
        if found is not None:
            await asyncio.to_thread(found.close)
        kept = {slab.number for slab in slabs}
        return [slab for slab in place.slabs if slab.number not in kept]

    def _extent_dropped(self, info: ExtentInfo) -> None:
        if info.tier is Tier.DRAM:
            for path in self._paths.values():
                path.extent_dropped(info.extent)

    def _extent_added(self, info: ExtentInfo, fd: int) -> None:
        if info.tier is Tier.DRAM:
            for path in self._paths.values():
                path.extent_added(info.extent, info.nbytes, fd)

    def path(self, number: int) -> tuple[MoverPath, Resizer] | None:
        """A path by its place in the configuration; None while it is not open."""
        mover = self._paths.get(number)
        return None if mover is None else (mover, self._resizers[number])

    # ------------------------------------------------------------ work

    def pump(self) -> None:
        """Gives every mover its reads, and writes to whichever disk would be through with them first."""
        paths = list(self._paths.values())
        if len(paths) == 1:
            paths[0].pump(paths[0].outstanding.write_room)
            return
        for path in paths:
            path.pump()
        while paths:
            now_s = time.monotonic()
            path = min(paths, key=lambda path: path.outstanding.load.order(now_s))
            ahead = path.outstanding
            if not path.pump(min(ahead.stripe, ahead.write_room)):
                paths.remove(
                    path
                )  # full, or out of service; or nothing waits, which the others find out as soon

    def commit_soon(self) -> None:
        """To be called now and then: what left the tier without a move is forgotten on disk too."""
        for path in self._paths.values():
            path.index.due()
            path.index.start()
            path.space.measure_soon()

    async def note_cleared(self, digest: bytes, now_ms: int) -> None:
        """Has every disk remember that a namespace (or EVERY_NAMESPACE) was cleared.

        Raises KvstoreError where one cannot: then blocks may come back from it if its index is lost. One that is not in
        service is told when it is, by this daemon; a later one would not know.
        """
        self._cleared[digest] = now_ms
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CLEAR_PATIENCE_S
        noted: set[int] = set()
        while True:
            async with self._noting:
                for number, found in tuple(self._found.items()):
                    if number not in noted:
                        await self._note(found, {digest: now_ms})
                        noted.add(number)
            away = [path.path for at, path in enumerate(self._owner.config.nvme) if at not in self._found]
            if not away:
                return
            if loop.time() >= until_s:
                raise KvstoreError(
                    f"cleared, but {away[0]} is not in service: blocks may come back if the service ends before it is"
                )
            await asyncio.sleep(_RETRY_S)

    def _note_wrong(self) -> None:
        """Blocks were taken back because they are wrong: their trailers say otherwise, where an index is lost."""
        taken = self._owner.store.watching.take_taken_back()
        if taken:
            now_ms = self._owner.now_ms()
            news = {block_key(block): now_ms for block in taken}
            self._cleared.update(news)
            self._telling = asyncio.get_running_loop().create_task(self._tell_all(news))

    async def _tell_all(self, news: Mapping[bytes, int]) -> None:
        for found in tuple(self._found.values()):
            async with self._noting:
                try:
                    await self._note(found, news)
                except KvstoreError as error:
                    _LOG.warning("wrong blocks not noted", error=error)

    async def _note_earlier(self, found: FoundPath) -> None:
        """A path that has just been opened learns what was cleared before; returns with nothing left to tell."""
        told: dict[bytes, int] = {}
        while self._cleared != told:
            told = dict(self._cleared)
            async with self._noting:
                try:
                    await self._note(found, told)
                except KvstoreError as error:
                    _LOG.warning("clear not noted", error=error)

    async def _note(self, opened: FoundPath, news: Mapping[bytes, int]) -> None:
        folder = opened.directory.path
        try:
            await asyncio.to_thread(note_cleared, folder, news, opened.directory.disk)
        except OSError as error:
            raise KvstoreError(
                f"cleared, but {folder} cannot note it, so blocks may come back: {error.strerror}"
            ) from error

    async def flush(self, deadline_s: float) -> Flushed:
        """See WriteDown.flush."""
        return await self._write_down().flush(deadline_s)

    async def drain(self, deadline_s: float) -> Flushed:
        """See WriteDown.drain."""
        return await self._write_down().drain(deadline_s)

    def _write_down(self) -> WriteDown:
        return WriteDown(owner=self._owner, paths=self._paths, failed=self._failed)

    def _failed(self) -> int:
        """Blocks that a disk did not take, or give."""
        return self.counters()["nvme_failed_blocks_total"]

    @property
    def capacity_bytes(self) -> int:
        """Of all paths, as configured or resized."""
        configured = enumerate(self._owner.config.nvme)
        return sum(
            mover.space.capacity_bytes
            if (mover := self._paths.get(number)) is not None
            else path.capacity_bytes
            for number, path in configured
        )

    def path_stats(self) -> list[pb.PathStats]:
        """Each configured path, for Stats."""
        now_ms = self._owner.now_ms()
        found = []
        for number, configured in enumerate(self._owner.config.nvme):
            stats = pb.PathStats(path=configured.path, capacity_bytes=configured.capacity_bytes)
            health = self._owner.store.health(number)
            stats.reads_paused, stats.writes_paused = health.reads.paused, health.writes.paused
            budget = self._owner.store.budget(number)
            stats.accepted_bytes, stats.written_bytes = budget.accepted_bytes, budget.spent_bytes
            if budget.day_bytes:
                stats.write_budget_bytes = budget.day_bytes
                stats.write_budget_left_bytes = budget.left_bytes(now_ms)
            mover = self._paths.get(number)
            if mover is not None:
                stats.capacity_bytes, stats.disk_bytes = mover.space.capacity_bytes, mover.space.disk_bytes
                stats.in_service, stats.hangs = mover.in_service, mover.hangs
                stats.leaving_extents = self._resizers[number].leaving
            found.append(stats)
        return found

    def serves(self, folder: str) -> bool | None:
        """Whether a path does all that is asked of it; None where none has this folder."""
        for number, configured in enumerate(self._owner.config.nvme):
            if configured.path == folder:
                mover, health = self._paths.get(number), self._owner.store.health(number)
                well = not (health.reads.paused or health.writes.paused)
                return well and mover is not None and mover.in_service and not mover.hangs
        return None

    def counters(self) -> Mapping[str, int]:
        """What the movers counted, over all paths."""
        totals = dict.fromkeys(_COUNTED, 0)
        for path in self._paths.values():
            if path.counts is not None:
                for name in _COUNTED:
                    totals[name] += getattr(path.counts, name)
        return {f"nvme_{name}_total": value for name, value in totals.items()}

    async def abandon(self, deadline_s: float) -> None:
        """A start has failed: directories that were new are left as they were found."""
        leaving = [asyncio.ensure_future(path.abandon()) for path in self._paths.values()]
        found = [place for number, place in self._found.items() if number not in self._paths]
        leaving += [asyncio.ensure_future(asyncio.to_thread(place.abandon)) for place in found]
        if leaving:
            await asyncio.wait(leaving, timeout=deadline_s)

    async def close(self, deadline_s: float) -> None:
        """The daemon ends on purpose: movers finish, indexes are closed."""
        closing = [asyncio.ensure_future(path.close()) for path in self._paths.values()]
        if closing:
            await asyncio.wait(closing, timeout=deadline_s)


_COUNTED = (
    "read_blocks",
    "read_bytes",
    "written_blocks",
    "written_bytes",
    "corrupt_blocks",
    "failed_blocks",
    "syncs",
)
