"""The log of a class beside a list of all its entries."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from eviction import class_log as module
from eviction.class_log import ClassLog, Entries

ROWS = 60


def entries(rows: list[int], first_stamp: int, mark: float) -> Entries:
    return Entries(
        rows=np.array(rows, dtype=np.uint32),
        stamps=np.arange(first_stamp, first_stamp + len(rows)),
        marks=np.full(len(rows), mark),
    )


@pytest.mark.parametrize("seed", range(4))
def test_it_answers_like_a_list(seed: int) -> None:
    rng, alive = np.random.default_rng(seed), np.full(ROWS, -1)
    with mock.patch.multiple(module, _FEWEST_SEGMENT=4, _MOST_SEGMENT=16):
        log, stamp = ClassLog(), 0
        for step in range(200):
            rows = rng.permutation(ROWS)[: int(rng.integers(1, 12))].tolist()
            alive[rows] = np.arange(stamp, stamp + len(rows))
            log.append(entries(rows, stamp, float(step // 3)), alive)
            stamp += len(rows)
            alive[rng.integers(0, ROWS, 3)] = -1
            live = np.flatnonzero(alive >= 0)
            model = live[np.argsort(alive[live])].tolist()
            found = [row for part in log.parts() for row in part.picked(part.live(alive)).rows.tolist()]
            assert found == model
            assert log.first(7, alive).rows.tolist() == model[:7]
            bound = float(rng.integers(0, step + 1))
            marks = {
                int(r): m
                for p in log.parts()
                for r, m, s in zip(p.rows, p.marks, p.stamps, strict=True)
                if alive[r] == s
            }
            below = [row for row in model if marks[row] <= bound]
            assert log.up_to(bound, 5, alive).rows.tolist() == below[:5]
        assert len(log) < 6 * ROWS
