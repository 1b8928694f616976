"""The local match over tables written by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.layout import (
    NONE,
    Columns,
    SlotState,
    State,
    TableShape,
    Tier,
    open_columns,
    state_word,
    table_bytes,
    write_header,
)
from kvstore.match import match, slots_sealed
from kvstore.tables.index import Index

ROWS = 40
NAMESPACE = 3
SHAPE = TableShape(max_rows=ROWS, hbm_slots=ROWS, dram_slots=ROWS, nvme_slots=ROWS, devices=2)


def tables() -> tuple[Columns, Index, memoryview]:
    """A chain of 40 blocks in rows 0..39, sealed, in no tier yet."""
    memory = memoryview(bytearray(table_bytes(SHAPE)))
    write_header(memory, SHAPE)
    columns = open_columns(memory, SHAPE)
    index = Index(columns)
    index.clear()
    for places in (columns.hbm, columns.dram, columns.nvme):
        places.fill(NONE)
    columns.hash[:] = np.random.default_rng(0).integers(0, 1 << 64, (ROWS, 2), dtype=np.uint64)
    assert index.insert(columns.hash, np.arange(ROWS, dtype=np.uint32)).all()
    columns.namespace.fill(NAMESPACE)
    columns.state.fill(state_word(5, State.SEALED))
    return columns, index, memory


def put(
    columns: Columns, tier: Tier, row: int, slot: int, state: SlotState = SlotState.SEALED, device: int = 0
) -> None:
    place = {Tier.HBM: columns.hbm[device], Tier.DRAM: columns.dram, Tier.NVME: columns.nvme}[tier]
    place[row] = slot
    columns.pool(tier).state[slot] = state_word(9, state)


def everywhere_on_disk() -> tuple[Columns, Index]:
    columns, index, _ = tables()
    for row in range(ROWS):
        put(columns, Tier.NVME, row, row)
    return columns, index


def hits(columns: Columns, index: Index, namespace: int = NAMESPACE, device: int | None = 0) -> int:
    return match(columns, index, namespace, columns.hash.copy(), device=device).hits


def test_the_nearest_tier_is_named() -> None:
    columns, index = everywhere_on_disk()
    put(columns, Tier.DRAM, 1, 30)
    put(columns, Tier.DRAM, 2, 31)
    put(columns, Tier.HBM, 2, 7)
    put(columns, Tier.HBM, 3, 8)
    found = match(columns, index, NAMESPACE, columns.hash[:5].copy(), device=0)
    assert found.rows.tolist() == [0, 1, 2, 3, 4]
    assert found.tiers.tolist() == [Tier.NVME, Tier.DRAM, Tier.HBM, Tier.HBM, Tier.NVME]
    without = match(columns, index, NAMESPACE, columns.hash[:5].copy(), device=None)
    assert without.tiers.tolist() == [Tier.NVME, Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.NVME]


def test_another_devices_hbm_is_no_hit() -> None:
    columns, index, _ = tables()
    put(columns, Tier.HBM, 0, 0, device=1)
    assert hits(columns, index, device=1) == 1
    assert hits(columns, index, device=0) == 0
    assert hits(columns, index, device=None) == 0


def test_the_run_ends_at_the_first_hole() -> None:
    columns, index = everywhere_on_disk()
    columns.state[12] = state_word(6, State.FREE)
    index.remove(columns.hash[12:13], np.array([12], dtype=np.uint32))
    assert hits(columns, index) == 12


def test_a_block_that_is_being_filled_is_no_hit() -> None:
    """Blocks visible before they are complete served garbage elsewhere."""
    columns, index = everywhere_on_disk()
    columns.state[6] = state_word(5, State.FILLING)
    assert hits(columns, index) == 6
    columns.state[2] = state_word(6, State.FREE)
    assert hits(columns, index) == 2


def test_a_slot_that_is_being_filled_is_no_hit() -> None:
    """A promotion under way: the row is sealed, its bytes are not in DRAM yet."""
    columns, index, _ = tables()
    for row in range(4):
        put(columns, Tier.DRAM, row, row, SlotState.FILLING if row == 2 else SlotState.SEALED)
    assert hits(columns, index) == 2
    put(columns, Tier.NVME, 2, 2)
    found = match(columns, index, NAMESPACE, columns.hash[:4].copy(), device=None)
    assert found.tiers.tolist() == [Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.DRAM]


def test_another_namespace_is_no_hit() -> None:
    columns, index = everywhere_on_disk()
    assert hits(columns, index, namespace=NAMESPACE + 1) == 0
    columns.namespace[9] = NAMESPACE + 1
    assert hits(columns, index) == 9


def test_an_empty_prompt_has_no_hits() -> None:
    columns, index = everywhere_on_disk()
    found = match(columns, index, NAMESPACE, columns.hash[:0], device=0)
    assert found.hits == 0
    assert found.tiers.shape == (0,)


def test_a_reader_of_read_only_memory_sees_what_the_daemon_writes() -> None:
    columns, _, memory = tables()
    put(columns, Tier.DRAM, 0, 0)
    reader = open_columns(memory.toreadonly(), SHAPE)
    assert hits(reader, Index(reader)) == 1
    put(columns, Tier.DRAM, 1, 1)
    assert hits(reader, Index(reader)) == 2


def test_slots_outside_the_pool_are_not_sealed() -> None:
    """A torn read may give any slot number."""
    columns, _, _ = tables()
    put(columns, Tier.DRAM, 0, 5)
    slots = np.array([5, 6, ROWS, 0xFFFFFFFE, NONE], dtype=np.uint32)
    assert slots_sealed(columns, Tier.DRAM, slots).tolist() == [True, False, False, False, False]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from([State.SEALED, State.SEALED, State.FILLING, State.FREE]),
            st.sampled_from([None, SlotState.FREE, SlotState.FILLING, SlotState.SEALED]),
            st.sampled_from([None, SlotState.FREE, SlotState.FILLING, SlotState.SEALED]),
            st.booleans(),
        ),
        min_size=1,
        max_size=ROWS,
    ),
    st.booleans(),
)
@settings(deadline=None)
def test_equals_a_walk_block_by_block(
    blocks: list[tuple[bool, State, SlotState | None, SlotState | None, bool]], with_device: bool
) -> None:
    columns, index, _ = tables()
    expected: list[Tier] = []
    open_run = True
    for row, (indexed, state, hbm, dram, nvme) in enumerate(blocks):
        columns.state[row] = state_word(1, state)
        if not indexed:
            columns.state[row] = state_word(2, State.FREE)
            index.remove(columns.hash[row : row + 1], np.array([row], dtype=np.uint32))
        for tier, slot_state in (
            (Tier.HBM, hbm),
            (Tier.DRAM, dram),
            (Tier.NVME, SlotState.SEALED if nvme else None),
        ):
            if slot_state is not None:
                put(columns, tier, row, row, slot_state)
        where = [Tier.HBM] if with_device and hbm is SlotState.SEALED else []
        where += [Tier.DRAM] if dram is SlotState.SEALED else []
        where += [Tier.NVME] if nvme else []
        open_run = open_run and indexed and state is State.SEALED and bool(where)
        if open_run:
            expected.append(where[0])
    found = match(
        columns, index, NAMESPACE, columns.hash[: len(blocks)].copy(), device=0 if with_device else None
    )
    assert found.tiers.tolist() == [int(tier) for tier in expected]
    assert found.rows.tolist() == list(range(len(expected)))
