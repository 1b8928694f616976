"""Group commits of one path's durable index: gathers what changed, writes it in a thread, tries again what failed.

Owner loop only, with the exception of the commit itself. The index may be behind the store and is never out of order;
being behind costs misses after a restart and nothing else, because every trailer is checked when its slot is read.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvstore.daemon.log import Log
from kvstore.daemon.nvme import IndexBatch, OpenPath, SlabTable, commit, index_batch
from kvstore.daemon.owner import Owner
from kvstore.errors import KvstoreError, Unavailable
from kvstore.layout import Columns
from tiers.nvme.index_place import IndexPlace

__all__ = ["IndexWriter"]

_LOG = Log("index")
_INTERVAL_S = 0.02
_BATCH_SLOTS = 4096  # a millisecond of the loop


class IndexWriter:
    """The commits of one path."""

    def __init__(
        self, *, number: int, owner: Owner, columns: Columns, slabs: SlabTable, opened: OpenPath
    ) -> None:
        self._number = number
        self._owner = owner
        self._columns = columns
        self._slabs = slabs
        self._opened = opened
        self._dropped_slabs: list[int] = []
        self._asked: set[int] = set()
        """Slabs that somebody waits to delete."""
        self._behind = False
        """Whether the last commit failed."""
        self._map_bytes = 0  # to be resized to; 0: not
        self._bound_bytes = opened.plan.map_bytes
        self._complete = False
        """Whether the index has been told that it has all there was when it was opened, or made anew."""
        self._place: IndexPlace | None = None
        self._due = True  # a kill may have come before the last commit
        self._task: asyncio.Task[None] | None = None

    def drop_slab(self, number: int) -> None:
        """The slab is deleted: nothing in it is to be found again."""
        self._dropped_slabs.append(number)
        self._due = True

    def has_forgotten(self, number: int) -> bool:
        """Whether the slab may be deleted: the index names nothing in it. If not, the next commit sees to it.

        A kill between the two would leave an index that names a slab which is missing, which a strict recovery refuses.
        True as well while commits fail, since then blocks are not kept waiting for one.
        """
        if number not in self._asked:
            self._asked.add(number)
            self.drop_slab(number)
        if number in self._dropped_slabs and not self._behind:
            return False
        self._asked.discard(number)
        return True

    def resize(self, map_bytes: int) -> None:
        """Before the next commit the index is given another bound, which is not below what its file takes."""
        self._map_bytes = self._bound_bytes = map_bytes
        self._due = True

    def due(self) -> None:
        """Something may have changed: the next `start` looks."""
        self._due = True

    def start(self) -> asyncio.Task[None] | None:
        """The commit under way, or a new one where one is due; None where there is nothing to commit."""
        if self._task is not None and not self._task.done():
            return self._task
        self._task = None
        if self._due:
            self._task = asyncio.get_running_loop().create_task(self._commit())
            self._task.add_done_callback(lambda _: self._owner.settle_soon())
        return self._task

    async def catch_up(self) -> None:
        """Returns when the index says what the store says now. Raises KvstoreError where it cannot."""
        self._due = True
        while (task := self.start()) is not None:
            await asyncio.shield(task)
        if self._behind:
            raise KvstoreError(f"the index of {self._opened.directory.path} is behind")
        await asyncio.to_thread(self._require_file)

    async def flush(self) -> None:
        """Forces what was committed to the medium. Raises KvstoreError."""
        await asyncio.to_thread(self._opened.index.flush)

    async def close(self) -> None:
        """Ends after the commit under way."""
        if self._task is not None:
            await asyncio.shield(self._task)
        await asyncio.to_thread(self._opened.close)

    async def abandon(self) -> None:
        """As `close`, for a start that failed."""
        if self._task is not None:
            await asyncio.shield(self._task)
        await asyncio.to_thread(self._opened.abandon)

    async def _commit(self) -> None:
        """One round, then a pause so that more can gather. What fails is tried again with what changed meanwhile."""
        topic = f"index-{self._number}"
        try:
            self._due = False
            if await asyncio.to_thread(self._renew):
                self._complete = False
                self._owner.counters.add("nvme_indexes_lost_total")
                _LOG.warning("index was deleted and is made anew", folder=self._opened.directory.path)
                self._owner.store.index_changes.all_changed(self._number)
            changes = self._owner.store.index_changes.take(self._number, _BATCH_SLOTS)
            batch = index_batch(changes, self._dropped_slabs, self._columns, self._slabs)
            self._due = len(batch.slots) >= _BATCH_SLOTS
            if self._map_bytes:
                await asyncio.to_thread(self._opened.index.resize, self._map_bytes)
                self._map_bytes = 0
            if batch:
                written_bytes = await asyncio.to_thread(self._write, batch)
                self._owner.store.index_changes.committed(batch.slots)
                del self._dropped_slabs[: len(batch.dropped_slabs)]
                self._owner.counters.add("nvme_commits_total")
                self._owner.store.budget(self._number).spend(self._owner.now_ms(), written_bytes)
            if not self._complete and len(batch.slots) < _BATCH_SLOTS:  # all that had changed
                await asyncio.to_thread(self._opened.index.complete)
                self._complete = True
            self._behind = False
            self._owner.warnings.pop(topic, None)
        except Unavailable:  # the folder is gone, which is said of its writes
            self._missed()
        except KvstoreError as error:
            self._missed()
            if self._owner.warnings.get(topic) != str(error):
                _LOG.warning("commit failed", path=self._number, error=error)
            self._owner.warnings[topic] = str(error)
        except Exception:  # noqa: BLE001 (a task's boundary: an index that is behind costs misses after a restart)
            self._missed()
            self._owner.counters.add("internal_errors_total")
            _LOG.fault("commit failed", path=self._number)
        await asyncio.sleep(_INTERVAL_S)

    # A thread's, one at a time, what follows up to `_missed`.

    def _renew(self) -> bool:
        """Another index in the place of one that somebody has deleted; whether there was one. Raises KvstoreError."""
        if self._place is None:
            self._place = IndexPlace(self._opened.directory.path)
        if self._place.stands():
            return False
        self._opened.index.close()
        durability = self._owner.config.durability
        index = self._place.renew(map_bytes=self._bound_bytes, durability=durability)
        self._opened = replace(self._opened, index=index)
        return True

    def _write(self, batch: IndexBatch) -> int:
        written_bytes = commit(self._opened, batch)
        self._require_file()  # after it: what was written into a file that is deleted does not count
        return written_bytes

    def _require_file(self) -> None:
        if self._place is not None and not self._place.stands():
            raise KvstoreError(f"{self._place.file} was deleted")

    def _missed(self) -> None:
        """What was taken is taken again when something is due next, as it is then."""
        self._behind, self._due = True, False
        self._owner.store.index_changes.put_back(self._number)
