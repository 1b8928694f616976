"""Whether HBM that an earlier process left still holds what it held: a sample of it against the copies in DRAM.

Hardware, driver or a kernel gone astray may have changed memory that nobody owned for a while. Blocks are immutable,
so a sealed HBM slot and the sealed DRAM slot of the same row hold the same bytes; one difference is reason enough to
believe none of it. Copies are read without being held, while other sessions of the device may give their slots to
other blocks: a difference counts only where the slots were the block's own when it was looked at, before and after.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.client.memory import DramMemory, HbmMemory
from kvstore.layout import NONE, Columns, SlotState, State, Tier, states
from kvstore.tables.checksums import Checksums

__all__ = ["first_difference"]

_SAMPLE_BLOCKS = 16
_STATE_BITS = 0xFF

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


def first_difference(
    columns: Columns,
    hbm: HbmMemory,
    dram: DramMemory,
    *,
    device: int,
    ranges: Sequence[tuple[int, int]],
    offset: int = 0,
) -> int | None:
    """An HBM slot among `ranges` of (first slot, slots) that differs from its DRAM copy; None where none does.

    `offset`: bytes before this process's part of a block, where HBM has only a part. Looks at up to 16 blocks, evenly
    spread over those that both tiers have.
    """
    slots, rows, copies = _in_both(columns, dram, device, ranges)
    if not len(slots):
        return None
    chosen = np.unique(np.linspace(0, len(slots) - 1, _SAMPLE_BLOCKS).astype(np.int64))
    for at in chosen.tolist():
        slot, row, copy = int(slots[at]), int(rows[at]), int(copies[at])
        before = _words(columns, device, slot, row, copy)
        if before is None:  # it has gone since they were chosen
            continue
        part = dram.view(copy)[offset : offset + hbm.slot_bytes]
        if hbm.read(slot) != part.tobytes() and _words(columns, device, slot, row, copy) == before:
            return slot
    return None


def _in_both(
    columns: Columns, dram: DramMemory, device: int, ranges: Sequence[tuple[int, int]]
) -> tuple[U32, U32, U32]:
    """[n] HBM slots, rows and DRAM slots of the blocks that both tiers have."""
    slots: U32 = np.concatenate([np.arange(first, first + count, dtype=np.uint32) for first, count in ranges])
    slots = slots[states(columns.pool(Tier.HBM).state[slots]) == SlotState.SEALED]
    rows: U32 = columns.pool(Tier.HBM).row[slots]
    good = rows < columns.shape.max_rows
    rows = np.where(good, rows, 0)
    copies: U32 = columns.dram[rows]
    good &= copies != NONE
    copies = np.where(good, copies, 0)
    good &= (states(columns.state[rows]) == State.SEALED) & (columns.hbm[device, rows] == slots)
    good &= states(columns.pool(Tier.DRAM).state[copies]) == SlotState.SEALED
    good &= columns.pool(Tier.DRAM).row[copies] == rows
    good &= dram.reachable(copies) & ~Checksums(columns).unread(copies)  # a disk's fault is none of HBM
    return slots[good], rows[good], copies[good]


def _words(columns: Columns, device: int, slot: int, row: int, copy: int) -> tuple[int, int, int] | None:
    """State words of HBM slot, row and DRAM slot, with their generations; None unless both slots hold this row's block.

    Words first: the links that are read after them hold for as long as these words do.
    """
    hbm, below = columns.pool(Tier.HBM), columns.pool(Tier.DRAM)
    words = int(hbm.state[slot]), int(columns.state[row]), int(below.state[copy])
    sealed = [word & _STATE_BITS for word in words] == [SlotState.SEALED, State.SEALED, SlotState.SEALED]
    linked = hbm.row[slot] == row and columns.hbm[device, row] == slot
    linked &= below.row[copy] == row and columns.dram[row] == copy
    return words if sealed and linked else None
