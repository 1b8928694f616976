"""The list of queued requests: order, counts, and what eviction is told."""

from __future__ import annotations

import random

import numpy as np

from kvstore.layout import touch_key
from kvstore.tiering.queued import NO_DEADLINE_MS, Queued

ROWS = 64


def words(rows: np.ndarray) -> np.ndarray:
    return np.zeros(len(rows), dtype=np.uint64)


def chain_of(*rows: int) -> np.ndarray:
    return np.array(rows, dtype=np.uint32)


def put(queued: Queued, lease: int, rows: np.ndarray, deadline_ms: int) -> None:
    queued.put(0, lease, rows, words(rows), deadline_ms)


def leases(queued: Queued) -> list[int]:
    return [request.lease for request in queued.in_order()]


def test_the_soonest_is_first_and_who_asked_before_all() -> None:
    queued = Queued(ROWS)
    for lease, deadline_ms in ((1, 900), (2, 100), (3, 0), (4, 100)):
        put(queued, lease, chain_of(lease), deadline_ms)
    assert leases(queued) == [2, 4, 1, 3]
    for lease in (3, 9):  # one that was queued, and one that was not
        rows = chain_of(lease)
        queued.ask(0, lease, rows, words(rows), now_ms=50)
    assert leases(queued) == [3, 9, 2, 4, 1]
    queued.ask(0, 3, chain_of(3), words(chain_of(3)), now_ms=80)
    assert leases(queued)[0] == 3  # asked again, and not behind the other for it
    assert queued.asked_before(60) == [(0, 9)]
    queued.end(0, 3)
    assert queued.first() is queued.get(0, 9)
    assert queued.faults() == []


def test_who_is_next_is_told_by_how_much_they_want_but_the_first_counts_whatever_it_wants() -> None:
    queued = Queued(ROWS)
    assert queued.due_first(8) == 0
    put(queued, 9, chain_of(*range(40, 50)), 100)  # has not asked
    assert queued.due_first(8) == 0
    for lease, size in ((1, 6), (2, 2), (3, 1)):
        rows = chain_of(*range(10 * lease, 10 * lease + size))
        queued.ask(0, lease, rows, words(rows), now_ms=50)
    deadlines = {request.lease: request.deadline_ms for request in queued.in_order()}
    assert queued.due_first(8) == deadlines[2]
    assert queued.due_first(9) == deadlines[3]
    assert queued.due_first(5) == deadlines[1]
    assert queued.faults() == []


def test_deadlines_of_what_is_shared_are_those_of_who_still_waits() -> None:
    """A block kept the deadline of a request that had it long since, and was spared for others that come later."""
    rng = random.Random(1)
    for _ in range(40):
        queued = Queued(ROWS)
        live: dict[int, tuple[np.ndarray, int]] = {}
        for lease in range(12):
            depth = rng.randint(1, 6)
            # A tree: row 1 is the root, a node's children are 2n and 2n + 1.
            path = [1]
            while len(path) < depth:
                path.append(2 * path[-1] + rng.randrange(2))
            live[lease] = (np.array(path, dtype=np.uint32), rng.randint(1, 99))
            put(queued, lease, *live[lease])
        while live:
            lease = rng.choice(list(live))
            queued.end(0, lease)
            del live[lease]
            assert queued.faults() == []
            for row in range(ROWS):
                deadlines = [deadline for rows, deadline in live.values() if row in rows]
                assert queued.wanted[row] == len(deadlines)
                if deadlines:
                    assert queued.soonest_ms[row] == min(deadlines)


def test_keys_of_what_is_wanted_are_behind_all_others() -> None:
    queued = Queued(ROWS)
    put(queued, 1, chain_of(1, 2), 1_000)
    put(queued, 2, chain_of(3), 5_000)
    put(queued, 3, chain_of(4), 0)
    rows, depth = np.arange(6, dtype=np.uint32), np.arange(ROWS, dtype=np.uint32)
    keys = touch_key(1 << 41, depth[rows])
    queued.raise_keys(keys, rows, depth)
    assert np.argsort(keys).tolist() == [
        5,
        0,
        4,
        3,
        2,
        1,
    ]  # unwanted tail first; no deadline; furthest; its tail
    assert queued.not_before(1_000, rows).tolist() == [True, False, False, True, True, True]
    assert queued.soonest_ms[4] == NO_DEADLINE_MS


def test_who_wants_soonest_what_was_lost_is_looked_at_again_from_there() -> None:
    queued, depth = Queued(ROWS), np.arange(ROWS, dtype=np.uint32) % 8
    put(queued, 1, chain_of(0, 1, 2, 3), 100)
    put(queued, 2, chain_of(0, 1, 10, 11), 200)
    put(queued, 3, chain_of(16, 17), 300)
    for lease in (1, 2, 3):
        request = queued.get(0, lease)
        assert request is not None
        request.looked_at = 2 if lease == 3 else 3
    queued.ask(0, 3, chain_of(16, 17), words(chain_of(16, 17)), now_ms=50)
    queued.lost(chain_of(1, 2, 3, 11, 17, 40))
    assert [(each.lease, each.looked_at) for each in queued.look_again(depth)] == [(1, 1)]
    assert queued.look_again(depth) == []
    queued.lost(chain_of(10))
    assert [(each.lease, each.looked_at) for each in queued.look_again(depth)] == [(2, 2)]
    assert queued.faults() == []


def test_what_ended_is_wanted_by_nobody() -> None:
    queued = Queued(ROWS)
    put(queued, 1, chain_of(1, 2, 2), 10)  # a chain that names a block twice
    put(queued, 1, chain_of(5), 20)
    assert np.flatnonzero(queued.wanted).tolist() == [5]
    assert queued.end(0, 7) is None
    queued.end(0, 1)
    assert not queued.wanted.any()
    assert len(queued) == 0
    assert queued.of_session(0) == []
    assert queued.first() is None
