"""The durable index in memory, with what a kill and a power cut do to it: LMDB cannot lie on a simulated disk.

Behind the methods of `tiers.nvme.index.DurableIndex` and judged by the same suite
(`tests/tiers/nvme/test_index_contract`). An `IndexFile` is what outlives the process. A transaction is there as a
whole or not at all. Synced ones survive a power cut; of an index that was written without syncs, a power cut leaves
one that is not to be believed, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Corruption, ResourceExhausted
from tiers.nvme.index import GROUP_SLOTS, RECORD

_ROOT_BYTES = 16 << 10
_GROUP_BYTES = 12 << 10
Place = tuple[int, int]  # slab, slot


@dataclass
class IndexFile:
    """What lies on the disk."""

    records: dict[Place, bytes] = field(default_factory=dict)
    synced: dict[Place, bytes] = field(default_factory=dict)
    exists: bool = False
    unsynced_boot: int | None = None
    """Written without syncs since this boot of the machine."""
    incomplete: bool = False
    """Made anew, and not to its end."""
    nbytes: int = 0

    def power_cut(self) -> None:
        """What was not synced is lost."""
        self.records = dict(self.synced)

    def copy(self) -> IndexFile:
        """The same once more."""
        return IndexFile(
            records=dict(self.records),
            synced=dict(self.synced),
            exists=self.exists,
            unsynced_boot=self.unsynced_boot,
            incomplete=self.incomplete,
            nbytes=self.nbytes,
        )

    def load(self, boot: int) -> NDArray[np.void]:
        """As tiers.nvme.index.load_index."""
        if not self.exists:
            raise Corruption("there is no index")
        self.check_mark(boot)
        return _as_records(self.records)

    def check_mark(self, boot: int) -> None:
        """Raises Corruption where it is not to be believed."""
        if self.incomplete:
            raise Corruption("the index was not made to its end")
        if self.unsynced_boot is not None and self.unsynced_boot != boot:
            raise Corruption("the index was not flushed before the machine stopped")

    def remove(self) -> None:
        """As tiers.nvme.index.remove_index."""
        self.records, self.synced = {}, {}
        self.exists, self.unsynced_boot, self.incomplete, self.nbytes = False, None, False, 0


class IndexTwin:
    """The index of one directory, open for writing. `before(operation)` may raise: there the process dies."""

    def __init__(
        self,
        file: IndexFile,
        *,
        map_bytes: int,
        synced: bool,
        boot: int = 0,
        before: Callable[[str], None] = lambda operation: None,
    ) -> None:
        """`synced`: every transaction is on the medium when it returns. Raises Corruption."""
        file.check_mark(boot)
        self._file = file
        self.empty = not file.records
        self._map_bytes = map_bytes
        self._before = before
        self._synced = synced
        if synced:
            file.synced = dict(file.records)
            file.unsynced_boot = None
        else:
            file.unsynced_boot = boot
        file.exists = True

    @classmethod
    def anew(
        cls,
        file: IndexFile,
        *,
        map_bytes: int,
        synced: bool,
        boot: int = 0,
        before: Callable[[str], None] = lambda operation: None,
    ) -> Self:
        """See DurableIndex."""
        before("index.remove")
        file.remove()
        index = cls(file, map_bytes=map_bytes, synced=synced, boot=boot, before=before)
        file.incomplete = True
        return index

    def complete(self) -> None:
        """See DurableIndex."""
        if self._file.incomplete:
            self._before("index.complete")
            self._file.incomplete = False

    def commit(self, published: NDArray[np.void], freed: NDArray[np.void]) -> None:
        """See DurableIndex."""
        self._before("index.commit")
        records = dict(self._file.records)
        for slab, slot in zip(freed["slab"].tolist(), freed["slot"].tolist(), strict=True):
            records.pop((slab, slot), None)
        places = zip(published["slab"].tolist(), published["slot"].tolist(), strict=True)
        for place, record in zip(places, published, strict=True):
            records[place] = record.tobytes()
        groups = {(slab, slot // GROUP_SLOTS) for slab, slot in records}
        nbytes = _ROOT_BYTES + 2 * _GROUP_BYTES * len(groups)
        if nbytes > self._map_bytes:
            raise ResourceExhausted("the index of the NVMe tier is full: new blocks there are not durable")
        self._file.nbytes = max(self._file.nbytes, nbytes)
        self._put(records)

    def drop_slab(self, slab: int) -> None:
        """See DurableIndex."""
        self._before("index.drop")
        self._put({place: record for place, record in self._file.records.items() if place[0] != slab})

    def load(self) -> NDArray[np.void]:
        """See DurableIndex."""
        return _as_records(self._file.records)

    def resize(self, map_bytes: int) -> None:
        """See DurableIndex."""
        self._map_bytes = map_bytes

    def flush(self) -> None:
        """See DurableIndex."""
        self._before("index.flush")
        self._file.synced = dict(self._file.records)

    def close(self) -> None:
        """See DurableIndex."""
        self._file.synced = dict(self._file.records)
        if not self._file.incomplete:
            self._file.unsynced_boot = None

    def _put(self, records: dict[Place, bytes]) -> None:
        self._file.records = records
        if self._synced:
            self._before("index.sync")
            self._file.synced = dict(records)


def _as_records(records: dict[Place, bytes]) -> NDArray[np.void]:
    packed = b"".join(records[place] for place in sorted(records))
    return np.frombuffer(packed, dtype=RECORD).copy()
