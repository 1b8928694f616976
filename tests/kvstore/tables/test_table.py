"""Rows whose blocks are known already, against asking the index."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.layout import NONE, TableShape, open_columns, table_bytes
from kvstore.tables.table import BlockTable

NAMESPACE = 3
HASHES = np.arange(1, 9, dtype=np.uint64).reshape(4, 2)


@pytest.fixture
def table() -> BlockTable:
    shape = TableShape(max_rows=16, hbm_slots=1, dram_slots=1, nvme_slots=1)
    table = BlockTable(open_columns(memoryview(bytearray(table_bytes(shape))), shape), lambda _: None)
    table.index.clear()
    return table


def reserved(table: BlockTable) -> np.typing.NDArray[np.uint32]:
    nothing = np.zeros(len(HASHES), dtype=np.uint32)
    return table.reserve(
        hashes=HASHES,
        namespaces=NAMESPACE,
        depths=nothing,
        parents=nothing,
        touches=nothing.astype(np.uint64),
    )


def are(table: BlockTable, rows: np.typing.NDArray[np.uint32], namespace: int = NAMESPACE) -> bool:
    namespaces = np.full(len(rows), namespace, dtype=np.uint32)
    same = table.are(rows, HASHES, namespaces)
    assert not same or table.find(HASHES, namespaces).tolist() == rows.tolist()
    return same


def test_rows_that_are_filled_or_sealed_are_known(table: BlockTable) -> None:
    rows = reserved(table)
    assert are(table, rows)
    table.publish(rows)
    assert are(table, rows)


def test_rows_of_other_blocks_of_none_or_of_another_namespace_are_not(table: BlockTable) -> None:
    rows = reserved(table)
    assert not are(table, rows[::-1].copy())
    assert not are(table, np.where(rows == rows[1], np.uint32(NONE), rows))
    assert not are(table, rows, namespace=NAMESPACE + 1)


def test_rows_that_are_cleared_or_free_are_not(table: BlockTable) -> None:
    rows = reserved(table)
    table.publish(rows)
    table.clear(rows[:1])
    assert not are(table, rows)
    table.free(rows[:1])
    table.columns.hash[rows[0]] = HASHES[0]  # a row that left the index may still have its hash
    assert not are(table, rows)
