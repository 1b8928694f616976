"""Who may use the cache how, and that clients can see it in the tables."""

from __future__ import annotations

import numpy as np

from kvstore.cache_use import Access, CacheUse
from kvstore.layout import TableShape, open_columns, table_bytes
from kvstore.leases.uses import Uses

SHAPE = TableShape(max_rows=8, hbm_slots=1, dram_slots=1, nvme_slots=1, max_namespaces=4096)
ALL = int(CacheUse.ON.access)


def test_what_is_taken_away_stands_in_the_tables_until_it_is_given_back() -> None:
    memory = memoryview(bytearray(table_bytes(SHAPE)))
    seen = open_columns(memory.toreadonly(), SHAPE).forbidden
    uses = Uses(SHAPE.max_namespaces, open_columns(memory, SHAPE).forbidden)
    assert not seen.any()
    uses.allow_everywhere(CacheUse.READ.access)
    uses.allow(3, CacheUse.DRY_RUN.access)
    assert (seen[0], seen[4]) == (Access.WRITES, Access.READS)
    assert not uses.of(ALL, 3).reads
    assert not uses.of(ALL, 3).writes
    uses.allow_everywhere(CacheUse.ON.access)
    uses.allow(3, CacheUse.ON.access)
    assert not seen.any()


def test_a_namespace_beyond_the_column_is_restricted_all_the_same() -> None:
    forbidden = np.zeros(16, dtype=np.uint8)
    uses = Uses(SHAPE.max_namespaces, forbidden)
    uses.allow(4000, CacheUse.OFF.access)
    assert not uses.of(ALL, 4000).reads
    assert not forbidden.any()


def test_a_daemon_begins_with_nothing_taken_away() -> None:
    forbidden = np.full(16, 7, dtype=np.uint8)  # of the one before
    Uses(SHAPE.max_namespaces, forbidden)
    assert not forbidden.any()
