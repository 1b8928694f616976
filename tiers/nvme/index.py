"""The durable index: which block each slot of each slab holds, in LMDB, so that a start need not read the slabs.

Keyed by (slab, group of 128 slots), one packed value a group of 8 KiB: 1 M blocks are written in 0.2 s and read in 0.1,
60 times sooner than keyed by hash. It is only a list of what to expect: each trailer is checked when its slot is read,
so an index that is behind costs misses and nothing else. Opened for writing by the daemon alone.

Order of a group commit: data written → fdatasync (Durability.POWER) → one transaction that frees and publishes.
"""

from __future__ import annotations

import contextlib
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import ConfigError, Corruption, KvstoreError, ResourceExhausted
from kvstore.moves import U32, U64
from tiers.nvme.index_marks import (
    check_marks,
    is_clean,
    mark_clean,
    mark_incomplete,
    mark_synced,
    mark_unsynced,
    unmark_clean,
)
from tiers.nvme.slab import sync_directory

__all__ = [
    "CUT_SHORT",
    "GROUP_SLOTS",
    "RECORD",
    "SLOT_REF",
    "BlockIndex",
    "DurableIndex",
    "IndexChunk",
    "IndexReader",
    "NoIndex",
    "OtherFormatError",
    "index_file_bytes",
    "load_index",
    "records_of",
    "remove_index",
]

CUT_SHORT = "is cut short or damaged"
"""What is said of an index whose reader was killed by it."""

GROUP_SLOTS = 128

RECORD = np.dtype(
    [
        ("slab", "<u4"),
        ("slot", "<u4"),  # within the slab
        ("generation", "<u4"),
        ("length", "<u4"),  # payload bytes, never 0
        ("depth", "<u4"),
        ("pad", "<u4"),
        ("touch", "<u8"),
        ("hash", "<u8", 2),
        ("parent", "<u8", 2),
        ("ns_digest", "<u8", 2),
    ]
)
"""80 bytes: a slot that holds a block."""

SLOT_REF = np.dtype([("slab", "<u4"), ("slot", "<u4")])
"""8 bytes: a slot that holds none any more."""

_STORED_NAMES = ("hash", "parent", "ns_digest", "touch", "generation")
_GROUP = np.dtype(
    [
        ("length", "<u4"),  # payload bytes of each slot of the group
        ("pad", "<u4"),
        ("hash", "<u8", (GROUP_SLOTS, 2)),  # zeros: the slot holds no block
        ("parent", "<u8", (GROUP_SLOTS, 2)),
        ("ns_digest", "<u8", (GROUP_SLOTS, 2)),
        ("touch", "<u8", GROUP_SLOTS),  # touch_key: its low bits are the depth
        ("generation", "<u4", GROUP_SLOTS),
    ]
)
"""7,688 bytes, two pages of LMDB: 64 bytes a block. Column by column, so that a reader copies runs."""
_KEY = struct.Struct(">II")  # slab, group; big-endian so that LMDB's order is ours
_VERSION_KEY = b"version"
_VERSION = b"2"
_FOLDER = "index"
_CHUNK_GROUPS = 256
_MAX_DEPTH = (1 << 20) - 1


class BlockIndex(Protocol):
    """An index that is open for writing. Every call blocks on the disk; one thread at a time."""

    @property
    def empty(self) -> bool:
        """Whether it had no block when it was opened, and is one that notes blocks."""
        ...

    def commit(self, published: NDArray[np.void], freed: NDArray[np.void]) -> None:
        """Slots SLOT_REF[] hold nothing, then RECORD[] hold blocks: all of it or nothing. Raises KvstoreError."""
        ...

    def complete(self) -> None:
        """From now on one that was made anew is believed: it has all that it was to learn. Raises KvstoreError."""
        ...

    def drop_slab(self, slab: int) -> None:
        """Forgets every slot of a slab. Raises KvstoreError."""
        ...

    def resize(self, map_bytes: int) -> None:
        """Gives it another bound, not below what its file takes. Raises KvstoreError."""
        ...

    def flush(self) -> None:
        """Forces what was committed to the device. Raises KvstoreError."""
        ...

    def close(self) -> None:
        """Ends it in order."""
        ...


class NoIndex:
    """Notes nothing: blocks end with the memory that knows them. Implements BlockIndex."""

    empty = False

    def commit(self, published: NDArray[np.void], freed: NDArray[np.void]) -> None:
        """See BlockIndex."""

    def complete(self) -> None:
        """See BlockIndex."""

    def drop_slab(self, slab: int) -> None:
        """See BlockIndex."""

    def resize(self, map_bytes: int) -> None:
        """See BlockIndex."""

    def flush(self) -> None:
        """See BlockIndex."""

    def close(self) -> None:
        """See BlockIndex."""


class DurableIndex:
    """The index, open for writing. `commit`, `drop_slab` and `flush` release the GIL and are one thread's at a time.

    With Durability.PROCESS a commit survives the death of any process, and a power cut may damage the file: then a mark
    that names this boot of the machine stays behind, and the next start rebuilds from the trailers. One that is made
    anew carries a mark that no boot matches until it is complete: a kill before that leaves one that nobody believes.
    """

    def __init__(self, directory: Path, *, map_bytes: int, durability: Durability) -> None:
        """Raises Corruption where the file is damaged, ConfigError where it is of another version, KvstoreError."""
        folder = directory / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        check_marks(folder)
        if durability is not Durability.POWER:
            mark_unsynced(folder)
        self._incomplete = False
        self._begin(folder, map_bytes, durability)

    @classmethod
    def anew(cls, directory: Path, *, map_bytes: int, durability: Durability) -> Self:
        """An empty one in the place of whatever there is; it is believed once it is `complete`. Raises KvstoreError."""
        remove_index(directory)
        folder = directory / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        mark_incomplete(folder)
        index = cls.__new__(cls)
        index._incomplete = True
        index._begin(folder, map_bytes, durability)
        return index

    def _begin(self, folder: Path, map_bytes: int, durability: Durability) -> None:
        self._folder = folder
        self._synced = durability is Durability.POWER
        self._env = _open(folder, map_bytes=map_bytes, sync=self._synced)
        try:
            self._env.reader_check()  # a reader that was killed would keep every page it saw from being used again
            with self._env.begin(write=True) as txn:
                _check_version(folder, txn.get(_VERSION_KEY, _VERSION))
                txn.put(_VERSION_KEY, _VERSION)
                self.empty = txn.stat()["entries"] <= 1
            if self._synced and not self._incomplete:
                self._env.sync(True)
                mark_synced(folder)
            unmark_clean(folder)
        except lmdb.Error as error:
            self._env.close()
            raise Corruption(f"{folder} is damaged: {error}") from error
        except BaseException:
            self._env.close()
            raise

    def commit(self, published: NDArray[np.void], freed: NDArray[np.void]) -> None:
        """One transaction: SLOT_REF[] `freed` hold nothing, then RECORD[] `published` hold these blocks. O(groups).

        A group that stays what it is is not written. Raises ResourceExhausted where the map is full, KvstoreError
        otherwise; then nothing was changed.
        """
        publish, free = _by_group(published), _by_group(freed)
        try:
            with self._env.begin(write=True) as txn:
                for key in sorted(publish.keys() | free.keys()):
                    group = _read_group(txn, key)
                    before = group.tobytes()
                    if key in free:
                        _forget(group, freed["slot"][free[key]])
                    if key in publish:
                        _enter(group, published[publish[key]])
                    if group.tobytes() != before:
                        _write_group(txn, key, group)
        except lmdb.MapFullError as error:
            raise ResourceExhausted(
                "the index of the NVMe tier is full: new blocks there are not durable"
            ) from error
        except lmdb.Error as error:
            raise KvstoreError(f"the index of the NVMe tier failed: {error}") from error

    def complete(self) -> None:
        """See BlockIndex."""
        if not self._incomplete:
            return
        try:
            (mark_synced if self._synced else mark_unsynced)(self._folder)
        except OSError as error:
            raise KvstoreError(f"the index of the NVMe tier cannot be marked: {error.strerror}") from error
        self._incomplete = False

    def drop_slab(self, slab: int) -> None:
        """Forgets every slot of a slab, in one transaction. Raises KvstoreError."""
        try:
            with self._env.begin(write=True) as txn, txn.cursor() as cursor:
                found = cursor.set_range(_KEY.pack(slab, 0))
                while found and len(cursor.key()) == _KEY.size and _KEY.unpack(cursor.key())[0] == slab:
                    found = cursor.delete()
        except lmdb.Error as error:
            raise KvstoreError(f"the index of the NVMe tier failed: {error}") from error

    def load(self) -> NDArray[np.void]:
        """Every block of the index as RECORD[], by slab and slot."""
        return _as_records(_read(self._env))

    def resize(self, map_bytes: int) -> None:
        """See BlockIndex."""
        try:
            self._env.set_mapsize(map_bytes)
        except lmdb.Error as error:
            raise KvstoreError(
                f"the index of the NVMe tier cannot be given {map_bytes} bytes: {error}"
            ) from error

    def flush(self) -> None:
        """Forces what was committed to the device. Raises KvstoreError."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise KvstoreError(f"the index of the NVMe tier could not be flushed: {error}") from error

    def close(self) -> None:
        """Flushes and closes; after it the file is whole whatever happens to the machine, and marked as complete."""
        with contextlib.suppress(lmdb.Error, OSError):  # a mark then stays, and the next start looks closer
            self._env.sync(True)
            if not self._incomplete:
                mark_synced(self._folder)
                mark_clean(self._folder)
        self._env.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChunk:
    """Some blocks of one slab by slot, [n] each."""

    slab: int
    length: int  # payload bytes of each
    slots: U32  # within the slab
    hashes: U64  # [n, 2]
    parents: U64  # [n, 2]
    digests: U64  # [n, 2]
    touches: U64
    generations: U32

    @property
    def depths(self) -> U32:
        """[n] depth of each block, as far as a touch key has it."""
        return (np.uint64(_MAX_DEPTH) - (self.touches & np.uint64(_MAX_DEPTH))).astype(np.uint32)


class IndexReader:
    """The index, read only. For a child process: a damaged file can kill the reader."""

    def __init__(self, directory: Path) -> None:
        """Raises Corruption where there is none, where it is damaged, or where a power cut may have damaged it;
        ConfigError where it is of another version."""
        folder = directory / _FOLDER
        if not (folder / "data.mdb").exists():
            raise Corruption(f"{folder} does not exist")
        check_marks(folder)
        self._folder = folder
        self.clean = is_clean(folder)
        """Whether it was closed in order: then it says what the slabs say."""
        try:
            self._env = lmdb.open(str(folder), readonly=True, lock=False, create=False, readahead=True)
            with self._env.begin() as txn:
                _check_version(folder, txn.get(_VERSION_KEY))
                self.groups: int = txn.stat()["entries"] - 1
        except lmdb.Error as error:
            raise Corruption(f"{folder} is damaged: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._env.close()

    def chunks(self) -> Iterator[IndexChunk]:
        """All blocks, up to 32,768 at a time, by slab and slot. Raises Corruption."""
        try:
            yield from _read(self._env)
        except lmdb.Error as error:
            raise Corruption(f"{self._folder} is damaged: {error}") from error


def _read(env: lmdb.Environment) -> Iterator[IndexChunk]:
    taken = np.empty(_CHUNK_GROUPS, dtype=_GROUP)
    buffer = memoryview(taken.data).cast("B")
    numbers: list[int] = []
    slab = at = 0
    size, end = _GROUP.itemsize, len(buffer)  # this loop runs once for each 128 of perhaps ten million blocks
    with env.begin(buffers=True) as txn, txn.cursor() as cursor:
        for key, value in cursor:
            if len(value) != size or len(key) != _KEY.size:
                continue
            of, number = _KEY.unpack(key)
            if of != slab or at == end:
                if numbers:
                    yield from _chunks(slab, numbers, taken)
                numbers.clear()
                slab, at = of, 0
            buffer[at : at + size] = value
            at += size
            numbers.append(number)
    if numbers:
        yield from _chunks(slab, numbers, taken)


def _chunks(slab: int, numbers: list[int], taken: NDArray[np.void]) -> Iterator[IndexChunk]:
    """What these groups hold, good until the next: one chunk for each length, one where nobody wrote nonsense."""
    groups = taken[: len(numbers)]
    firsts: U32 = np.array(numbers, dtype=np.uint32) * np.uint32(GROUP_SLOTS)
    slots: U32 = np.add.outer(firsts, np.arange(GROUP_SLOTS, dtype=np.uint32)).reshape(-1)
    hashes = groups["hash"].reshape(-1, 2)
    for length in np.unique(groups["length"]).tolist():
        used = ((hashes[:, 0] | hashes[:, 1]) != 0) & np.repeat(groups["length"] == length, GROUP_SLOTS)
        chosen: slice | NDArray[np.bool_] = slice(None) if used.all() else used
        yield IndexChunk(
            slab=slab,
            length=length,
            slots=slots[chosen],
            hashes=hashes[chosen],
            parents=groups["parent"].reshape(-1, 2)[chosen],
            digests=groups["ns_digest"].reshape(-1, 2)[chosen],
            touches=groups["touch"].reshape(-1)[chosen],
            generations=groups["generation"].reshape(-1)[chosen],
        )


class OtherFormatError(ConfigError):
    """The index is of another version."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(
            f"nvme: {folder} {what}; nothing was changed: start the kvstore that wrote it, or make it anew from the "
            f"slabs with `kvstore fsck --repair {folder.parent}`"
        )
        self.what = what
        """What is wrong alone, for who makes it anew."""


def load_index(directory: Path) -> NDArray[np.void]:
    """RECORD[] of the index of `directory`, by slab and slot; raises what `IndexReader` does."""
    with IndexReader(directory) as reader:
        return _as_records(reader.chunks())


def _as_records(chunks: Iterator[IndexChunk]) -> NDArray[np.void]:
    parts = [np.empty(0, dtype=RECORD)]
    parts += [records_of(chunk, slice(None)) for chunk in chunks]
    return np.concatenate(parts)


def records_of(chunk: IndexChunk, chosen: NDArray[np.intp] | slice) -> NDArray[np.void]:
    """RECORD[] of some blocks of a chunk."""
    records = np.zeros(len(chunk.slots[chosen]), dtype=RECORD)
    records["slab"], records["slot"], records["length"] = chunk.slab, chunk.slots[chosen], chunk.length
    records["hash"], records["parent"] = chunk.hashes[chosen], chunk.parents[chosen]
    records["ns_digest"], records["touch"] = chunk.digests[chosen], chunk.touches[chosen]
    records["generation"], records["depth"] = chunk.generations[chosen], chunk.depths[chosen]
    return records


def index_file_bytes(directory: Path) -> int:
    """Length of the index's file, which never shrinks; 0 where there is none."""
    try:
        return (directory / _FOLDER / "data.mdb").stat().st_size
    except FileNotFoundError:
        return 0


def remove_index(directory: Path) -> None:
    """Deletes the index; its file goes first, since without the marks beside it, it would be believed."""
    folder = directory / _FOLDER
    with contextlib.suppress(OSError):
        (folder / "data.mdb").unlink()
        sync_directory(folder)
    shutil.rmtree(folder, ignore_errors=True)
    sync_directory(directory)


def _open(folder: Path, *, map_bytes: int, sync: bool) -> lmdb.Environment:
    try:
        return lmdb.open(
            str(folder),
            map_size=map_bytes,
            sync=sync,
            metasync=sync,
            readahead=False,
            mode=0o600,
            max_readers=8,
        )
    except lmdb.Error as error:
        raise Corruption(f"{folder} is damaged: {error}") from error


def _by_group(records: NDArray[np.void]) -> dict[tuple[int, int], NDArray[np.intp]]:
    """Positions in `records` by (slab, group)."""
    return dict(_groups(records)) if len(records) else {}


def _groups(records: NDArray[np.void]) -> Iterator[tuple[tuple[int, int], NDArray[np.intp]]]:
    keys = records["slab"].astype(np.uint64) << np.uint64(32) | records["slot"] // np.uint32(GROUP_SLOTS)
    order = np.argsort(keys, kind="stable")
    unique, starts = np.unique(keys[order], return_index=True)
    for key, positions in zip(unique.tolist(), np.split(order, starts[1:]), strict=True):
        yield (key >> 32, key & 0xFFFFFFFF), positions


def _read_group(txn: lmdb.Transaction, key: tuple[int, int]) -> NDArray[np.void]:
    """The group as [1] of it, to be changed."""
    value = txn.get(_KEY.pack(*key))
    if value is None or len(value) != _GROUP.itemsize:
        return np.zeros(1, dtype=_GROUP)
    return np.frombuffer(value, dtype=_GROUP).copy()


def _write_group(txn: lmdb.Transaction, key: tuple[int, int], group: NDArray[np.void]) -> None:
    if group["hash"].any():
        txn.put(_KEY.pack(*key), group.tobytes())
    else:
        txn.delete(_KEY.pack(*key))


def _forget(group: NDArray[np.void], slots: U32) -> None:
    for name in _STORED_NAMES:
        group[name][0, slots % GROUP_SLOTS] = 0


def _enter(group: NDArray[np.void], records: NDArray[np.void]) -> None:
    if group["length"][0] != records["length"][0]:  # of a slab that had another slot size
        group[:] = np.zeros(1, dtype=_GROUP)
        group["length"] = records["length"][0]
    for name in _STORED_NAMES:
        group[name][0, records["slot"] % GROUP_SLOTS] = records[name]


def _check_version(folder: Path, found: bytes | None) -> None:
    """Raises ConfigError for an index of another version: what is in it is somebody's, and stays."""
    if found != _VERSION:
        version = "an unknown format" if found is None else f"format {found.decode('ascii', 'replace')}"
        raise OtherFormatError(folder, f"is of {version}, this kvstore reads {_VERSION.decode()}")
