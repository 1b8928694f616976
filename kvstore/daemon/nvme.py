"""One NVMe path as the daemon sees it: its locked directory, its slabs and their numbers, its durable index.

`open_path` and `commit` block on the disk and are called in a thread; the rest is bookkeeping on the owner loop. An
extent of the store and a slab of the directory are the same memory under two names: the extent's number lives as long
as the tables, the slab's number for ever. Which slab an extent is, is kept in a memfd of its own (`SlabTable`), so a
restarted daemon knows.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.config import MAX_NVME_PATHS, Durability, NvmePath, Recovery, ServeConfig
from kvstore.daemon.log import Log
from kvstore.errors import ConfigError, Corruption
from kvstore.faults import fault
from kvstore.layout import Columns, Tier
from kvstore.moves import U32, NvmeChanges
from tiers.memfd import create_memfd
from tiers.nvme.capacity import (
    SlabPlan,
    check_room,
    crowded_bytes,
    default_map_bytes,
    disk_usage,
    plan,
    slab_file_bytes,
)
from tiers.nvme.directory import NvmeDirectory, keep_secret, read_secret
from tiers.nvme.index import (
    RECORD,
    SLOT_REF,
    BlockIndex,
    DurableIndex,
    NoIndex,
    index_file_bytes,
    remove_index,
)
from tiers.nvme.recover import Found, FoundBlocks, recover
from tiers.nvme.slab import SlabFile, remove_slabs

__all__ = [
    "FoundPath",
    "IndexBatch",
    "OpenPath",
    "OpensPath",
    "SlabTable",
    "commit",
    "index_batch",
    "open_path",
    "secret_on_disk",
    "slab_bytes",
    "slabs_to_keep",
]

_LOG = Log("nvme")
_RECOVER_TIMEOUT_S = 600.0
_MAX_SLABS = 2048
_THREAD_IO = Path("/proc/thread-self/io")
_LARGE_INDEX_BYTES = 32 << 20  # half a million blocks, which are entered in half a second


class SlabTable:
    """Slab number and slot size of each extent of the NVMe tier, in shared memory that the keeper holds."""

    NAME = "slabs"

    def __init__(self, columns: Columns, inherited: Mapping[str, int]) -> None:
        count = columns.shape.max_extents
        size = -(-8 * (2 * count + MAX_NVME_PATHS) // 4096) * 4096
        self.fd = inherited[self.NAME] if self.NAME in inherited else create_memfd("kvstore-slabs", size)
        table = np.frombuffer(mmap.mmap(self.fd, size), dtype="<u8")
        self._numbers, self._slot_bytes = table[:count], table[count : 2 * count]
        self._entered = table[2 * count : 2 * count + MAX_NVME_PATHS]

    def set(self, extent: int, number: int, slot_bytes: int) -> None:
        """From now on the extent is this slab; number 0: it has none."""
        self._slot_bytes[extent] = slot_bytes
        self._numbers[extent] = number

    def number(self, extent: int) -> int:
        """The extent's slab; 0: it has none."""
        return int(self._numbers[extent])

    def slot_bytes(self, extent: int) -> int:
        """The slot size that the slab was made for."""
        return int(self._slot_bytes[extent])

    def numbers(self, extents: NDArray[np.uint16]) -> NDArray[np.uint64]:
        """[n] slab of each extent."""
        return self._numbers[extents]

    @property
    def newest(self) -> int:
        """The largest number of any extent's slab, whether its file has been made yet or not; 0: there is none."""
        return int(self._numbers.max(initial=0))

    def entered(self, path: int) -> bool:
        """Whether the tables have all of a path's slabs and their blocks: a start was not killed before that."""
        return bool(self._entered[path])

    def note_entered(self, path: int) -> None:
        """From now on they have."""
        self._entered[path] = 1

    def clear(self) -> None:
        """No extent has a slab."""
        self._numbers[:] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPath:
    """A path that is open and ours."""

    directory: NvmeDirectory
    index: BlockIndex
    plan: SlabPlan
    renewed: bool
    """Whether the index is empty because it was lost, or made anew: it has to learn of all blocks there are."""

    def close(self) -> None:
        """Closes files and lets go of the lock."""
        self.index.close()
        self.directory.close()

    def abandon(self) -> None:
        """Closes them after a start that failed: a directory that was new is left as it was found."""
        self.index.close()
        self.directory.abandon()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPath:
    """A path that is ours, with what lies there; its index is not open for writing yet."""

    directory: NvmeDirectory
    plan: SlabPlan
    slabs: tuple[SlabFile, ...]
    find: Callable[[], Found] | None
    """Finds the blocks in the slabs, and blocks on the disk; None where the tables know them already, or the path is
    empty. Raises ConfigError for what a strict recovery refuses, KvstoreError."""
    open_index: Callable[[], BlockIndex]
    """Blocks on the disk; only once what was found is closed."""
    large: bool = False
    """Whether finding them takes longer than a start should wait."""
    foreign: tuple[tuple[str, int], ...] = ()
    """(name, bytes) of what in it is not the service's."""
    crowded_bytes: int = 0
    """What slabs lack because of it."""

    def open(self, removed: Sequence[SlabFile]) -> OpenPath:
        """Opens the index, which forgets these slabs, and then deletes them: a strict recovery would not start where
        the index names one that is missing. Blocks. Raises KvstoreError, OSError."""
        index = self.open_index()
        try:
            for slab in removed:
                index.drop_slab(slab.number)
            remove_slabs(self.directory.path, removed, self.directory.disk)
        except BaseException:
            index.close()
            raise
        return OpenPath(directory=self.directory, index=index, plan=self.plan, renewed=index.empty)

    def abandon(self) -> None:
        """Lets go of it: a directory that was new is left as it was found."""
        self.directory.abandon()


class OpensPath(Protocol):
    """`open_path`, or what opens a path on another disk."""

    def __call__(self, path: NvmePath, config: ServeConfig, secret: bytes, *, read_index: bool) -> FoundPath:
        """See open_path."""
        ...


def slab_bytes(path: NvmePath, config: ServeConfig) -> int:
    """Size of a path's slabs: as configured, or more, so that a path has at most 2,048."""
    size = config.nvme_extent_bytes
    while path.capacity_bytes // size > _MAX_SLABS:
        size *= 2
    return size


def open_path(path: NvmePath, config: ServeConfig, secret: bytes, *, read_index: bool) -> FoundPath:
    """Locks and checks a path; with `read_index` it can tell what it holds. Blocks: call it in a thread.

    Raises AlreadyExists while another process has it, ConfigError where it cannot be used, KvstoreError otherwise.
    """
    wanted = plan(path.capacity_bytes, slab_bytes(path, config), default_map_bytes(path.capacity_bytes))
    folder = Path(path.path)
    directory = NvmeDirectory.open(path.path)
    with contextlib.ExitStack() as undo:
        undo.callback(directory.abandon)
        check_room(folder, wanted)
        keep_secret(folder, secret)
        slabs, foreign = directory.slabs(), disk_usage(folder).foreign
        empty = config.recovery is Recovery.NONE or config.durability is Durability.NONE
        if read_index and slabs and config.recovery is not Recovery.NONE:
            _refuse_to_empty(folder, slabs, config)
        if read_index and empty:
            slabs = _emptied(directory, slabs)
        elif (
            not read_index and index_file_bytes(folder) > wanted.map_bytes
        ):  # of a larger capacity, and LMDB gives nothing back
            remove_index(folder)  # what the tables know is entered into the next
        undo.pop_all()
    return FoundPath(
        directory=directory,
        plan=wanted,
        slabs=tuple(slabs),
        find=(lambda: _find(folder, slabs, wanted, config)) if read_index and not empty else None,
        large=index_file_bytes(folder) > _LARGE_INDEX_BYTES,
        foreign=foreign,
        crowded_bytes=crowded_bytes(foreign, path.capacity_bytes, wanted.total_bytes),
        open_index=lambda: _open_index(folder, wanted.map_bytes, config),
    )


def _refuse_to_empty(folder: Path, slabs: Sequence[SlabFile], config: ServeConfig) -> None:
    """Raises ConfigError where `none` would delete the slabs of another durability: only they have an index."""
    if config.durability is Durability.NONE and index_file_bytes(folder):
        raise ConfigError(
            f"nvme: {folder} has slabs ({len(slabs)}) that were to outlive a service, which --durability none deletes: "
            "give --recovery none as well, or another folder, or start with the durability they were made with"
        )


def _emptied(directory: NvmeDirectory, slabs: Sequence[SlabFile]) -> list[SlabFile]:
    """The path begins empty."""
    if slabs:
        _LOG.warning("slabs deleted: nothing here is to be believed", path=directory.path, slabs=len(slabs))
    remove_index(directory.path)
    remove_slabs(directory.path, slabs, directory.disk)
    return []


def _find(folder: Path, slabs: Sequence[SlabFile], wanted: SlabPlan, config: ServeConfig) -> Found:
    """What the slabs hold. Raises ConfigError for what a strict recovery refuses."""
    strict = config.recovery is Recovery.STRICT
    scan = not (
        strict and slabs
    )  # where there is no slab, there is nothing that an index could be missing for
    found = recover(folder, map_bytes=wanted.map_bytes, timeout_s=_RECOVER_TIMEOUT_S, scan=scan)
    blocks = found.blocks
    if strict and blocks.strays:
        found.close()
        raise ConfigError(
            f"nvme: the index of {folder} names {blocks.strays} blocks in slabs that are missing or too short; "
            f"recovery is strict: put them back, run `kvstore fsck --repair {folder}`, or start with --recovery quiet"
        )
    if blocks.rebuilt and slabs:
        _LOG.warning("index rebuilt from trailers", path=folder, why=blocks.rebuilt)
    if blocks.strays or blocks.damaged:
        _LOG.warning("blocks not found again", path=folder, missing=blocks.strays, damaged=blocks.damaged)
    return found


def _open_index(folder: Path, map_bytes: int, config: ServeConfig) -> BlockIndex:
    if config.durability is Durability.NONE:
        remove_index(folder)
        return NoIndex()
    if index_file_bytes(folder):
        try:
            return DurableIndex(folder, map_bytes=map_bytes, durability=config.durability)
        except Corruption as error:
            _LOG.warning("index damaged, rebuilding", path=folder, error=error)
    return DurableIndex.anew(folder, map_bytes=map_bytes, durability=config.durability)


def slabs_to_keep(
    folder: Path, slabs: Sequence[SlabFile], found: FoundBlocks, wanted: SlabPlan
) -> list[SlabFile]:
    """All but slabs without a block and those that exceed the capacity, by number; `FoundPath.open` deletes these.

    As where a path becomes smaller while it is in use (`kvstore.victims.leaving`), those used longest ago go.
    """
    kept: list[SlabFile] = []
    room, removed, blocks = wanted.slabs_bytes, 0, 0
    for slab in sorted(slabs, key=lambda slab: (-found.last_uses.get(slab.number, 0), slab.number)):
        used = found.used.get(slab.number, 0)
        if used and slab_file_bytes(slab.nbytes) <= room:
            kept.append(slab)
            room -= slab_file_bytes(slab.nbytes)
            continue
        if used:
            removed, blocks = removed + 1, blocks + used
    if removed:
        _LOG.warning("slabs removed: the capacity is smaller now", path=folder, slabs=removed, blocks=blocks)
    return sorted(kept, key=lambda slab: slab.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBatch:
    """What one group commit enters into the durable index."""

    slots: U32
    """Of the store, of which this is what changed."""
    dropped_slabs: tuple[int, ...]
    freed: NDArray[np.void]  # SLOT_REF[]
    published: NDArray[np.void]  # RECORD[]

    def __bool__(self) -> bool:
        return bool(self.dropped_slabs) or len(self.slots) > 0


def index_batch(
    changes: NvmeChanges, dropped_slabs: Sequence[int], columns: Columns, slabs: SlabTable
) -> IndexBatch:
    """Changes for the durable index: slots of the store under their slabs' numbers. O(n)."""
    published = np.zeros(len(changes.published), dtype=RECORD)
    for name in ("generation", "depth", "touch", "hash", "parent", "ns_digest"):
        published[name] = changes.published[name]
    _place(published, changes.published["slot"], columns, slabs)
    extents = columns.pools[Tier.NVME].extent[changes.published["slot"]]
    published["length"] = columns.extent_slot_bytes[extents]
    freed = np.zeros(len(changes.freed), dtype=SLOT_REF)
    _place(freed, changes.freed, columns, slabs)
    return IndexBatch(
        slots=np.concatenate((changes.published["slot"], changes.freed)),
        dropped_slabs=tuple(dropped_slabs),
        freed=freed[freed["slab"] != 0],
        published=published[published["slab"] != 0],
    )


def _place(records: NDArray[np.void], slots: NDArray[np.uint32], columns: Columns, slabs: SlabTable) -> None:
    """Where slots lie on disk; slab 0 for those whose extent is not cut any more: their slab is dropped whole."""
    extents = columns.pools[Tier.NVME].extent[slots]
    at = slots.astype(np.int64) - columns.extent_slot_base[extents]
    inside = (at >= 0) & (at < columns.extent_slots[extents])
    records["slab"] = np.where(inside, slabs.numbers(extents), 0)
    records["slot"] = np.where(inside, at, 0)


def commit(opened: OpenPath, batch: IndexBatch) -> int:
    """One group commit; blocks on the disk. Bytes that the index wrote for it, 0 where the kernel does not count them.

    Raises KvstoreError, with nothing of a transaction done.
    """
    before = _written_bytes()
    fault("commit.lmdb")
    for number in batch.dropped_slabs:
        opened.index.drop_slab(number)
    if len(batch.published) or len(batch.freed):
        opened.index.commit(batch.published, batch.freed)
    fault("commit.done")
    return _written_bytes() - before


def _written_bytes() -> int:
    """Bytes that this thread has given to the kernel to write."""
    try:
        counts = _THREAD_IO.read_text(encoding="ascii")
    except OSError:  # a kernel without task accounting, or a /proc that is not ours to read
        return 0
    return int(counts.split("wchar:")[1].split()[0])


def secret_on_disk(config: ServeConfig) -> bytes | None:
    """The tenant's secret that the first path which has one keeps; None without paths or before the first start.

    Raises ConfigError where one is damaged, or lost while there are blocks that only it can find again.
    """
    folders = [Path(path.path) for path in config.nvme]
    found = [secret for folder in folders if (secret := read_secret(folder)) is not None]
    if found:
        return found[0]
    for folder in folders:
        if next(folder.glob("slab-*.kv"), None) is not None:
            raise ConfigError(
                f"nvme: {folder} has blocks, and the file {folder / 'secret'} is gone: put it back, or empty the folder"
            )
    return None
