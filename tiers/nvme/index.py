"""The durable index: which block each slot of each slab holds, in LMDB, so that a start need not read the slabs.

Keyed by (slab, group of 128 slots), one packed value a group: 1 M blocks are written in 0.2 s and read in 0.16 s, 60
times sooner than keyed by hash. It is only a list of what to expect: each trailer is checked when its slot is read, so
an index that is behind costs misses and nothing else. Opened for writing by the daemon alone.

Order of a group commit: data written → fdatasync (Durability.COMMIT) → one transaction that frees and publishes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.config import Durability
from kvstore.errors import Corruption, KvstoreError, ResourceExhausted
from tiers.nvme.slab import sync_directory

__all__ = [
    "GROUP_SLOTS",
    "RECORD",
    "SLOT_REF",
    "DurableIndex",
    "index_file_bytes",
    "load_index",
    "remove_index",
]

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

_STORED_NAMES = ("generation", "length", "depth", "touch", "hash", "parent", "ns_digest")
_STORED = np.dtype(
    [
        ("generation", "<u4"),
        ("length", "<u4"),  # 0: the slot holds no block
        ("depth", "<u4"),
        ("pad", "<u4"),
        ("touch", "<u8"),
        ("hash", "<u8", 2),
        ("parent", "<u8", 2),
        ("ns_digest", "<u8", 2),
    ]
)
_KEY = struct.Struct(">II")  # slab, group; big-endian so that LMDB's order is ours
_VERSION_KEY = b"version"
_VERSION = b"1"
_FOLDER = "index"
_UNSYNCED = "unsynced"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DurableIndex:
    """The index, open for writing. `commit`, `drop_slab` and `flush` release the GIL and are one thread's at a time.

    With Durability.FLUSH a commit survives the death of any process, and a power cut may damage the file: then a mark
    that names this boot of the machine stays behind, and the next start rebuilds from the trailers.
    """

    def __init__(self, directory: Path, *, map_bytes: int, durability: Durability) -> None:
        """Raises Corruption where the file is no index of this version, KvstoreError where it cannot be opened."""
        folder = directory / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._mark = folder / _UNSYNCED
        _check_mark(self._mark)
        if durability is Durability.FLUSH:
            _write_mark(self._mark)
        self._env = _open(folder, map_bytes=map_bytes, sync=durability is Durability.COMMIT)
        try:
            self._env.reader_check()  # a reader that was killed would keep every page it saw from being used again
            with self._env.begin(write=True) as txn:
                if txn.get(_VERSION_KEY, _VERSION) != _VERSION:
                    raise Corruption(f"{folder} is of another version")
                txn.put(_VERSION_KEY, _VERSION)
            if durability is Durability.COMMIT:
                self._env.sync(True)
                self._mark.unlink(missing_ok=True)
        except lmdb.Error as error:
            self._env.close()
            raise Corruption(f"{folder} is damaged: {error}") from error
        except BaseException:
            self._env.close()
            raise

    def commit(self, published: NDArray[np.void], freed: NDArray[np.void]) -> None:
        """One transaction: SLOT_REF[] `freed` hold nothing, then RECORD[] `published` hold these blocks. O(groups).

        Raises ResourceExhausted where the map is full, KvstoreError otherwise; then nothing was changed.
        """
        stored = np.zeros(len(published), dtype=_STORED)
        for name in _STORED_NAMES:
            stored[name] = published[name]
        publish, free = _by_group(published), _by_group(freed)
        try:
            with self._env.begin(write=True) as txn:
                for key in sorted(publish.keys() | free.keys()):
                    group = _read_group(txn, key)
                    if key in free:
                        group[freed["slot"][free[key]] % GROUP_SLOTS] = np.zeros((), dtype=_STORED)
                    if key in publish:
                        chosen = publish[key]
                        group[published["slot"][chosen] % GROUP_SLOTS] = stored[chosen]
                    _write_group(txn, key, group)
        except lmdb.MapFullError as error:
            raise ResourceExhausted(
                "the index of the NVMe tier is full: new blocks there are not durable"
            ) from error
        except lmdb.Error as error:
            raise KvstoreError(f"the index of the NVMe tier failed: {error}") from error

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
        return _load(self._env)

    def flush(self) -> None:
        """Forces what was committed to the device. Raises KvstoreError."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise KvstoreError(f"the index of the NVMe tier could not be flushed: {error}") from error

    def close(self) -> None:
        """Flushes and closes; after it the file is whole whatever happens to the machine."""
        with contextlib.suppress(lmdb.Error):  # the mark then stays and the next start rebuilds
            self._env.sync(True)
            self._mark.unlink(missing_ok=True)
        self._env.close()


def load_index(directory: Path) -> NDArray[np.void]:
    """RECORD[] of the index of `directory`, read only. For a child process: a damaged file can kill the reader.

    Raises Corruption where there is none, where it is damaged, or where a power cut may have damaged it.
    """
    folder = directory / _FOLDER
    if not (folder / "data.mdb").exists():
        raise Corruption(f"{folder} does not exist")
    _check_mark(folder / _UNSYNCED)
    try:
        env = lmdb.open(str(folder), readonly=True, lock=False, create=False, readahead=False)
        try:
            with env.begin() as txn:
                if txn.get(_VERSION_KEY) != _VERSION:
                    raise Corruption(f"{folder} is of another version")
            return _load(env)
        finally:
            env.close()
    except lmdb.Error as error:
        raise Corruption(f"{folder} is damaged: {error}") from error


def index_file_bytes(directory: Path) -> int:
    """Length of the index's file, which never shrinks; 0 where there is none."""
    try:
        return (directory / _FOLDER / "data.mdb").stat().st_size
    except FileNotFoundError:
        return 0


def remove_index(directory: Path) -> None:
    """Deletes the index."""
    shutil.rmtree(directory / _FOLDER, ignore_errors=True)
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


def _load(env: lmdb.Environment) -> NDArray[np.void]:
    keys, values = [], []
    with env.begin() as txn, txn.cursor() as cursor:
        for key, value in cursor:
            if len(key) == _KEY.size and len(value) == GROUP_SLOTS * _STORED.itemsize:
                keys.append(_KEY.unpack(key))
                values.append(value)
    places = np.array(keys, dtype=np.uint32).reshape(-1, 2)
    stored = np.frombuffer(b"".join(values), dtype=_STORED)
    used = np.flatnonzero(stored["length"])
    records = np.zeros(len(used), dtype=RECORD)
    for name in _STORED_NAMES:
        records[name] = stored[name][used]
    records["slab"] = places[used // GROUP_SLOTS, 0]
    records["slot"] = places[used // GROUP_SLOTS, 1] * GROUP_SLOTS + used % GROUP_SLOTS
    return records


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
    value = txn.get(_KEY.pack(*key))
    if value is None or len(value) != GROUP_SLOTS * _STORED.itemsize:
        return np.zeros(GROUP_SLOTS, dtype=_STORED)
    return np.frombuffer(value, dtype=_STORED).copy()


def _write_group(txn: lmdb.Transaction, key: tuple[int, int], group: NDArray[np.void]) -> None:
    if group["length"].any():
        txn.put(_KEY.pack(*key), group.tobytes())
    else:
        txn.delete(_KEY.pack(*key))


def _boot_id() -> str:
    """Names this boot of the machine: page cache that was not written yet is still there while it stays the same."""
    return _BOOT_ID.read_text(encoding="ascii")


def _check_mark(mark: Path) -> None:
    """Raises Corruption where the index beside `mark` was written without fsync before the machine stopped."""
    if mark.exists() and mark.read_text(encoding="ascii") != _boot_id():
        raise Corruption(f"{mark.parent} was not flushed before the machine stopped")


def _write_mark(mark: Path) -> None:
    fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, _boot_id().encode("ascii"))
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(mark.parent)
