"""When HBM that others left, or fill at the same time, is taken for wrong. Its memory is bytes beside a real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client.trust import first_difference
from tests.kvstore.store_rig import PAGE, Rig, chain

BLOCKS = 16


class Bytes:
    """Slots of one tier, as HbmMemory reads them and DramMemory shows them; every slot has bytes of its own."""

    slot_bytes = PAGE

    def __init__(self, slots: int) -> None:
        self.slots = np.zeros((slots, PAGE), dtype=np.uint8)
        self.looked_at: list[int] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def read(self, slot: int) -> bytes:
        self.looked_at.append(slot)
        if len(self.looked_at) == 1:
            self.meanwhile()
        return self.slots[slot].tobytes()

    def view(self, slot: int) -> NDArray[np.uint8]:
        return self.slots[slot]

    def reachable(self, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        return np.ones(len(slots), dtype=np.bool_)


class Scene:
    """A full HBM whose blocks are in DRAM too, nobody holds them, and a live session goes on."""

    def __init__(self) -> None:
        self.rig = Rig(hbm=BLOCKS, dram=2 * BLOCKS)
        self.live = self.rig.attach()
        self.rig.write_through(self.live, chain(BLOCKS))
        self.hbm, self.dram = Bytes(256), Bytes(256)
        columns = self.rig.store._state.columns
        rows = np.flatnonzero(columns.dram != 0xFFFFFFFF)
        assert len(rows) == BLOCKS
        for row in rows.tolist():
            self.hbm.slots[columns.hbm[0, row]] = self.dram.slots[columns.dram[row]] = row + 1

    def difference(self) -> int | None:
        """What a newcomer finds."""
        hbm: Any = self.hbm
        dram: Any = self.dram
        columns = self.rig.store._state.columns
        return first_difference(columns, hbm, dram, device=0, ranges=[(0, BLOCKS)])


def test_one_changed_byte_is_found() -> None:
    scene = Scene()
    assert scene.difference() is None
    assert len(scene.hbm.looked_at) == BLOCKS
    scene.hbm.slots[5, 100] ^= 1
    assert scene.difference() == 5


def test_a_slot_that_a_live_session_fills_meanwhile_is_no_difference() -> None:
    """A slot that was given out again between the choice of the sample and the look at it was compared with the copy
    of the block that it had had: beside a busy worker, sound HBM was not believed and all its blocks were forgotten."""
    scene = Scene()

    def meanwhile() -> None:
        grant = scene.rig.acquire(scene.live, chain(BLOCKS, seed=2))
        scene.hbm.slots[grant.hbm_slots] = 0xEE

    scene.hbm.meanwhile = meanwhile
    assert scene.difference() is None
    assert len(scene.hbm.looked_at) == 1, "the others were no copies any more"


def test_slots_that_have_other_blocks_by_then_are_no_difference() -> None:
    """As above, where the other blocks are complete and in DRAM, too."""
    scene = Scene()

    def meanwhile() -> None:
        scene.rig.write_through(scene.live, chain(BLOCKS, seed=2))
        scene.hbm.slots[:BLOCKS] = 0xEE

    scene.hbm.meanwhile = meanwhile
    assert scene.difference() is None


def test_a_copy_in_dram_that_gave_way_is_no_difference() -> None:
    """As above, where the DRAM slot has another block by then."""
    scene = Scene()

    def meanwhile() -> None:
        scene.rig.write_down()
        scene.rig.evict_dram()
        scene.dram.slots[:] = 0xEE

    scene.hbm.meanwhile = meanwhile
    assert scene.difference() is None
    assert len(scene.hbm.looked_at) == 1
