"""Slots of one tier: which are free, given out, complete, and who holds them.

Owns the pool's columns and, beside them, the free lists by class (device and slot size). The order of writes is the
crash safety: holders before FILLING when a slot is given out, FREE before anything else is cleared when it comes back.
A slot whose `holders` word is not zero is never given out and never a victim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT, NONE, Columns, SlotState, Tier, states
from kvstore.moves import U32, U64
from kvstore.tables.runs import FreeRuns
from kvstore.tables.spans import span_of

__all__ = ["ClassKey", "Meter", "SlotClass", "SlotPool"]

_STATE_BITS = np.uint64(0xFF)
_ONE_GENERATION = np.uint64(1 << 8)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ClassKey:
    """Slots that are interchangeable."""

    device: int  # HBM device, NVMe path; 0 in DRAM
    slot_bytes: int


@dataclass(slots=True, kw_only=True)
class SlotClass:
    """The READY extents of one class."""

    key: ClassKey
    free: FreeRuns
    extents: list[int] = field(default_factory=list)
    slots: int = 0
    freed: bool = False
    """A slot became free or unheld since who waits for one was last looked at."""
    exhausted: bool = False
    """The last search for victims found none, and nothing has changed since."""


class Meter(Protocol):
    """Is told of complete blocks that a tier gets and loses (`kvstore.victims.quotas`)."""

    def gained(self, pool: SlotPool, slots: U32, /) -> None:
        """These slots, which name their rows, are SEALED now."""
        ...

    def lost(self, pool: SlotPool, slots: U32, /) -> None:
        """These, which still name their rows, are SEALED no more."""
        ...


class SlotPool:
    """All slots of one tier. Operations take arrays of slots and are vectorised; no duplicates where not said."""

    __slots__ = (
        "_class_of_extent",
        "_columns",
        "_fault",
        "_free",
        "_sizes",
        "classes",
        "extent",
        "holders",
        "meter",
        "row",
        "state",
        "tier",
    )

    def __init__(self, columns: Columns, tier: Tier, fault: Callable[[str], None]) -> None:
        pool = columns.pool(tier)
        self.tier = tier
        self.state, self.row, self.extent, self.holders = pool.state, pool.row, pool.extent, pool.holders
        self.meter: Meter | None = None
        self._columns = columns
        self._fault = fault
        self._free: NDArray[np.bool_] = states(pool.state) == SlotState.FREE
        self._class_of_extent: dict[int, SlotClass] = {}
        self.classes: dict[ClassKey, SlotClass] = {}
        of_tier = columns.extent_tier == tier
        self._sizes: set[int] = set(columns.extent_slot_bytes[of_tier].tolist()) - {0}

    def __len__(self) -> int:
        return len(self.state)

    # -- classes

    def class_of(self, key: ClassKey) -> SlotClass:
        """The class, made when it is new."""
        found = self.classes.get(key)
        if found is None:
            found = self.classes[key] = SlotClass(key=key, free=FreeRuns(self._free))
            self._sizes.add(key.slot_bytes)
        return found

    def open_extent(self, extent: int) -> None:
        """A READY extent gives out its slots from now on."""
        columns = self._columns
        key = ClassKey(
            device=int(columns.extent_device[extent]), slot_bytes=int(columns.extent_slot_bytes[extent])
        )
        base, slots = int(columns.extent_slot_base[extent]), int(columns.extent_slots[extent])
        owner = self.class_of(key)
        owner.free.add_range(base, slots)
        owner.extents.append(extent)
        owner.slots += slots
        owner.freed, owner.exhausted = True, False
        self._class_of_extent[extent] = owner

    def close_extent(self, extent: int) -> None:
        """An extent gives out no more slots."""
        owner = self._class_of_extent.pop(extent, None)
        if owner is None:
            return
        owner.free.remove_range(int(self._columns.extent_slot_base[extent]))
        owner.extents.remove(extent)
        owner.slots -= int(self._columns.extent_slots[extent])

    def slot_bytes(self, slots: U32) -> U64:
        """[n] size of each slot."""
        sizes: U64 = self._columns.extent_slot_bytes.take(self.extent.take(slots))
        return sizes

    def is_all_of(self, slot_bytes: int) -> bool:
        """Whether no slot here has, or ever had, another size."""
        return self._sizes == {slot_bytes}

    def devices(self, slots: U32) -> NDArray[np.uint8]:
        """[n] device or path of each slot."""
        found: NDArray[np.uint8] = self._columns.extent_device.take(self.extent.take(slots))
        return found

    # -- states

    def states(self, slots: U32) -> NDArray[np.uint8]:
        """[n] SlotState."""
        return states(self._words(slots))

    def generations(self, slots: U32) -> U32:
        """[n] low 32 bits of the generations."""
        return (self._words(slots) >> GENERATION_SHIFT).astype(np.uint32)

    def sealed(self, slots: U32) -> NDArray[np.bool_]:
        """[n] whether each (NONE allowed) holds a complete block."""
        return self._is(slots, SlotState.SEALED)

    def filling(self, slots: U32) -> NDArray[np.bool_]:
        """[n] whether each (NONE allowed) is being filled."""
        return self._is(slots, SlotState.FILLING)

    def distrusted(self, slots: U32) -> NDArray[np.bool_]:
        """[n] whether each (NONE allowed) holds a block that was found wrong."""
        return self._is(slots, SlotState.DISTRUSTED)

    def _is(self, slots: U32, wanted: SlotState) -> NDArray[np.bool_]:
        span = span_of(slots, len(self.state))
        if span is not None:
            run: NDArray[np.bool_] = (self.state[span] & _STATE_BITS) == np.uint64(wanted)
            return run
        known = slots != NONE
        safe = slots if known.all() else np.where(known, slots, np.uint32(0))
        same: NDArray[np.bool_] = (self.state.take(safe) & _STATE_BITS) == np.uint64(wanted)
        return same if safe is slots else known & same

    def _words(self, slots: U32) -> U64:
        """[n] state words: a view of them where the slots are one run."""
        span = span_of(slots, len(self.state))
        words: U64 = self.state.take(slots) if span is None else self.state[span]
        return words

    # -- life of a slot

    def allocate(self, owner: SlotClass, count: int, holder: np.uint64) -> U32:
        """Up to `count` free slots, FILLING, held by `holder` (0 in NVMe), without a row."""
        slots = owner.free.take(count)
        if not len(slots):
            return slots
        self.row[slots] = NONE
        if len(self.holders):
            self.holders[slots] = holder
            self._fault("slots.held")
        self.state[slots] = (self.state[slots] & ~_STATE_BITS) | np.uint64(SlotState.FILLING)
        self._fault("slots.filling")
        return slots

    def claim(self, slots: U32) -> None:
        """Free slots that are known to hold something are no longer given out; their state is the caller's."""
        for extent, of_extent in self._by_extent(slots):
            owner = self._class_of_extent.get(extent)
            if owner is None:
                self._free[of_extent] = False
            else:
                owner.free.claim(of_extent)

    def set_state(self, slots: U32, state: SlotState) -> None:
        """Changes the state of slots that stay in use; the generation stays."""
        if self.meter is not None:
            self._measure(self.meter, slots, state)
        self.state[slots] = (self.state[slots] & ~_STATE_BITS) | np.uint64(state)

    def quarantine(self, slots: U32) -> None:
        """Slots whose medium failed are never given out again."""
        self.set_state(slots, SlotState.QUARANTINED)
        self.row[slots] = NONE

    def free(self, slots: U32) -> None:
        """Slots come back under the next generation. Nobody holds them, or the holder has just let go."""
        if not len(slots):
            return
        if self.meter is not None:
            self._measure(self.meter, slots, SlotState.FREE)
        self.state[slots] = (self.state[slots] & ~_STATE_BITS) + _ONE_GENERATION
        self._fault("slots.free")
        self.row[slots] = NONE
        if len(self.holders):
            self.holders[slots] = 0
        for extent, of_extent in self._by_extent(slots):
            owner = self._class_of_extent.get(extent)
            if owner is None:  # draining: free, but not to be given out
                self._free[of_extent] = True
            else:
                owner.free.give(of_extent)
                owner.freed = True

    def _measure(self, meter: Meter, slots: U32, state: SlotState) -> None:
        """Before their states change."""
        was = self.sealed(slots)
        if state is SlotState.SEALED:
            meter.gained(self, slots[~was])
        elif was.any():
            meter.lost(self, slots[was])

    # -- holders

    def held(self, slots: U32, holder: np.uint64) -> NDArray[np.bool_]:
        """[n] whether each slot has this bit."""
        span = span_of(slots, len(self.holders))
        words = self.holders.take(slots) if span is None else self.holders[span]
        found: NDArray[np.bool_] = (words & holder) != 0
        return found

    def hold(self, slots: U32, holder: np.uint64) -> None:
        """Sets a bit of each slot; duplicates allowed."""
        span = span_of(slots, len(self.holders))
        if span is None:
            self.holders[slots] = self.holders.take(slots) | holder
        else:
            self.holders[span] |= holder
        self._fault("slots.hold")

    def unhold(self, slots: U32, holder: np.uint64) -> None:
        """Clears a bit of each slot."""
        span = span_of(slots, len(self.holders))
        if span is None:
            self.holders[slots] = self.holders.take(slots) & ~holder
        else:
            self.holders[span] &= ~holder
        self.note_unheld(slots)

    def held_by(self, holder: np.uint64) -> U32:
        """Every slot with this bit. O(slots)."""
        return np.flatnonzero(self.holders & holder).astype(np.uint32)

    def note_unheld(self, slots: U32) -> None:
        """Some of these may be victims now: searches that found none make sense again."""
        for extent, _ in self._by_extent(slots):
            owner = self._class_of_extent.get(extent)
            if owner is not None:
                owner.freed, owner.exhausted = True, False

    def _by_extent(self, slots: U32) -> list[tuple[int, U32]]:
        """The slots of each extent."""
        if not len(slots):
            return []
        span = span_of(slots, len(self.extent))
        extents = self.extent.take(slots) if span is None else self.extent[span]
        if np.count_nonzero(extents == extents[0]) == len(slots):
            return [(int(extents[0]), slots)]
        return [(extent, slots[extents == extent]) for extent in np.unique(extents).tolist()]
