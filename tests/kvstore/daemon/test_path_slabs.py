"""Which slab an extent is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.daemon.path_slabs import PathSlabs
from kvstore.wire.packed import MOVE
from tiers.nvme.slab import SlabFile


def test_no_two_extents_are_one_slab() -> None:
    """A daemon was killed after an extent had been given a slab and before a mover had made its file: the next daemon,
    which looked at the files alone, gave another extent the same one, and each wrote over the other's blocks."""
    numbers, sent = {0: 5}, []
    table: Any = SimpleNamespace(
        number=lambda extent: numbers.get(extent, 0),
        slot_bytes=lambda extent: 4096,
        set=lambda extent, number, slot_bytes: numbers.update({extent: number}),
        newest=5,
    )
    columns: Any = SimpleNamespace(
        extent_slot_bytes=[4096, 4096], extent_bytes=[1 << 20, 1 << 20], extent_slot_base=[0, 2],
        extent_slots=[2, 2], pools=[SimpleNamespace(state=np.array([0, 0, 1, 2], dtype=np.uint64))] * 3,
    )  # fmt: skip
    directory: Any = SimpleNamespace(new_slab_number=lambda: 1)  # no file is there yet
    link: Any = SimpleNamespace(send_slab=lambda *slab: sent.append(slab))
    slabs = PathSlabs(columns=columns, table=table, directory=directory, index=SimpleNamespace())  # type: ignore[arg-type]
    moves = np.zeros(2, dtype=MOVE)
    moves["nvme_extent"] = (0, 1)
    assert slabs.open(moves, link)
    assert numbers == {0: 5, 1: 6}
    assert [slab[:2] for slab in sent] == [(0, 5), (1, 6)]
    assert [slab[-1] for slab in sent] == [0, 1], "of which one has a block in it"


def test_a_slab_that_could_not_be_opened_is_deleted_at_the_next_try() -> None:
    """It counted as told for as long as the mover lived, and its file stayed."""
    sent: list[str] = []
    link: Any = SimpleNamespace(
        send_slab=lambda *slab: sent.append(f"slab {slab[1]}"), send_drop=lambda *_: sent.append("drop")
    )
    nothing: Any = SimpleNamespace()
    slabs = PathSlabs(columns=nothing, table=nothing, directory=nothing, index=nothing)
    file = SlabFile(number=7, slot_bytes=4096, nbytes=1 << 20)
    slabs.delete(3, file, link)
    slabs.delete(3, file, link)
    assert sent == ["slab 7", "drop"]
    slabs.failed(3, 7)
    slabs.delete(3, file, link)
    assert sent == ["slab 7", "drop"] * 2
