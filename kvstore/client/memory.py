"""The memory that a session maps: the shared tables read-only, DRAM extents, and the HBM pages in one range.

Owns slot ↔ address ↔ page. A page is a position in this process's range of HBM, in the order in which its extents were
mapped, so the engine sees one strided array; slots are the store's numbers. DRAM extents come and change their slot
class while the session lives, so DRAM addresses are computed from the shared extents table; a slot that is held keeps
its extent as it is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FailedPrecondition, InvalidArgument
from kvstore.layout import Columns, Tier, open_columns, read_shape
from kvstore.tables.index import Index
from kvstore.tables.spans import span_of
from tiers.base import DeviceTier
from tiers.dram import DramTier

__all__ = ["DramListener", "DramMemory", "HbmExtent", "HbmMemory", "SharedTables"]

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


class SharedTables:
    """The daemon's tables, mapped read-only."""

    __slots__ = ("_map", "columns", "index")

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `fd`, which stays the caller's. Raises: FailedPrecondition for tables of another version."""
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        view = memoryview(self._map)
        self.columns: Columns = open_columns(view, read_shape(view))
        self.index = Index(self.columns)


class DramListener(Protocol):
    """Told of DRAM extents by the thread that maps them, which waits: a copier has them pinned for its device.

    An extent is unmapped when no slot of it is held, or at the end of the session, after the copier was closed.
    Neither call raises.
    """

    def register(self, address: int, nbytes: int) -> None:
        """An extent has been mapped."""
        ...

    def unregister(self, address: int) -> None:
        """An extent is about to be unmapped."""
        ...


class DramMemory:
    """DRAM extents that this process maps, by their line in the extents table. One thread maps; any thread reads."""

    __slots__ = ("_columns", "_listener", "_mapped", "_tier")

    def __init__(self, columns: Columns, listener: DramListener | None = None) -> None:
        self._columns = columns
        self._listener = listener
        self._tier = DramTier()
        self._mapped = np.zeros(columns.shape.max_extents, dtype=np.bool_)

    def add(self, extent: int, fd: int, nbytes: int) -> None:
        """Maps an extent; one that is mapped already is left alone. `fd` becomes ours."""
        if self._mapped[extent]:
            os.close(fd)
            return
        self._tier.adopt(extent, fd, nbytes)
        if self._listener is not None:
            self._listener.register(self._tier.address(extent), nbytes)
        self._mapped[extent] = True

    def remove(self, extent: int) -> None:
        """Unmaps an extent that left the store: nobody holds a slot of it any more."""
        if self._mapped[extent]:
            self._mapped[extent] = False
            if self._listener is not None:
                self._listener.unregister(self._tier.address(extent))
            self._tier.drop(extent)

    def close(self) -> None:
        """Unmaps everything."""
        for extent in np.flatnonzero(self._mapped).tolist():
            self.remove(extent)

    @property
    def nbytes(self) -> int:
        """Bytes mapped."""
        return sum(self._tier.extents().values())

    def mapped(self, slots: U32) -> bool:
        """Whether this process can reach all of these slots. O(n)."""
        return bool(self.reachable(slots).all())

    def reachable(self, slots: U32) -> NDArray[np.bool_]:
        """[n] slots that this process has mapped. O(n)."""
        reachable: NDArray[np.bool_] = self._mapped.take(self._columns.pool(Tier.DRAM).extent.take(slots))
        return reachable

    def address_of(self, slots: U32) -> U64:
        """[n] addresses of slots that the session holds. Raises: NotFound where one is not mapped. O(n)."""
        extents = self._columns.pool(Tier.DRAM).extent[slots]
        within = (slots - self._columns.extent_slot_base[extents]).astype(np.uint64)
        return self._tier.addresses(extents, within * self._columns.extent_slot_bytes[extents])

    def view(self, slot: int) -> U8:
        """The bytes of one slot, `[slot_bytes]`, shared. Raises: NotFound where it is not mapped."""
        extent = int(self._columns.pool(Tier.DRAM).extent[slot])
        slot_bytes = int(self._columns.extent_slot_bytes[extent])
        start = (slot - int(self._columns.extent_slot_base[extent])) * slot_bytes
        whole = np.frombuffer(self._tier.view(extent), dtype=np.uint8)
        return whole[start : start + slot_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmExtent:
    """An extent to map: its number, its memory, and which slots it has. Who maps it takes `fd`."""

    extent: int
    fd: int
    nbytes: int
    slot_base: int
    slots: int


class HbmMemory:
    """The HBM pages of this process: extents of one device and slot class, mapped in a row.

    Pages are the whole address range for good: extents that other sessions of the device bring later are mapped behind
    the first ones. Only pages of slots that are held may be touched; the end of the range is address space without
    memory.
    """

    __slots__ = ("_page_of", "_slot_of", "_tier", "slot_bytes")

    def __init__(self, tier: DeviceTier, *, slots: int, slot_bytes: int) -> None:
        """`tier` is empty and becomes ours; `slots`: of the store's HBM pool."""
        self.slot_bytes = slot_bytes
        self._tier = tier
        self._page_of = np.full(slots, -1, dtype=np.int32)
        self._slot_of: U32 = np.empty(0, dtype=np.uint32)

    def add(self, *, extent: int, fd: int, nbytes: int, slot_base: int, slots: int) -> None:
        """Maps an extent behind the others. `fd` becomes ours. Raises: ResourceExhausted where the range is full."""
        self.add_all([HbmExtent(extent=extent, fd=fd, nbytes=nbytes, slot_base=slot_base, slots=slots)])

    def add_all(self, extents: Sequence[HbmExtent]) -> None:
        """As `add` for each, in this order, several at once. Where it raises the range is to be closed or reset."""
        if any(new.nbytes != new.slots * self.slot_bytes for new in extents):
            for new in extents:
                self._tier.discard(new.fd)
            raise InvalidArgument("an HBM extent is a whole number of slots")
        self._tier.adopt_all([(new.extent, new.fd, new.nbytes) for new in extents])
        for new in extents:
            first = self._tier.offset(new.extent) // self.slot_bytes
            slots = np.arange(new.slot_base, new.slot_base + new.slots, dtype=np.uint32)
            self._page_of[slots] = np.arange(first, first + new.slots, dtype=np.int32)
            self._slot_of = np.concatenate([self._slot_of, slots])

    def reset(self, slots: int) -> None:
        """Unmaps every extent and keeps the range: other extents come into the same place."""
        for extent in self._tier.extents():
            self._tier.drop(extent)
        self._page_of = np.full(slots, -1, dtype=np.int32)
        self._slot_of = np.empty(0, dtype=np.uint32)

    def close(self) -> None:
        """Unmaps everything; views of pages must be gone."""
        self._tier.close()

    @property
    def tier(self) -> DeviceTier:
        """Where extents are made. Extents that are mapped go through `add`."""
        return self._tier

    @property
    def device(self) -> str:
        """Where the pages are, as torch says it: "cpu" (a twin) or "cuda:0"."""
        return self._tier.device

    @property
    def base(self) -> int:
        """Address of page 0."""
        return self._tier.base

    @property
    def num_pages_reserved(self) -> int:
        """Pages that have an address; only the first `num_pages` have memory."""
        return self._tier.capacity_bytes // self.slot_bytes

    @property
    def num_pages(self) -> int:
        """Pages that have memory: the first ones."""
        return len(self._slot_of)

    @property
    def pages(self) -> U8:
        """The whole range of a twin, `[num_pages_reserved, slot_bytes]`, shared.

        Raises: FailedPrecondition for a GPU's, which the host cannot touch: see `read`.
        """
        if self.device != "cpu":
            raise FailedPrecondition(f"pages of {self.device} are not in host memory")
        return np.asarray(_HostPages(self))

    def mapped(self, slots: U32) -> bool:
        """Whether this process can reach all of these slots. O(n)."""
        span = span_of(slots, len(self._page_of))
        if span is not None:
            return bool((self._page_of[span] >= 0).all())
        return bool((slots < len(self._page_of)).all()) and bool((self._page_of.take(slots) >= 0).all())

    def page_of(self, slots: U32) -> NDArray[np.int32]:
        """[n] page of each slot. O(n)."""
        pages: NDArray[np.int32] = self._page_of[slots]
        return pages

    def slot_of(self, pages: NDArray[np.integer]) -> U32:
        """[n] slot of each page. O(n)."""
        slots: U32 = self._slot_of[pages]
        return slots

    def address_of(self, slots: U32) -> U64:
        """[n] addresses of these slots. O(n)."""
        pages = self._page_of[slots].astype(np.uint64)
        addresses: U64 = np.uint64(self._tier.base) + pages * np.uint64(self.slot_bytes)
        return addresses

    def view(self, slot: int) -> U8:
        """The bytes of one slot of a twin, `[slot_bytes]`, shared. Raises: as `pages`."""
        page: U8 = self.pages[int(self._page_of[slot])]
        return page

    def read(self, slot: int) -> bytes:
        """A copy of one slot's bytes, from whatever device. Waits for it."""
        return self._tier.read(self.base + int(self._page_of[slot]) * self.slot_bytes, self.slot_bytes)

    def write(self, slot: int, data: bytes) -> None:
        """Copies bytes to the beginning of a slot that the session fills, on whatever device. Waits for it."""
        self._tier.write(self.base + int(self._page_of[slot]) * self.slot_bytes, data)


class _HostPages:
    """What numpy views uncopied; the view keeps the memory's owner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: HbmMemory) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "shape": (owner.num_pages_reserved, owner.slot_bytes),
            "typestr": "|u1",
            "data": (owner.base, False),
            "version": 3,
        }
