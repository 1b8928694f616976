"""Blocks found on disk at a start, taken over while the store serves: rows and NVMe slots for them, a piece at a time.

    begin    slabs become extents that give nothing out, rows are put aside: a plan, by which others build the columns
    copies   the columns of the rows put aside, which nobody looks at: to be done by any thread, memory to memory
    turns    index, doubles, slots with their rows: bounded pieces on the owner's loop, between its calls
    cancel   instead of the last two

A row is a hit only once its state says so, which is the last write of all; entries of the index that come before it
lead to a row that is FREE, which is a miss. A kill at any point leaves what `reconcile` undoes, and the load is done
again (`kvstore.daemon.nvme.SlabTable` remembers that it was not finished).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KvstoreError, ResourceExhausted
from kvstore.layout import NONE, SlotState, State, Tier, states
from kvstore.moves import U32, ExtentId
from kvstore.state import StoreState
from kvstore.tables.index import look_up
from kvstore.tables.prebuilt import LoadPlan, Prebuilt, SlabSlots

__all__ = ["FIRST_COLUMNS", "LAST_COLUMNS", "LoadSlab", "Loading", "RowCopy"]

FIRST_COLUMNS = ("hash", "namespace", "depth", "touch")
"""Of rows, known before the index is built."""
LAST_COLUMNS = ("parent", "nvme")
"""Of rows, known once it is."""

_BUCKETS_A_TURN = 4096
_SLOTS_A_TURN = 1 << 12
_ROWS_A_TURN = 1 << 12
_COPY_BYTES = 1 << 20
_LEAST_RUN = 16  # rows: shorter runs are left to the blocks of sessions
_SPARE_ROWS = 64  # one in so many stays free
_STATE_BITS = np.uint64(0xFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSlab:
    """A slab that becomes an extent."""

    slab: int
    nbytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """Elements of a column of what was built, and where in the store's tables they go."""

    source: NDArray[np.generic]
    target: NDArray[np.generic]


class Loading:
    """One path's blocks on their way into the store. Owner loop only, `copies` apart."""

    __slots__ = ("_bases", "_cleared", "_extents", "_firsts", "_state", "_wrong", "loaded", "path", "plan")

    def __init__(self, state: StoreState, path: int, slabs: Sequence[LoadSlab], blocks: int) -> None:
        """Puts extents and rows aside: fewer than slabs and blocks where the tables have no more; the plan says so."""
        self._state = state
        self.path = path
        self._extents: list[tuple[ExtentId, SlabSlots]] = []
        self._cleared: set[int | None] = set()
        self._wrong: set[int] = set()  # first words of hashes
        self.loaded = 0
        """Blocks entered so far."""
        first = 0
        for slab in slabs:
            with contextlib.suppress(KvstoreError):  # no room in the tables, or no size that a slot can have
                first += self._add(slab, first)
        runs = state.table.runs.take_runs(min(blocks, self._rows_to_spare()), least=_LEAST_RUN)
        self.plan = LoadPlan(
            runs=tuple(runs),
            slabs=tuple(slots for _, slots in self._extents),
            buckets=state.columns.shape.buckets,
            latest_touch=(state.now_ms << 20) | ((1 << 20) - 1),
        )
        slots = sorted(self.plan.slabs, key=lambda slab: slab.base)
        self._bases = np.array([slab.base for slab in slots], dtype=np.int64)
        self._firsts = np.array([slab.first for slab in slots], dtype=np.int64)
        state.loads.append(self)

    def _rows_to_spare(self) -> int:
        table = self._state.table
        return max(0, len(table.runs) - self._state.columns.shape.max_rows // _SPARE_ROWS)

    def _add(self, slab: LoadSlab, first: int) -> int:
        """The slab's extent, cut and closed; returns its slots."""
        state, extents = self._state, self._state.extents
        extent = extents.add(Tier.NVME, self.path, slab.nbytes)
        cut = None
        try:
            extents.check_class(extent, slab.slot_bytes)
            cut = extents.assign(extent, slab.slot_bytes)
        finally:
            if cut is None:
                extents.remove(extent)
        if cut is None:
            raise ResourceExhausted("the tables have too few nvme slots left for this extent")
        extents.hold_back(extent)
        state.fault("load.extent")
        self._extents.append((extent, SlabSlots(slab=slab.slab, first=first, base=cut[0], slots=cut[1])))
        return cut[1]

    @property
    def extents(self) -> Mapping[int, ExtentId]:
        """Extent of each slab."""
        return {slots.slab: extent for extent, slots in self._extents}

    def clear(self, namespace: int | None) -> None:
        """What a namespace (None: every one) has is not to be entered any more: all of it was there before."""
        self._cleared.add(namespace)

    def leave_out_block(self, block: bytes) -> None:
        """A block (its hash) that was found wrong is not to be entered."""
        self._wrong.add(int.from_bytes(block[:8], "little"))

    # ------------------------------------------------------------ memory to memory

    def copies(self, built: Prebuilt, names: Sequence[str]) -> Iterator[RowCopy]:
        """Pieces of at most 1 MiB of these columns (FIRST_COLUMNS or LAST_COLUMNS).

        What they write nobody reads before `turns`: rows that are FREE and put aside.
        """
        pairs: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = [
            (getattr(built, name), getattr(self._state.columns, name)) for name in names
        ]
        at = 0
        for first, count in self.plan.runs:
            for source, target in pairs:
                step = _COPY_BYTES // (target.itemsize * (target.shape[1] if target.ndim > 1 else 1))
                for begin in range(0, count, step):
                    end = min(begin + step, count)
                    yield RowCopy(
                        source=source[at + begin : at + end], target=target[first + begin : first + end]
                    )
            at += count

    # ------------------------------------------------------------ turns

    def turns(self, built: Prebuilt) -> Iterator[None]:
        """Enters what was built and copied; each step is a fraction of a millisecond. Ends with the extents in use."""
        self._state.fault("load.copied")
        for first in range(0, self.plan.buckets, _BUCKETS_A_TURN):
            self._merge_index(built, first)
            yield
        for base, size in self._state.table.runs.spans():
            yield from self._settle_doubles(built, base, size)
        for extent, slots in self._extents:
            for first in range(0, slots.slots, _SLOTS_A_TURN):
                self._enter(built, slots, first)
                yield
            self._state.extents.let_go(extent)
            self._state.pool(Tier.NVME).open_extent(extent)
            self._state.fault("load.extent_open")
        yield from self._give_back()
        self._state.counters["loaded_blocks"] += self.loaded
        self._state.loads.remove(self)

    def _merge_index(self, built: Prebuilt, first: int) -> None:
        """Some buckets: as they were built where the store has nothing there, else entry by entry."""
        columns, table = self._state.columns, self._state.table
        last = first + _BUCKETS_A_TURN
        entries, tags = columns.rows[first:last], columns.tags[first:last]
        new = built.entries[first:last]
        if (entries == NONE).all():
            tags[:] = built.tags[first:last]
            entries[:] = new
            return
        empty = (entries == NONE).all(axis=1)
        tags[empty] = built.tags[first:last][empty]
        entries[empty] = new[empty]
        rows = new[~empty]
        rows = rows[rows != NONE]
        if len(rows):
            placed = table.index.insert(columns.hash[rows], rows)
            self._leave_out(rows[~placed])

    def _settle_doubles(self, built: Prebuilt, base: int, size: int) -> Iterator[None]:
        """Blocks that sessions have stored meanwhile, or are about to: see `_settle`.

        Every entry is in the index by now, so no more of them can come.
        """
        columns, runs = self._state.columns, self._state.table.runs
        for at in range(base, base + size, _ROWS_A_TURN):
            end = min(at + _ROWS_A_TURN, base + size)
            if not runs.is_free()[at:end].all():
                used = (np.flatnonzero(states(columns.state[at:end]) != State.FREE) + at).astype(np.uint32)
                if len(used):
                    found = look_up(built.tags, built.entries, columns.hash, columns.hash[used])
                    double = (found != NONE) & (found != used)
                    double[double] = states(columns.state[found[double]]) == State.FREE
                    if double.any():
                        self._settle(built, used[double], found[double])
                yield

    def _settle(self, built: Prebuilt, used: U32, found: U32) -> None:
        """Of rows of one block the one that a session has stays where it is complete, with the copy that the disk has,
        as where a block is computed again (`Sealing`); where it is only being filled, it goes.

        Were the disk to forget its copy, what a flush has acknowledged would be in memory alone until it was written
        once more, and nowhere where its worker died before it was computed.
        """
        state, columns = self._state, self._state.columns
        slots = columns.nvme[found]
        good = (slots != NONE) & (columns.namespace[used] == columns.namespace[found])
        good &= ~self._is_cleared(found)
        stays = good & state.table.sealed(used) & (columns.nvme[used] == NONE)
        filling = used[good & state.table.filling(used)]
        for device in range(columns.shape.devices):
            fills = columns.hbm[device, filling]
            state.unlink_fills(fills[fills != NONE])
        gone = good & (states(columns.state[used]) == State.FREE)
        self._complete(built, used[stays], slots[stays])
        state.table.index.remove(columns.hash[found[~gone]], found[~gone])
        self._leave_out(found[~gone])

    def _complete(self, built: Prebuilt, rows: U32, slots: U32) -> None:
        """Rows that are hits already have a copy on disk, too."""
        if not len(rows):
            return
        state = self._state
        slab = np.searchsorted(self._bases, slots, side="right") - 1
        words = built.slot_state[self._firsts[slab] + slots - self._bases[slab]]
        state.nvme.claim(slots)
        state.nvme.state[slots] = (words & ~_STATE_BITS) | np.uint64(SlotState.FILLING)
        state.fault("load.double")
        state.complete(Tier.NVME, rows, slots, 0)
        self.loaded += len(rows)

    def _enter(self, built: Prebuilt, slab: SlabSlots, first: int) -> None:
        """Some slots of a slab become SEALED together with their rows, whose word is the last write."""
        state, columns, pool = self._state, self._state.columns, self._state.nvme
        last = min(first + _SLOTS_A_TURN, slab.slots)
        rows = built.slot_row[slab.first + first : slab.first + last]
        words = built.slot_state[slab.first + first : slab.first + last]
        at = np.flatnonzero(rows != NONE)
        rows, words = rows[at], words[at]
        slots = (at + (slab.base + first)).astype(np.uint32)
        good = columns.nvme[rows] == slots
        if self._cleared or self._wrong:
            gone = good & self._is_cleared(rows)
            state.table.index.remove(columns.hash[rows[gone]], rows[gone])
            self._leave_out(rows[gone])
            good &= ~gone
        state.nvme_changed[slots[~good]] = 1  # the durable index shall forget them
        rows, slots = rows[good], slots[good]
        pool.claim(slots)
        pool.row[slots] = rows
        state.fault("load.slots")
        pool.state[slots] = words[good]
        if pool.meter is not None:
            pool.meter.gained(pool, slots)
        state.fault("load.sealed")
        state.table.born[rows] = 0  # all of one load: their parents are not later than they
        columns.state[rows] |= np.uint64(State.SEALED)
        state.fault("load.rows")
        state.rankings.strangers_came(Tier.NVME)
        self.loaded += len(rows)

    def _is_cleared(self, rows: U32) -> NDArray[np.bool_]:
        columns = self._state.columns
        gone = np.full(len(rows), None in self._cleared, dtype=np.bool_)
        for namespace in self._cleared - {None}:
            gone |= columns.namespace[rows] == namespace
        if self._wrong:
            gone |= np.isin(columns.hash[rows, 0], np.fromiter(self._wrong, dtype=np.uint64))
        return gone

    def _leave_out(self, rows: U32) -> None:
        """Rows that are not in the index (any more) stay FREE, and their slots too."""
        if len(rows):
            self._state.columns.nvme[rows] = NONE

    def _give_back(self) -> Iterator[None]:
        """Rows put aside that hold nothing are anybody's again."""
        columns, runs = self._state.columns, self._state.table.runs
        for first, count in self.plan.runs:
            for at in range(first, first + count, _ROWS_A_TURN):
                end = min(at + _ROWS_A_TURN, first + count)
                unused = states(columns.state[at:end]) == State.FREE
                unused &= ~runs.is_free()[at:end]
                rows = (np.flatnonzero(unused) + at).astype(np.uint32)
                if len(rows):
                    columns.hash[rows] = 0
                    columns.nvme[rows] = NONE
                    runs.give(rows)
                yield

    # ------------------------------------------------------------ or not

    def cancel(self) -> None:
        """Nothing comes: what was put aside is given back. Not after the first of `turns`."""
        for _ in self._give_back():
            pass
        self._drop_extents()
        self._state.loads.remove(self)

    def _drop_extents(self) -> None:
        for extent, _ in self._extents:
            self._state.extents.remove(extent)
        self._extents.clear()
