"""Extents: the memory of a tier, given to one slot class at a time.

Owns the extents table and the ranges of slot ids. An extent is UNASSIGNED until a class of slot size needs it, READY
while it is cut into slots, DRAINING when it shall change class or leave; only an extent without a used slot changes.
Slot ids are dense per tier; generations live on in the state words, so an id that now lies elsewhere is never taken
for what it was.
"""

from __future__ import annotations

import numpy as np

from kvstore.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from kvstore.layout import NONE, Columns, ExtentState, Tier
from kvstore.moves import ExtentId

__all__ = ["TRAILER_BYTES", "Extents"]

TRAILER_BYTES = 4096
"""Behind each slot on NVMe."""

# Reading a member of an enum takes longer than comparing a column with it, and each tick of the daemon asks.
_FREE = int(ExtentState.FREE)
_DRAINING = int(ExtentState.DRAINING)


class Extents:
    """Operations on the extents columns. All O(extents) or O(slots of one extent)."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def add(
        self, tier: Tier, device: int, nbytes: int, extent: int | None = None, identity: int = 0
    ) -> ExtentId:
        """Enters memory that nobody uses yet. `identity`: digest of the device that it is of.

        `extent` asks for one position (an NVMe slab that is found again). Raises: ResourceExhausted when the table is
        full; InvalidArgument for a taken or impossible position, device or size.
        """
        columns = self._columns
        if nbytes <= 0 or nbytes % 4096:
            raise InvalidArgument(f"an extent is a positive multiple of 4096 bytes, not {nbytes}")
        if not 0 <= device < 255 or (tier is Tier.HBM and device >= columns.shape.devices):
            raise InvalidArgument(f"no device {device} in tier {tier.name.lower()}")
        free = np.flatnonzero(columns.extent_state == ExtentState.FREE)
        if extent is None:
            if not len(free):
                raise ResourceExhausted(f"all {columns.shape.max_extents} extents are in use")
            extent = int(free[0])
        elif not 0 <= extent < columns.shape.max_extents or columns.extent_state[extent] != ExtentState.FREE:
            raise InvalidArgument(f"extent {extent} is in use or out of range")
        columns.extent_tier[extent] = tier
        columns.extent_device[extent] = device
        columns.extent_bytes[extent] = nbytes
        columns.extent_identity[extent] = identity
        columns.extent_slot_bytes[extent] = 0
        columns.extent_slot_base[extent] = NONE
        columns.extent_slots[extent] = 0
        columns.extent_state[extent] = ExtentState.UNASSIGNED
        return ExtentId(extent)

    def assign(self, extent: int, slot_bytes: int) -> tuple[int, int] | None:
        """Cuts an UNASSIGNED extent into slots: (first id, slots), or None where no ids are left for it.

        Where ids are short it is cut into fewer slots than fit: the table was sized for larger ones.
        """
        columns = self._columns
        tier = self.tier(extent)
        stride = slot_bytes + (TRAILER_BYTES if tier is Tier.NVME else 0)
        slots = int(columns.extent_bytes[extent]) // stride
        base, slots = self._free_range(tier, slots)
        if not slots:
            return None
        columns.pool(tier).extent[base : base + slots] = extent
        columns.extent_slot_bytes[extent] = slot_bytes
        columns.extent_slot_base[extent] = base
        columns.extent_slots[extent] = slots
        columns.extent_state[extent] = ExtentState.READY
        return base, slots

    def unassign(self, extent: int) -> None:
        """Takes the slots of an extent away; all of them are free."""
        columns = self._columns
        columns.extent_state[extent] = ExtentState.UNASSIGNED
        columns.extent_slot_bytes[extent] = 0
        columns.extent_slot_base[extent] = NONE
        columns.extent_slots[extent] = 0

    def hold_back(self, extent: int) -> None:
        """A READY extent of which nothing was given out yet gives out nothing until `let_go`."""
        self._columns.extent_state[extent] = ExtentState.LOADING

    def let_go(self, extent: int) -> None:
        """What a LOADING extent holds is known."""
        self._columns.extent_state[extent] = ExtentState.READY

    def drain(self, extent: int) -> None:
        """From now on the extent gives out no slots."""
        self._columns.extent_state[extent] = ExtentState.DRAINING

    def remove(self, extent: int) -> None:
        """The memory is gone. The extent is UNASSIGNED, or all its slots are free."""
        self._columns.extent_state[extent] = ExtentState.FREE
        self._columns.extent_slots[extent] = 0

    def require(self, extent: int) -> Tier:
        """Tier of an extent that exists. Raises: NotFound."""
        columns = self._columns
        if not 0 <= extent < columns.shape.max_extents or columns.extent_state[extent] == ExtentState.FREE:
            raise NotFound(f"no extent {extent}")
        return self.tier(extent)

    def tier(self, extent: int) -> Tier:
        """Tier of an extent."""
        return Tier(int(self._columns.extent_tier[extent]))

    def state(self, extent: int) -> ExtentState:
        """State of an extent."""
        return ExtentState(int(self._columns.extent_state[extent]))

    def range(self, extent: int) -> tuple[int, int]:
        """(first slot id, slots) of an extent that is cut; (0, 0) of another."""
        slots = int(self._columns.extent_slots[extent])
        return (int(self._columns.extent_slot_base[extent]), slots) if slots else (0, 0)

    def of(self, tier: Tier, device: int | None = None, state: ExtentState | None = None) -> list[int]:
        """Extents of a tier (and device, and state), ascending."""
        columns = self._columns
        wanted = (columns.extent_state != _FREE) & (columns.extent_tier == tier)
        if device is not None:
            wanted &= columns.extent_device == device
        if state is not None:
            wanted &= columns.extent_state == state
        found: list[int] = np.flatnonzero(wanted).tolist()
        return found

    @property
    def draining(self) -> bool:
        """Whether any extent drains."""
        return bool((self._columns.extent_state == _DRAINING).any())

    def check_class(self, extent: int, slot_bytes: int) -> None:
        """Raises: InvalidArgument when an extent cannot be cut into slots of this size."""
        nbytes = int(self._columns.extent_bytes[extent])
        if slot_bytes <= 0 or slot_bytes % 4096:
            raise InvalidArgument(f"a slot is a positive multiple of 4096 bytes, not {slot_bytes}")
        if self.tier(extent) is Tier.HBM and nbytes % slot_bytes:
            raise InvalidArgument(
                f"an HBM extent of {nbytes} bytes is no whole number of slots of {slot_bytes}"
            )
        if slot_bytes > nbytes:
            raise FailedPrecondition(f"slots of {slot_bytes} bytes do not fit an extent of {nbytes}")

    def _free_range(self, tier: Tier, slots: int) -> tuple[int, int]:
        """First gap of `slots` ids in the tier's pool as (first id, slots), else the widest gap there is."""
        columns = self._columns
        cut = np.isin(columns.extent_state, (ExtentState.READY, ExtentState.DRAINING, ExtentState.LOADING))
        cut &= columns.extent_tier == tier
        bases = columns.extent_slot_base[cut].astype(np.int64)
        order = np.argsort(bases)
        starts, sizes = bases[order], columns.extent_slots[cut][order].astype(np.int64)
        limit = len(columns.pool(tier).state)
        gap_starts = np.concatenate(([0], starts + sizes))
        gaps = np.concatenate((starts, [limit])) - gap_starts
        fits = gaps >= slots
        at = int(fits.argmax() if fits.any() else gaps.argmax())
        return int(gap_starts[at]), min(slots, int(gaps[at]))
