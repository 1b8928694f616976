"""Names that left: bounded, in order, and honest where many share a bucket."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.ghosts import Ghosts
from eviction.sketch import Sketch


def named(*names: int) -> NDArray[np.uint64]:
    return np.array(names, dtype=np.uint64)


def test_the_oldest_go_first_and_what_comes_back_is_no_ghost() -> None:
    ghosts = Ghosts(capacity_blocks=4)
    ghosts.add(named(1, 2, 3))
    ghosts.add(named(4, 1))
    ghosts.trim(3)
    assert ghosts.known(named(1, 2, 3, 4)).tolist() == [True, False, True, True]
    ghosts.discard(named(3))
    assert len(ghosts) == 2
    assert not ghosts.known(named(3)).any()


def test_names_that_share_a_bucket_are_never_taken_for_each_other() -> None:
    ghosts = Ghosts(capacity_blocks=4)
    same = [5 + 4096 * number for number in range(10)]
    ghosts.add(named(*same[:8]))
    assert ghosts.known(named(*same)).tolist() == [True] * 8 + [False] * 2
    ghosts.add(named(*same[8:]))
    assert ghosts.known(named(*same)).tolist() == [False] * 2 + [True] * 8
    assert len(ghosts) == 8


def test_a_sketch_never_counts_too_little_until_it_ages() -> None:
    sketch, rng = Sketch(64), np.random.default_rng(0)
    exact: dict[int, int] = {}
    for _ in range(30):
        names = rng.choice(200, 16, replace=False).astype(np.uint64)
        sketch.add(names)
        for name in names.tolist():
            exact[name] = exact.get(name, 0) + 1
    counts = sketch.count(np.array(list(exact), dtype=np.uint64))
    assert (counts >= np.minimum(list(exact.values()), 15)).all()
    others = np.array([name for name in exact if name >= 16], dtype=np.uint64)
    before = sketch.count(others).astype(int)
    for _ in range(10):  # 640 uses, ten a block: all counts are halved
        sketch.add(named(*range(16)))
    assert sketch.count(others).sum() < 0.75 * before.sum()
