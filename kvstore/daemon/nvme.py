"""One NVMe path as the daemon sees it: its locked directory, its slabs and their numbers, its durable index.

`open_path` and `commit` block on the disk and are called in a thread; the rest is bookkeeping on the owner loop. An
extent of the store and a slab of the directory are the same memory under two names: the extent's number lives as long
as the tables, the slab's number for ever. Which slab an extent is, is kept in a memfd of its own (`SlabTable`), so a
restarted daemon knows.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.config import NvmePath, ServeConfig
from kvstore.daemon.log import Log
from kvstore.errors import ConfigError, Corruption, KvstoreError
from kvstore.faults import fault
from kvstore.layout import Columns, Tier
from kvstore.moves import NvmeChanges
from tiers.memfd import create_memfd
from tiers.nvme.capacity import SlabPlan, check_room, default_map_bytes, plan, slab_file_bytes
from tiers.nvme.directory import NvmeDirectory, keep_secret, read_secret
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex, index_file_bytes, remove_index
from tiers.nvme.recover import recover
from tiers.nvme.slab import SlabFile, remove_slab

__all__ = [
    "IndexBatch",
    "OpenPath",
    "OpensPath",
    "SlabTable",
    "commit",
    "index_batch",
    "open_path",
    "secret_on_disk",
    "slab_bytes",
    "trim",
]

_LOG = Log("nvme")
_RECOVER_TIMEOUT_S = 600.0
_MAX_SLABS = 2048


class SlabTable:
    """Slab number and slot size of each extent of the NVMe tier, in shared memory that the keeper holds."""

    NAME = "slabs"

    def __init__(self, columns: Columns, inherited: Mapping[str, int]) -> None:
        count = columns.shape.max_extents
        size = -(-16 * count // 4096) * 4096
        self.fd = inherited[self.NAME] if self.NAME in inherited else create_memfd("kvstore-slabs", size)
        table = np.frombuffer(mmap.mmap(self.fd, size), dtype="<u8")
        self._numbers, self._slot_bytes = table[:count], table[count : 2 * count]

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

    def clear(self) -> None:
        """No extent has a slab."""
        self._numbers[:] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPath:
    """A path that is open and ours."""

    directory: NvmeDirectory
    index: DurableIndex
    plan: SlabPlan
    slabs: tuple[SlabFile, ...]
    """Slabs with blocks in them, within the capacity."""
    records: NDArray[np.void]
    """RECORD[] of their blocks; empty where the tables know them already."""

    def close(self) -> None:
        """Closes files and lets go of the lock."""
        self.index.close()
        self.directory.close()

    def abandon(self) -> None:
        """Closes them after a start that failed: a directory that was new is left as it was found."""
        self.index.close()
        self.directory.abandon()


class OpensPath(Protocol):
    """`open_path`, or what opens a path on another disk."""

    def __call__(self, path: NvmePath, config: ServeConfig, secret: bytes, *, read_index: bool) -> OpenPath:
        """See open_path."""
        ...


def slab_bytes(path: NvmePath, config: ServeConfig) -> int:
    """Size of a path's slabs: as configured, or more, so that a path has at most 2,048."""
    size = config.nvme_extent_bytes
    while path.capacity_bytes // size > _MAX_SLABS:
        size *= 2
    return size


def open_path(path: NvmePath, config: ServeConfig, secret: bytes, *, read_index: bool) -> OpenPath:
    """Locks, checks and opens a path; with `read_index` also finds what it holds. Blocks: call it in a thread.

    Raises AlreadyExists while another process has it, ConfigError where it cannot be used, KvstoreError otherwise.
    """
    wanted = plan(path.capacity_bytes, slab_bytes(path, config), default_map_bytes(path.capacity_bytes))
    directory = NvmeDirectory.open(path.path)
    with contextlib.ExitStack() as undo:
        undo.callback(directory.abandon)
        slabs = directory.slabs()
        check_room(Path(path.path), wanted)
        keep_secret(Path(path.path), secret)
        records = np.empty(0, dtype=RECORD)
        if read_index:
            found = recover(Path(path.path), map_bytes=wanted.map_bytes, timeout_s=_RECOVER_TIMEOUT_S)
            if found.rebuilt and slabs:
                _LOG.warning("index rebuilt from trailers", path=path.path, why=found.rebuilt)
            slabs = trim(directory, slabs, found.records, wanted)
            records = found.records[np.isin(found.records["slab"], [slab.number for slab in slabs])]
        too_large = index_file_bytes(Path(path.path)) > wanted.map_bytes
        if too_large:  # of a larger capacity, and LMDB gives nothing back
            remove_index(Path(path.path))
        index = _open_index(Path(path.path), wanted.map_bytes, config)
        undo.callback(index.close)
        if too_large:  # where the tables are kept, the first commit enters all that they know
            _enter_again(index, records)
        undo.pop_all()
    return OpenPath(directory=directory, index=index, plan=wanted, slabs=tuple(slabs), records=records)


def _enter_again(index: DurableIndex, records: NDArray[np.void]) -> None:
    try:
        index.commit(records, np.empty(0, dtype=SLOT_REF))
    except KvstoreError as error:  # it is a list of what to expect: the blocks are there without it
        _LOG.warning("index not written anew", error=error)


def _open_index(directory: Path, map_bytes: int, config: ServeConfig) -> DurableIndex:
    try:
        return DurableIndex(directory, map_bytes=map_bytes, durability=config.durability)
    except Corruption as error:
        _LOG.warning("index damaged, rebuilding", path=directory, error=error)
        recover(directory, map_bytes=map_bytes, timeout_s=_RECOVER_TIMEOUT_S)
        return DurableIndex(directory, map_bytes=map_bytes, durability=config.durability)


def trim(
    directory: NvmeDirectory, slabs: list[SlabFile], records: NDArray[np.void], wanted: SlabPlan
) -> list[SlabFile]:
    """Removes slabs without a block, and those that exceed the capacity, the emptiest first; returns the rest."""
    used = {slab.number: int(np.count_nonzero(records["slab"] == slab.number)) for slab in slabs}
    kept: list[SlabFile] = []
    room = wanted.slabs_bytes
    for slab in sorted(slabs, key=lambda slab: -used[slab.number]):
        if used[slab.number] and slab_file_bytes(slab.nbytes) <= room:
            kept.append(slab)
            room -= slab_file_bytes(slab.nbytes)
        else:
            if used[slab.number]:
                _LOG.warning(
                    "slab removed: the capacity is smaller now", path=directory.path, blocks=used[slab.number]
                )
            remove_slab(directory.path, slab, directory.disk)
    return sorted(kept, key=lambda slab: slab.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBatch:
    """What one group commit enters into the durable index."""

    dropped_slabs: tuple[int, ...]
    freed: NDArray[np.void]  # SLOT_REF[]
    published: NDArray[np.void]  # RECORD[]

    def __bool__(self) -> bool:
        return bool(self.dropped_slabs) or len(self.freed) > 0 or len(self.published) > 0


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


def commit(opened: OpenPath, batch: IndexBatch) -> None:
    """One group commit; blocks on the disk. Raises KvstoreError, with nothing of a transaction done."""
    fault("commit.lmdb")
    for number in batch.dropped_slabs:
        opened.index.drop_slab(number)
    if len(batch.published) or len(batch.freed):
        opened.index.commit(batch.published, batch.freed)
    fault("commit.done")


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
