"""The store's small parts by themselves: free runs, waits, ghosts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.leases.waiting import Waits
from kvstore.moves import MissCause
from kvstore.tables.runs import FreeRuns
from kvstore.tables.slots import ClassKey
from kvstore.victims.ghosts import Ghosts


def free_runs(*ranges: tuple[int, int], size: int = 1000) -> FreeRuns:
    """Ranges of free ids."""
    runs = FreeRuns(np.ones(size, dtype=np.bool_))
    for base, count in ranges:
        runs.add_range(base, count)
    return runs


def test_runs_are_ascending_and_contiguous() -> None:
    runs = free_runs((0, 100), (500, 100))
    taken = runs.take(40)
    assert (np.diff(taken) == 1).all()
    runs.give(taken[::2])  # holes
    assert (np.diff(runs.take(50)) == 1).all()
    assert len(runs) == 200 - 40 + 20 - 50


def test_fewer_are_given_only_where_no_more_are_free() -> None:
    runs = free_runs((10, 5), (100, 5))
    assert sorted(runs.take(100).tolist()) == [10, 11, 12, 13, 14, 100, 101, 102, 103, 104]
    assert len(runs.take(1)) == 0
    runs.give(np.array([103], dtype=np.uint32))
    assert runs.take(5).tolist() == [103]


def test_ranges_come_and_go() -> None:
    runs = free_runs((0, 10), (10, 10), (30, 10))
    assert runs.ranges() == [(0, 20), (30, 10)]
    runs.take(3)
    runs.remove_range(10)
    assert runs.ranges() == [(0, 10), (30, 10)]
    rest = runs.take(100)
    assert len(rest) in (17, 20)
    assert not set(rest.tolist()) & set(range(10, 20))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30), st.integers(0, 1000))
def test_no_id_is_given_twice(steps: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = free_runs((0, 37), (50, 64))
    mine: set[int] = set()
    for take, give in steps:
        taken = runs.take(take).tolist()
        assert not mine & set(taken)
        mine |= set(taken)
        back = rng.permutation(sorted(mine))[:give].astype(np.uint32)
        runs.give(back)
        mine -= set(back.tolist())
        assert len(runs) == 101 - len(mine)


class _Rows:
    """Rows that are on their way until they are said to have come."""

    def __init__(self) -> None:
        self.open = np.ones(100, dtype=np.bool_)
        self.looks = 0

    def unresolved(self, rows: np.ndarray, _words: np.ndarray, _session: int) -> np.ndarray:
        self.looks += 1
        return self.open[rows]

    def resolve(self, waits: Waits, rows: list[int]) -> None:
        self.open[rows] = False
        waits.resolved(np.array(rows, dtype=np.uint32))


def waiting() -> tuple[Waits, _Rows]:
    """Waits over a hundred rows."""
    rows = _Rows()
    return Waits(100, rows.unresolved), rows


def u32(*values: int) -> np.ndarray:
    """An array of rows."""
    return np.array(values, dtype=np.uint32)


def test_a_lease_is_told_once_when_all_has_come() -> None:
    waits, rows = waiting()
    waits.wait_rows(3, 7, u32(1, 5, 9, 5), np.zeros(4, dtype=np.uint64))
    assert waits.waited[[1, 5, 9]].tolist() == [1, 1, 1]
    rows.resolve(waits, [9])
    rows.resolve(waits, [1])
    assert waits.take_changed() == []
    rows.resolve(waits, [5])
    assert waits.take_changed() == [(3, [7])]
    rows.resolve(waits, [5])
    assert waits.take_changed() == []
    assert not waits.waited.any()
    assert waits.faults() == []


def test_what_has_come_already_is_told_at_once() -> None:
    waits, rows = waiting()
    rows.open[:] = False
    waits.wait_rows(3, 7, u32(1, 2), np.zeros(2, dtype=np.uint64))
    assert waits.take_changed() == [(3, [7])]


def test_thousands_of_blocks_cost_a_look_each_only_for_who_waits_for_them() -> None:
    waits, rows = waiting()
    for lease in range(50):
        waits.wait_rows(0, lease, u32(*range(50)), np.zeros(50, dtype=np.uint64))
    rows.looks = 0
    for row in range(49):
        rows.resolve(waits, [row])
    assert rows.looks == 0  # all are filed under the last
    rows.resolve(waits, [49])
    assert rows.looks == 50
    assert len(waits.take_changed()[0][1]) == 50


def test_a_new_wait_replaces_the_old_one_and_cancel_ends_it() -> None:
    waits, rows = waiting()
    waits.wait_rows(0, 1, u32(4), np.zeros(1, dtype=np.uint64))
    waits.wait_rows(0, 1, u32(5), np.zeros(1, dtype=np.uint64))
    rows.resolve(waits, [4])
    assert waits.take_changed() == []
    assert waits.of_session(0) == 1
    waits.cancel(0, 1)
    waits.cancel(0, 1)
    rows.resolve(waits, [5])
    assert waits.take_changed() == []
    assert waits.of_session(0) == 0
    assert waits.faults() == []


def test_slots_go_to_who_came_first() -> None:
    waits, _ = waiting()
    key = ClassKey(device=0, slot_bytes=4096)
    for lease, need in ((1, 3), (2, 2), (3, 1)):
        waits.wait_slots(0, lease, key, need)
    waits.slots_available(key, 4)
    assert waits.take_changed() == [(0, [1, 2])]
    waits.forget_session(0)
    assert waits.slots_wanted() == []
    assert len(waits) == 0


def test_ghosts_remember_the_latest_cause_and_no_more_than_they_may() -> None:
    ghosts = Ghosts(4)
    hashes = np.arange(20, dtype=np.uint64).reshape(10, 2)
    ghosts.note(hashes[:2], MissCause.EVICTED)
    ghosts.note(hashes[:1], MissCause.CORRUPT)
    assert ghosts.cause(hashes[0]) is MissCause.CORRUPT
    assert ghosts.cause(hashes[1]) is MissCause.EVICTED
    ghosts.note(hashes[2:], MissCause.CLEARED)
    assert ghosts.cause(hashes[0]) is MissCause.NEVER_STORED
    assert ghosts.cause(hashes[9]) is MissCause.CLEARED
