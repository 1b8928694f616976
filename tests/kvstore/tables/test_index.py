"""The index against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from kvstore.layout import (
    BUCKET_ENTRIES,
    NONE,
    Columns,
    State,
    TableShape,
    open_columns,
    state_word,
    table_bytes,
)
from kvstore.tables.index import Index

U64 = NDArray[np.uint64]


def empty(max_rows: int) -> tuple[Columns, Index]:
    shape = TableShape(max_rows=max_rows, hbm_slots=1, dram_slots=1, nvme_slots=1)
    columns = open_columns(memoryview(bytearray(table_bytes(shape))), shape)
    index = Index(columns)
    index.clear()
    return columns, index


def filled(max_rows: int, seed: int = 0) -> tuple[Columns, Index, U64]:
    """An index with one block in each row, random hashes."""
    columns, index = empty(max_rows)
    hashes = np.random.default_rng(seed).integers(0, 1 << 64, (max_rows, 2), dtype=np.uint64)
    columns.hash[:] = hashes
    columns.state.fill(state_word(1, State.SEALED))
    assert index.insert(hashes, np.arange(max_rows, dtype=np.uint32)).all()
    return columns, index, hashes


def rows(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


class AgainstDict(RuleBasedStateMachine):
    """Insert, remove and look up in batches; hashes come from few values, so buckets and tags collide all the time."""

    @initialize(max_rows=st.sampled_from([8, 30, 200]), seed=st.integers(0, 99))
    def make(self, max_rows: int, seed: int) -> None:
        self.columns, self.index = empty(max_rows)
        rng = np.random.default_rng(seed)
        words = rng.integers(0, 1 << 64, 24, dtype=np.uint64) & np.uint64(0xFFFF_FFFF_0000_0003)
        pairs = np.stack(np.meshgrid(words, words), axis=-1).reshape(-1, 2)
        self.universe: U64 = rng.permutation(pairs)
        self.model: dict[bytes, int] = {}
        self.free = list(range(max_rows))

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(12, len(self.free))))
        fresh = [h for h in self.universe if h.tobytes() not in self.model]
        picks = data.draw(
            st.lists(st.sampled_from(range(len(fresh))), min_size=count, max_size=count, unique=True)
        )
        hashes = np.array([fresh[i] for i in picks], dtype=np.uint64).reshape(-1, 2)
        taken = rows(*(self.free[i] for i in range(count)))
        self.columns.hash[taken] = hashes
        self.columns.state[taken] = state_word(1, State.SEALED)
        done = self.index.insert(hashes, taken)
        for entered, value, row in zip(done, hashes, taken, strict=True):
            if entered:
                self.model[value.tobytes()] = int(row)
                self.free.remove(int(row))
            else:
                self.columns.state[row] = state_word(1, State.FREE)
                assert self.both_buckets_are_full(value)

    def both_buckets_are_full(self, value: U64) -> bool:
        mask = np.uint64(len(self.columns.rows) - 1)
        return bool((self.columns.rows[(value & mask).astype(np.int64)] != NONE).all())

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if not self.model:
            return
        keys = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=12, unique=True))
        hashes = np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 2)
        gone = rows(*(self.model.pop(key) for key in keys))
        self.columns.state[gone] = state_word(2, State.FREE)
        self.index.remove(hashes, gone)
        self.free.extend(int(row) for row in gone)  # the hash column keeps what it held

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.columns.state.fill(state_word(3, State.FREE))
        self.free.extend(self.model.values())
        self.model.clear()

    @invariant()
    def every_hash_is_where_the_dict_says(self) -> None:
        if not hasattr(self, "model"):
            return
        expected = [self.model.get(h.tobytes(), NONE) for h in self.universe]
        assert self.index.find(self.universe).tolist() == expected
        assert self.index.locate(self.universe).tolist() == expected
        assert sorted(self.index.entries().tolist()) == sorted(self.model.values())


AgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestIndexAgainstDict = AgainstDict.TestCase


def test_full_turnover_leaves_nothing_behind() -> None:
    """Tombstones elsewhere made every miss slower until a rebuild; here a thousand turnovers change no entry count."""
    columns, index, hashes = filled(512)
    rng = np.random.default_rng(1)
    for _ in range(50):
        row = rng.permutation(512).astype(np.uint32)[:200]
        index.remove(columns.hash[row], row)
        assert (index.find(columns.hash[row]) == NONE).all()
        columns.hash[row] = rng.integers(0, 1 << 64, (200, 2), dtype=np.uint64)
        assert index.insert(columns.hash[row], row).all()
    assert (index.find(columns.hash) == np.arange(512)).all()
    assert len(index.entries()) == 512
    old = ~(hashes == columns.hash).all(axis=1)
    assert (index.find(hashes[old]) == NONE).all()


def test_a_batch_that_all_wants_one_bucket_is_entered_as_far_as_it_fits() -> None:
    columns, index = empty(64)
    hashes = np.zeros((20, 2), dtype=np.uint64)
    hashes[:, 1] = np.arange(20, dtype=np.uint64) << np.uint64(32)  # both buckets are 0, the tags differ
    columns.hash[:20] = hashes
    done = index.insert(hashes, np.arange(20, dtype=np.uint32))
    assert done.sum() == BUCKET_ENTRIES
    found = index.find(hashes)
    assert (found[done] == np.flatnonzero(done)).all()
    assert (found[~done] == NONE).all()


def test_a_full_bucket_sends_the_next_to_the_other_one() -> None:
    columns, index = empty(64)
    hashes = np.zeros((9, 2), dtype=np.uint64)
    hashes[:, 1] = np.arange(9, dtype=np.uint64) << np.uint64(32)
    hashes[8, 1] |= np.uint64(1)  # its second bucket is 1
    columns.hash[:9] = hashes
    assert index.insert(hashes, np.arange(9, dtype=np.uint32)).all()
    assert (columns.rows[0] != NONE).sum() == 8
    assert (index.find(hashes) == np.arange(9)).all()


def test_hashes_of_one_tag_in_one_bucket_are_told_apart() -> None:
    columns, index = empty(64)
    hashes = np.zeros((4, 2), dtype=np.uint64)
    hashes[:, 0] = np.arange(4, dtype=np.uint64) << np.uint64(40)
    columns.hash[:4] = hashes
    assert index.insert(hashes, rows(0, 1, 2, 3)).all()
    assert index.find(hashes).tolist() == [0, 1, 2, 3]
    index.remove(hashes[:1], rows(0))
    assert index.find(hashes).tolist() == [NONE, 1, 2, 3]


def test_a_removed_hash_is_not_found_again_when_its_row_is_used_by_another() -> None:
    """A stale entry must never make one prompt's block answer for another's."""
    columns, index, hashes = filled(100)
    index.remove(hashes[7:8], rows(7))
    columns.state[7] = state_word(2, State.FREE)
    assert index.find(hashes[7:8]).tolist() == [NONE]
    assert index.locate(hashes).tolist() == [*range(7), NONE, *range(8, 100)]
    columns.hash[7] = hashes[7] + np.uint64(1)
    assert index.insert(columns.hash[7:8], rows(7)).all()
    assert index.find(hashes[7:8]).tolist() == [NONE]
    assert index.find(columns.hash[7:8]).tolist() == [7]


def test_an_entry_whose_row_has_changed_is_a_miss() -> None:
    """A reader in another process may see the row's new hash before the old entry is gone."""
    columns, index, hashes = filled(100)
    columns.hash[7] = 0
    assert index.find(hashes).tolist() == [*range(7), NONE, *range(8, 100)]
    assert index.locate(hashes).tolist() == [*range(7), NONE, *range(8, 100)]


def test_rows_beyond_the_table_are_a_miss() -> None:
    """A torn read of an entry must not index outside the columns."""
    columns, index, hashes = filled(100)
    columns.rows[columns.rows == 3] = 100
    columns.rows[columns.rows == 4] = 0xFFFFFFFE
    assert index.find(hashes[:6]).tolist() == [0, 1, 2, NONE, NONE, 5]


def test_a_reader_with_any_garbage_in_the_index_never_gets_a_wrong_row() -> None:
    columns, index, hashes = filled(200)
    rng = np.random.default_rng(2)
    for _ in range(20):
        noise = rng.random(columns.rows.shape) < 0.2
        columns.rows[noise] = rng.integers(0, 1 << 32, int(noise.sum()), dtype=np.uint32)
        columns.tags[noise] = rng.choice(columns.tags.ravel(), int(noise.sum()))
        found = index.find(hashes)
        assert ((found == NONE) | (found == np.arange(200))).all()


def test_removing_what_is_not_there_changes_nothing() -> None:
    _, index, hashes = filled(50)
    index.remove(hashes[1:2], rows(2))  # that row has another hash
    index.remove(hashes[:0], rows())
    index.remove(hashes[::-1] + np.uint64(1), np.arange(50, dtype=np.uint32) + np.uint32(1000))
    assert (index.find(hashes) == np.arange(50)).all()


@given(
    runs=st.lists(st.tuples(st.integers(0, 1900), st.integers(1, 700)), min_size=1, max_size=6),
    unknown=st.sets(st.integers(0, 2000), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_a_chain_in_runs_is_located_as_it_is_found(runs: list[tuple[int, int]], unknown: set[int]) -> None:
    """`locate` compares contiguous rows; runs, breaks, holes and the end of the table give what a plain look gives."""
    _, index, hashes = filled(2000, seed=3)
    wanted = np.concatenate([np.arange(start, min(start + length, 2000)) for start, length in runs])
    chain = hashes[wanted].copy()
    holes = np.array([at for at in unknown if at < len(chain)], dtype=np.int64)
    chain[holes] += np.uint64(1)
    expected = wanted.astype(np.uint32)
    expected[holes] = NONE
    assert index.locate(chain).tolist() == expected.tolist()
    assert index.find(chain).tolist() == expected.tolist()


@pytest.mark.parametrize("look", ["find", "locate"])
def test_nothing_is_found_for_nothing(look: str) -> None:
    _, index, hashes = filled(10)
    assert getattr(index, look)(hashes[:0]).shape == (0,)


def test_an_empty_index_finds_nothing() -> None:
    """Fresh memory is zeros: without `clear` every entry would name row 0."""
    _, index = empty(10)
    assert (index.find(np.zeros((3, 2), dtype=np.uint64)) == NONE).all()
