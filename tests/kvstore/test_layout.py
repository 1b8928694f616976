"""Where every column of the shared tables lies."""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import FailedPrecondition, InvalidArgument
from kvstore.layout import (
    MAX_SESSIONS,
    Columns,
    SlotState,
    State,
    TableShape,
    Tier,
    generations,
    open_columns,
    read_shape,
    state_word,
    states,
    table_bytes,
    touch_key,
    write_header,
)

SMALL = TableShape(max_rows=100, hbm_slots=7, dram_slots=9, nvme_slots=11, devices=2, max_extents=5)

shapes = st.builds(
    TableShape,
    max_rows=st.integers(1, 3000),
    hbm_slots=st.integers(1, 100),
    dram_slots=st.integers(1, 100),
    nvme_slots=st.integers(1, 100),
    devices=st.integers(1, 4),
    max_extents=st.integers(1, 100),
    max_sessions=st.integers(1, MAX_SESSIONS),
    max_namespaces=st.integers(1, 40),
)


def arrays(columns: Columns) -> dict[str, np.ndarray]:
    """Every column by name."""
    plain = {f.name: getattr(columns, f.name) for f in fields(columns) if f.name not in ("shape", "pools")}
    pooled = {
        f"{tier.name}.{f.name}": getattr(columns.pool(tier), f.name)
        for tier in Tier
        for f in fields(columns.pool(tier))
    }
    return plain | pooled


@given(shapes)
def test_columns_lie_apart_aligned_and_inside(shape: TableShape) -> None:
    memory = memoryview(bytearray(table_bytes(shape)))
    start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    spans = sorted(
        (array.ctypes.data - start, array.nbytes)
        for array in arrays(open_columns(memory, shape)).values()
        if array.size
    )
    header = struct.calcsize(f"<8s{len(fields(TableShape))}Q")
    assert spans[0][0] >= header
    assert [offset for offset, _ in spans if offset < 4096] == [
        2048,  # `distrusts`
        2112,  # `forbidden`
    ]
    assert all(offset % 64 == 0 for offset, _ in spans)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= len(memory) == table_bytes(shape)
    assert len(memory) % 4096 == 0


@given(shapes)
def test_the_header_is_all_a_reader_needs(shape: TableShape) -> None:
    memory = memoryview(bytearray(table_bytes(shape)))
    write_header(memory, shape)
    assert read_shape(memory) == shape
    writer = open_columns(memory, shape)
    reader = open_columns(memory.toreadonly(), read_shape(memory.toreadonly()))
    rng = np.random.default_rng(1)
    for array in arrays(writer).values():
        array[...] = rng.integers(0, 200, array.shape)
    for name, array in arrays(writer).items():
        mirrored = arrays(reader)[name]
        assert (mirrored == array).all()
        assert not mirrored.flags.writeable


def test_shapes_of_the_columns() -> None:
    columns = open_columns(memoryview(bytearray(table_bytes(SMALL))), SMALL)
    assert columns.hash.shape == (100, 2)
    assert columns.hbm.shape == (2, 100)
    assert columns.tags.shape == columns.rows.shape == (SMALL.buckets, 8)
    assert [len(columns.pool(tier).state) for tier in Tier] == [7, 9, 11]
    assert [len(columns.pool(tier).holders) for tier in Tier] == [7, 9, 0]


@given(st.integers(1, 1 << 30))
def test_the_index_is_never_more_than_half_full(max_rows: int) -> None:
    buckets = TableShape(max_rows=max_rows, hbm_slots=1, dram_slots=1, nvme_slots=1).buckets
    assert buckets & (buckets - 1) == 0
    assert buckets * 8 >= 2 * max_rows
    assert buckets == 2 or buckets * 8 < 4 * max_rows + 32


def test_a_block_costs_few_bytes_of_tables() -> None:
    """A million rows on disk, a tenth of them in DRAM, a hundredth in HBM: at most 128 bytes each."""
    million = TableShape(max_rows=1_000_000, hbm_slots=10_000, dram_slots=100_000, nvme_slots=1_000_000)
    assert table_bytes(million) <= 100 * 1_000_000


def test_foreign_memory_is_refused() -> None:
    memory = memoryview(bytearray(table_bytes(SMALL)))
    with pytest.raises(FailedPrecondition, match="another version"):
        read_shape(memory)
    with pytest.raises(FailedPrecondition, match="another version"):
        read_shape(memory[:100])


def test_tables_that_are_shorter_than_their_header_says_are_refused() -> None:
    """A client that trusted the header would read behind the end of the mapping: SIGBUS."""
    memory = memoryview(bytearray(table_bytes(SMALL)))
    write_header(memory, SMALL)
    with pytest.raises(FailedPrecondition, match="shorter"):
        read_shape(memory[:-4096])
    struct.pack_into("<Q", memory, 8, 1 << 30)
    with pytest.raises(FailedPrecondition, match="shorter"):
        read_shape(memory)


def test_a_mapped_file_opens_read_only() -> None:
    with mmap.mmap(-1, table_bytes(SMALL)) as mapped:
        view = memoryview(mapped)
        write_header(view, SMALL)
        columns = open_columns(view.toreadonly(), read_shape(view))
        with pytest.raises(ValueError, match="read-only"):
            columns.state[0] = 1
        del columns
        view.release()


@pytest.mark.parametrize(
    "change",
    [
        {"max_rows": 0},
        {"max_rows": 0xFFFFFFFF},
        {"dram_slots": -1},
        {"max_sessions": MAX_SESSIONS + 1},
        {"devices": 256},
        {"max_extents": 65536},
    ],
)
def test_shapes_out_of_range_are_refused(change: dict[str, int]) -> None:
    sizes = {"max_rows": 1, "hbm_slots": 1, "dram_slots": 1, "nvme_slots": 1} | change
    with pytest.raises(InvalidArgument):
        TableShape(**sizes)


@given(st.integers(0, 1 << 60), st.sampled_from([*State, *SlotState]))
def test_state_words_round_trip(generation: int, state: int) -> None:
    word = np.array([state_word(generation, state)])
    assert states(word).tolist() == [int(state)]
    assert generations(word).tolist() == [generation & 0xFFFFFFFF]


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 43), st.integers(0, (1 << 20) - 1)),
        min_size=2,
        max_size=20,
        unique=True,
    )
)
def test_touch_keys_order_by_time_then_deepest_first(touches: list[tuple[int, int]]) -> None:
    """The tail of a chain goes before its head: without its head a tail is no hit."""
    keys = [int(touch_key(now, np.array([depth], dtype=np.uint32))[0]) for now, depth in touches]
    by_key = [touch for _, touch in sorted(zip(keys, touches, strict=True))]
    assert by_key == sorted(touches, key=lambda touch: (touch[0], -touch[1]))


def test_a_depth_beyond_the_key_does_not_reach_into_the_time() -> None:
    deep = touch_key(5, np.array([1 << 20, 0xFFFFFFFF], dtype=np.uint32))
    assert (deep == np.uint64(5 << 20)).all()
