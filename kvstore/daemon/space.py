"""The room of one NVMe path: its size, what it takes on its disk, and what it may write today.

The size is the configuration's, or what `kvstore resize` made of it while the configuration said the same as now; that
is noted beside the slabs. The write budget is noted there ahead of what is spent, so that a kill never gives it back.
Owner loop only; the disk is touched in threads, one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.config import NvmePath
from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.errors import Corruption, KvstoreError
from kvstore.tiering.admission import WriteBudget
from kvstore.units import format_size
from tiers.nvme.capacity import (
    SMALL_FILES_BYTES,
    SlabPlan,
    crowded_bytes,
    disk_usage,
    index_bytes,
    slab_room,
)
from tiers.nvme.directory import NvmeDirectory
from tiers.nvme.disk import SYSTEM_DISK, Disk
from tiers.nvme.notes import (
    BudgetNote,
    SizeNote,
    read_budget,
    read_size,
    remove_size,
    write_budget,
    write_size,
)

__all__ = ["PathSpace", "resized"]

_LOG = Log("space")
_MEASURE_S = 5.0
_MOST_NAMES = 3


def resized(path: NvmePath, disk: Disk = SYSTEM_DISK) -> NvmePath:
    """The path with the size that it was given at run time, where the configuration says what it said then.

    Blocks on the disk: call it in a thread.
    """
    folder = Path(path.path)
    try:
        note = read_size(folder, disk)
        if note is None or note.resized_bytes == path.capacity_bytes:
            return path
        if note.configured_bytes == path.capacity_bytes:
            return replace(path, capacity_bytes=note.resized_bytes)
        remove_size(folder, disk)  # whoever changed the configuration since means it
        _LOG.info("configured size counts again", path=path.path, size=format_size(path.capacity_bytes))
    except (KvstoreError, OSError) as error:
        _LOG.warning("size of a resize not read: the configured one counts", path=path.path, error=error)
    return path


class PathSpace:
    """One path's."""

    def __init__(
        self,
        *,
        number: int,
        owner: Owner,
        configured: NvmePath,
        capacity_bytes: int,
        directory: NvmeDirectory,
        plan: SlabPlan,
    ) -> None:
        """`plan` divides `capacity_bytes`, the size that the path has now."""
        self.configured = configured
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.map_bytes = plan.map_bytes
        self.slab_bytes = plan.slab_bytes
        """Of a new slab."""
        self.room_bytes = plan.slabs_bytes
        """The most that all slabs may take, as `tiers.nvme.capacity` counts, with nobody else's files there."""
        self._crowded_bytes = 0
        self.disk_bytes = 0
        """What the folder took when it was measured last; 0: not yet."""
        self.on_crowd: Callable[[], None] = lambda: None
        """Is told that `slabs_bytes` is another one because files of others came or went."""
        self._number = number
        self._owner = owner
        self._measured_s = -_MEASURE_S
        self._measuring: asyncio.Task[None] | None = None
        self._promising: asyncio.Task[None] | None = None

    @property
    def budget(self) -> WriteBudget:
        """What may be written."""
        return self._owner.store.budget(self._number)

    @property
    def slabs_bytes(self) -> int:
        """The most that slabs may take where another is made: files of others count, and cost no slab that is there."""
        return max(1, self.room_bytes - self._crowded_bytes)  # 0 would be no bound

    @property
    def foreign_warning(self) -> str:
        """What is said of others' files in the folder; empty where they cost no slab."""
        return self._owner.warnings.get(f"foreign-{self._number}", "")

    def foreign_found(self, foreign: Sequence[tuple[str, int]]) -> bool:
        """Files of others lie in the folder: warns where they cost slabs. Whether `slabs_bytes` is another one now."""
        planned = self.room_bytes + index_bytes(self.map_bytes) + SMALL_FILES_BYTES
        before, self._crowded_bytes = (
            self._crowded_bytes,
            crowded_bytes(foreign, self.capacity_bytes, planned),
        )
        topic = f"foreign-{self._number}"
        if not self._crowded_bytes:
            self._owner.warnings.pop(topic, None)
        elif self._crowded_bytes != before:
            names = ", ".join(name for name, _ in foreign[:_MOST_NAMES]) + ", …" * (
                len(foreign) > _MOST_NAMES
            )
            nbytes = format_size(sum(nbytes for _, nbytes in foreign))
            self._owner.warnings[topic] = (
                f"nvme path {self.directory.path}: {nbytes} in it are not the service's ({names}) and count against "
                f"its {format_size(self.capacity_bytes)}: no slab is made in their place; move them out"
            )
            if not before:
                _LOG.warning("files of others", path=self.directory.path, bytes=nbytes, names=names)
        return self._crowded_bytes != before

    # ------------------------------------------------------------ the write budget

    async def restore_budget(self) -> None:
        """What earlier lives have written counts. To be called before the first move."""
        if not self.budget.day_bytes:
            return
        now_ms = self._owner.now_ms()
        try:
            note = await asyncio.to_thread(read_budget, self.directory.path, self.directory.disk)
        except Corruption as error:
            _LOG.warning("write budget not read: it counts as spent", path=self.directory.path, error=error)
            note = BudgetNote(debt_bytes=self.budget.depth_bytes, at_ms=now_ms)
        if note is None:
            note = BudgetNote(debt_bytes=0, at_ms=now_ms)
        self.budget.restore(note.debt_bytes, note.at_ms, now_ms)
        self.promise_soon()

    def promise_soon(self) -> None:
        """Keeps the note on disk ahead of what is spent; cheap where it is."""
        if self._promising is not None and not self._promising.done():
            return
        now_ms = self._owner.now_ms()
        debt_bytes = self.budget.to_promise(now_ms)
        if debt_bytes is not None:
            note = BudgetNote(debt_bytes=debt_bytes, at_ms=now_ms)
            self._promising = asyncio.get_running_loop().create_task(self._promise(note))

    async def _promise(self, note: BudgetNote) -> None:
        topic = f"budget-{self._number}"
        try:
            await asyncio.to_thread(write_budget, self.directory.path, note, self.directory.disk)
        except OSError as error:
            text = f"nvme path {self.directory.path}: its write budget cannot be noted: {error.strerror}"
            if self._owner.warnings.get(topic) != text:
                _LOG.warning("write budget not noted", path=self.directory.path, error=error)
            self._owner.warnings[topic] = text
            return
        self._owner.warnings.pop(topic, None)
        self.budget.promised(note.debt_bytes, note.at_ms)
        self._owner.settle_soon()

    async def close(self) -> None:
        """Notes what was spent, and no more."""
        if self._promising is not None:
            await asyncio.shield(self._promising)
        if not self.budget.day_bytes:
            return
        now_ms = self._owner.now_ms()
        note = BudgetNote(debt_bytes=self.budget.debt_bytes(now_ms), at_ms=now_ms)
        try:
            await asyncio.to_thread(write_budget, self.directory.path, note, self.directory.disk)
        except OSError as error:
            _LOG.warning("write budget not noted", path=self.directory.path, error=error)

    # ------------------------------------------------------------ what it takes

    def measure_soon(self) -> None:
        """Measures the folder now and then; to be called every second or so."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._measured_s >= _MEASURE_S and (self._measuring is None or self._measuring.done()):
            self._measured_s = now_s
            self._measuring = asyncio.get_running_loop().create_task(self._measure())

    async def _measure(self) -> None:
        try:
            await self.measure()
        except OSError as error:
            _LOG.debug("folder not measured", path=self.directory.path, error=error)

    async def measure(self) -> int:
        """Bytes that the folder takes on its disk. Raises OSError."""
        usage = await asyncio.to_thread(disk_usage, self.directory.path)
        self.disk_bytes = usage.total_bytes
        if self.foreign_found(usage.foreign):
            self.on_crowd()
        return self.disk_bytes

    # ------------------------------------------------------------ its size

    async def take(self, capacity_bytes: int, map_bytes: int) -> None:
        """From now on, and in later lives, the path has this size. Raises OSError, then nothing changed."""
        configured = self.configured.capacity_bytes
        folder, disk = self.directory.path, self.directory.disk
        if capacity_bytes == configured:
            await asyncio.to_thread(remove_size, folder, disk)
        else:
            note = SizeNote(configured_bytes=configured, resized_bytes=capacity_bytes)
            await asyncio.to_thread(write_size, folder, note, disk)
        self.capacity_bytes, self.map_bytes = capacity_bytes, map_bytes
        self.room_bytes = slab_room(capacity_bytes, map_bytes)
