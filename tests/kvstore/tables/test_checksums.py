"""Checksums of DRAM slots: of one generation each, known or not, looked at or not."""

from __future__ import annotations

import numpy as np

from kvstore.layout import GENERATION_SHIFT, TableShape, Tier, open_columns, table_bytes
from kvstore.tables.checksums import Checksums

SHAPE = TableShape(max_rows=64, hbm_slots=8, dram_slots=8, nvme_slots=8)
SLOTS = np.array([1, 4, 6], dtype=np.uint32)
SUMS = np.array([[1, 2], [3, 4], [0, 9]], dtype=np.uint64)


def test_what_is_noted_is_known_of_that_generation_alone() -> None:
    columns = open_columns(memoryview(bytearray(table_bytes(SHAPE))), SHAPE)
    table = Checksums(columns)
    every = np.arange(8, dtype=np.uint32)
    assert not table.known(every).any(), "of generation 0, too, there is none at first"
    table.note(SLOTS, SUMS)
    assert np.flatnonzero(table.known(every)).tolist() == SLOTS.tolist()
    assert (table.of(SLOTS) == SUMS).all()
    state = columns.pool(Tier.DRAM).state
    state[4] = (state[4] >> GENERATION_SHIFT) + np.uint64(1) << GENERATION_SHIFT | np.uint64(2)
    assert table.known(SLOTS).tolist() == [True, False, True]
    state[6] |= np.uint64(2)
    assert table.known(SLOTS).tolist() == [True, False, True], "its state is not its generation"
    table.forget(SLOTS)
    assert not table.known(every).any()


def test_what_nobody_looked_at_is_known_and_unread_until_somebody_does() -> None:
    columns = open_columns(memoryview(bytearray(table_bytes(SHAPE))), SHAPE)
    table = Checksums(columns)
    table.note_unread(SLOTS, SUMS)
    assert table.known(SLOTS).all()
    assert table.unread(SLOTS).all()
    table.note(SLOTS[:1], SUMS[:1])
    assert table.unread(SLOTS).tolist() == [False, True, True]
    assert not table.unread(np.array([0], dtype=np.uint32)).any(), "of which nothing is known"
