"""Tables of blocks that storage has, built outside the daemon and taken over by it: what they are, how they are built.

A process of its own fills this memory from a durable index: the columns of rows and slots that the daemon has put
aside, and an index over them, placed bucket by bucket. What is left for the daemon is to copy (`tiering.loading`). The
rows of one load are positions 0, 1, …, in the order in which they shall lie; `LoadPlan` says which row each is. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument
from kvstore.layout import BUCKET_ENTRIES, GENERATION_SHIFT, NONE, SlotState
from kvstore.moves import U32, U64
from kvstore.tables.index import enter, look_up, tags_of

__all__ = ["Blocks", "LoadPlan", "Prebuilder", "Prebuilt", "SlabSlots", "open_prebuilt", "prebuilt_bytes"]

_ALIGN = 4096
_WINDOW = 1 << 18  # entries of the index placed at once: what they need stays in the processor's caches
_NO_PARENT = np.uint32(NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSlots:
    """The slots of one slab: numbers of the store from `base` on, and of the load from `first` on."""

    slab: int
    first: int
    base: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What the daemon has put aside for one load."""

    runs: tuple[tuple[int, int], ...]
    """Rows as (first row, rows): position 0 is the first row of the first run."""
    slabs: tuple[SlabSlots, ...]
    buckets: int
    """Of the store's index: the one that is built has as many."""
    latest_touch: int
    """No block counts as used later than this, whatever a clock once said."""

    @property
    def rows(self) -> int:
        """Rows put aside."""
        return sum(count for _, count in self.runs)

    @property
    def slots(self) -> int:
        """Slots of all slabs."""
        return sum(slab.slots for slab in self.slabs)

    def rows_of(self, positions: NDArray[np.integer]) -> U32:
        """[n] row of each position. O(n log runs)."""
        if len(self.runs) == 1:
            return (positions + self.runs[0][0]).astype(np.uint32)
        bases = np.array([base for base, _ in self.runs], dtype=np.int64)
        firsts = np.cumsum([0, *(count for _, count in self.runs)])
        run = np.searchsorted(firsts, positions, side="right") - 1
        rows: U32 = (bases[run] + positions - firsts[run]).astype(np.uint32)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Prebuilt:
    """The columns, as views of the memory that is handed over."""

    hash: U64  # [rows, 2] zeros: the position is not used
    namespace: U32  # [rows]
    parent: U32  # [rows] row, or NONE
    depth: U32  # [rows]
    touch: U64  # [rows]
    nvme: U32  # [rows] slot of the store, NONE where the position is not used
    slot_state: U64  # [slots] in the load's own numbers; 0 where the slot holds no block
    slot_row: U32  # [slots] NONE where the slot holds no block
    tags: U32  # [buckets, BUCKET_ENTRIES]
    entries: U32  # [buckets, BUCKET_ENTRIES] rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Some blocks of one slab, [n] each."""

    hashes: U64  # [n, 2]
    parents: U64  # [n, 2]
    namespaces: U32
    depths: U32
    touches: U64
    slots: U32  # within the slab
    generations: U32


def _columns(plan: LoadPlan) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield "hash", "<u8", (plan.rows, 2)
    yield "namespace", "<u4", (plan.rows,)
    yield "parent", "<u4", (plan.rows,)
    yield "depth", "<u4", (plan.rows,)
    yield "touch", "<u8", (plan.rows,)
    yield "nvme", "<u4", (plan.rows,)
    yield "slot_state", "<u8", (plan.slots,)
    yield "slot_row", "<u4", (plan.slots,)
    yield "tags", "<u4", (plan.buckets, BUCKET_ENTRIES)
    yield "entries", "<u4", (plan.buckets, BUCKET_ENTRIES)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    raw = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return -(-raw // _ALIGN) * _ALIGN


def prebuilt_bytes(plan: LoadPlan) -> int:
    """Bytes of the memory that is handed over, a multiple of 4096."""
    return max(_ALIGN, sum(_nbytes(dtype, shape) for _, dtype, shape in _columns(plan)))


def open_prebuilt(memory: memoryview, plan: LoadPlan) -> Prebuilt:
    """Views of the columns. Raises InvalidArgument where the memory is too short for the plan."""
    if len(memory) < prebuilt_bytes(plan):
        raise InvalidArgument(f"what was built has {len(memory)} bytes, not {prebuilt_bytes(plan)}")
    views: dict[str, NDArray[np.generic]] = {}
    offset = 0
    for name, dtype, shape in _columns(plan):
        count = int(np.prod(shape, dtype=np.int64))
        views[name] = np.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)
        offset += _nbytes(dtype, shape)
    assert set(views) == {field.name for field in fields(Prebuilt)}
    return Prebuilt(**views)  # type: ignore[arg-type]


class Prebuilder:
    """Fills memory that is all zeros: `fill` for each part, in any order, then `finish`."""

    __slots__ = ("_built", "_filled", "_missing_at", "_missing_hashes", "_plan")

    def __init__(self, memory: memoryview, plan: LoadPlan) -> None:
        self._built = open_prebuilt(memory, plan)
        self._plan = plan
        self._filled = 0
        self._missing_at: list[NDArray[np.int64]] = []
        self._missing_hashes: list[U64] = []
        """Blocks whose parent is not the block before them: found when all are there."""

    def fill(self, at: NDArray[np.int64], blocks: Blocks, slab: SlabSlots) -> None:
        """These blocks are at these positions; all positions together are 0 to n - 1, each once. O(n)."""
        built = self._built
        place = _run(at)
        built.hash[place] = blocks.hashes
        built.namespace[place] = blocks.namespaces
        built.depth[place] = blocks.depths
        built.touch[place] = np.minimum(blocks.touches, np.uint64(self._plan.latest_touch))
        built.nvme[place] = blocks.slots + np.uint32(slab.base)
        rows = self._plan.rows_of(at)
        own = _run(blocks.slots.astype(np.int64) + slab.first)
        built.slot_row[own] = rows
        words = blocks.generations.astype(np.uint64) << GENERATION_SHIFT
        built.slot_state[own] = words | np.uint64(SlotState.SEALED)
        self._link(at, rows, blocks)
        self._filled += len(at)

    def _link(self, at: NDArray[np.int64], rows: U32, blocks: Blocks) -> None:
        """Parents: mostly the block in the slot before; what is not a root and has another one is found later."""
        follows = np.zeros(len(at), dtype=np.bool_)
        follows[1:] = _same(blocks.parents[1:], blocks.hashes[:-1])
        self._built.parent[at] = np.where(follows, np.concatenate(([_NO_PARENT], rows[:-1])), _NO_PARENT)
        missing = ~follows & ((blocks.parents[:, 0] | blocks.parents[:, 1]) != 0)
        if missing.any():
            self._missing_at.append(at[missing])
            self._missing_hashes.append(blocks.parents[missing])

    def finish(self) -> int:
        """Builds the index and finds the parents; returns how many blocks there are.

        Of a block that stands twice the later position stays; what the index has no place for is left out.
        """
        built, count = self._built, self._filled
        built.entries.fill(NONE)
        hashes = built.hash[:count]
        placed = _fill_index(built.tags, built.entries, hashes)
        if self._missing_at:
            at = np.concatenate(self._missing_at)
            found = look_up(built.tags, built.entries, hashes, np.concatenate(self._missing_hashes))
            built.parent[at[found != NONE]] = self._plan.rows_of(found[found != NONE].astype(np.int64))
        self._leave_out(np.flatnonzero(~placed))
        self._name_rows()
        return int(np.count_nonzero(placed))

    def _leave_out(self, gone: NDArray[np.int64]) -> None:
        """These positions, and those that were never filled, hold nothing."""
        built = self._built
        built.nvme[self._filled :] = NONE
        used = built.slot_state != 0
        if len(gone):
            slots = built.nvme[gone].astype(np.int64)
            for slab in self._plan.slabs:
                here = slots[(slots >= slab.base) & (slots < slab.base + slab.slots)] - slab.base + slab.first
                used[here] = False
                built.slot_state[here] = 0
            built.nvme[gone] = NONE
            built.hash[gone] = 0
        built.slot_row[~used] = NONE

    def _name_rows(self) -> None:
        """Entries were positions until now."""
        flat, plan = self._built.entries.reshape(-1), self._plan
        for at in range(0, len(flat), _WINDOW):
            part = flat[at : at + _WINDOW]
            used = part != NONE
            if len(plan.runs) == 1:
                np.add(part, np.uint32(plan.runs[0][0]), out=part, where=used)
            else:
                part[used] = plan.rows_of(part[used].astype(np.int64))


def _fill_index(tags: U32, entries: U32, hashes: U64) -> NDArray[np.bool_]:
    """Enters positions 0 to n - 1 into an empty index; [n] whether each was. O(n log n), one pass of it a sort.

    Entries lie in a hash's first bucket while it has room, which is where a lookup begins: sorted by bucket they are
    written one after the other, where entering them one by one waits for memory twice a hash.
    """
    n = len(hashes)
    placed = np.ones(n, dtype=np.bool_)
    if not n:
        return placed
    bits, bucket_bits = n.bit_length(), (len(tags) - 1).bit_length()
    more = 64 - bits - bucket_bits  # bits of the tag, so that a block that stands twice lies beside itself
    keys = (hashes[:, 0] & np.uint64(len(tags) - 1)) << np.uint64(64 - bucket_bits)
    keys |= (hashes[:, 1] >> np.uint64(64 - more)) << np.uint64(bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    own_tags = tags_of(hashes)  # gathered from 4 bytes a block, not from 16
    late: list[NDArray[np.int64]] = []
    at = 0
    while at < n:
        end = n
        if at + _WINDOW < n:  # to the end of a bucket
            following = (int(keys[at + _WINDOW]) >> (64 - bucket_bits)) + 1
            if following < len(tags):
                end = int(np.searchsorted(keys, np.uint64(following << (64 - bucket_bits))))
        late.append(_fill_window(tags, entries, hashes, own_tags, keys[at:end], bits, bucket_bits, placed))
        at = end
    rest = np.concatenate(late)
    if len(rest):
        entered = enter(tags, entries, hashes[rest], rest.astype(np.uint32))
        for at in rest[~entered]:
            placed[at] = _make_place(tags, entries, hashes, at)
    return placed


def _make_place(tags: U32, entries: U32, hashes: U64, at: np.int64) -> bool:
    """Both buckets of a hash are full: one entry of them goes to its other bucket, where that has room."""
    mask = np.uint64(len(tags) - 1)
    for bucket in (hashes[at] & mask).tolist():
        pairs = hashes[entries[bucket]] & mask  # [BUCKET_ENTRIES, 2]
        others = np.where(pairs[:, 0] == bucket, pairs[:, 1], pairs[:, 0]).astype(np.int64)
        room = np.flatnonzero((entries[others] == NONE).any(axis=1))
        if len(room):
            moved, target = room[0], others[room[0]]
            free = int((entries[target] == NONE).argmax())
            tags[target, free], entries[target, free] = tags[bucket, moved], entries[bucket, moved]
            tags[bucket, moved], entries[bucket, moved] = tags_of(hashes[at : at + 1])[0], at
            return True
    return False


def _fill_window(
    tags: U32,
    entries: U32,
    hashes: U64,
    own_tags: U32,
    keys: U64,
    bits: int,
    bucket_bits: int,
    placed: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Places what these sorted keys name; returns the positions that have no place in their first bucket."""
    at = (keys & np.uint64((1 << bits) - 1)).astype(np.int64)
    near = keys >> np.uint64(bits)
    alike = np.flatnonzero(near[1:] == near[:-1])
    if len(alike):
        alike = alike[_same(hashes[at[alike]], hashes[at[alike + 1]])]
        placed[at[alike]] = False
        at, keys = np.delete(at, alike), np.delete(keys, alike)
    bucket = (keys >> np.uint64(64 - bucket_bits)).astype(np.int64)
    starts = np.flatnonzero(np.concatenate(([True], bucket[1:] != bucket[:-1])))
    rank = np.arange(len(at)) - np.repeat(starts, np.diff(np.append(starts, len(at))))
    fits = rank < BUCKET_ENTRIES
    target = (bucket * BUCKET_ENTRIES + rank)[fits]
    tags.reshape(-1)[target] = own_tags[at[fits]]
    entries.reshape(-1)[target] = at[fits]
    return at[~fits]


def _run(at: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """The same positions, as a slice where they are one run: written at twice the speed."""
    if len(at) and (at[1:] - at[:-1] == 1).all():
        return slice(int(at[0]), int(at[-1]) + 1)
    return at


def _same(left: U64, right: U64) -> NDArray[np.bool_]:
    """[n] whether hashes are equal."""
    same: NDArray[np.bool_] = (left[:, 0] == right[:, 0]) & (left[:, 1] == right[:, 1])
    return same
