"""The sampled shadow beside LRU of each size."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.daemon.shadow import Shadow

SLOT = 4096


def prompts(count: int, seed: int) -> list[NDArray[np.uint64]]:
    """Prompts of up to 60 blocks; the next turn of one of 40 conversations, each longer than the last."""
    rng = np.random.default_rng(seed)
    chains = [rng.integers(0, 1 << 63, (60, 2), dtype=np.uint64) for _ in range(400)]
    turns = []
    for _ in range(count):
        chain = chains[min(int(rng.exponential(60.0)), len(chains) - 1)]
        turns.append(chain[: rng.integers(20, 61)])
    return turns


def lru(turns: list[NDArray[np.uint64]], capacity: int) -> float:
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = asked = 0
    for turn in turns:
        names = [block.tobytes() for block in turn]
        asked += len(names)
        hits += next((at for at, name in enumerate(names) if name not in cache), len(names))
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / asked


def test_the_curve_is_near_lru_of_each_size() -> None:
    turns = prompts(3000, 1)
    capacity = 4000
    shadow = Shadow(capacity * SLOT)
    for turn in turns:
        shadow.note(turn, SLOT)
        shadow.work()
    points = shadow.curve()
    assert [point.dram_bytes for point in points] == [scale * capacity * SLOT for scale in (0.5, 1, 2, 4)]
    for point in points:
        assert point.hit_rate == pytest.approx(lru(turns, point.dram_bytes // SLOT), abs=0.03)
    assert points[0].hit_rate < points[1].hit_rate < points[2].hit_rate


def test_memory_is_bounded_and_the_rate_falls_until_it_fits() -> None:
    """Each block new: none is ever a hit, and the sample is as large as the first day."""
    shadow = Shadow(1 << 40)
    rng = np.random.default_rng(2)
    for _ in range(400):
        shadow.note(rng.integers(0, 1 << 63, (1000, 2), dtype=np.uint64), SLOT)
        shadow.work()
    assert len(shadow._places) <= len(shadow._names)
    assert shadow._rate_bits > 3
    assert all(point.hit_rate < 0.01 for point in shadow.curve())


def test_what_lies_beyond_the_largest_size_goes_first() -> None:
    shadow = Shadow(100 * SLOT)
    rng = np.random.default_rng(3)
    for _ in range(100):
        shadow.note(rng.integers(0, 1 << 63, (1000, 2), dtype=np.uint64), SLOT)
        shadow.work()
    assert shadow._rate_bits == 3  # 400 blocks need no smaller sample, however many pass through


def test_the_curve_follows_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for long ago counts less and less."""
    monkeypatch.setattr("kvstore.daemon.shadow._HALVED_AT", 1 << 10)
    shadow = Shadow(64 * SLOT)
    rng = np.random.default_rng(4)
    same = rng.integers(0, 1 << 63, (64, 2), dtype=np.uint64)
    for _ in range(50):
        shadow.note(rng.integers(0, 1 << 63, (1000, 2), dtype=np.uint64), SLOT)
        shadow.work()
    before = shadow.curve()[-1].hit_rate
    for _ in range(4000):
        shadow.note(same, SLOT)
        shadow.work()
    assert before < 0.05
    assert shadow.curve()[-1].hit_rate > 0.9


def test_another_size_begins_anew() -> None:
    shadow = Shadow(1 << 20)
    same = np.random.default_rng(5).integers(0, 1 << 63, (64, 2), dtype=np.uint64)
    for _ in range(20):
        shadow.note(same, SLOT)
        shadow.work()
    shadow.resize(1 << 20)
    assert shadow.curve()[-1].hit_rate > 0.5
    shadow.resize(1 << 21)
    assert shadow.curve() == ()
    shadow.note(same, SLOT)
    shadow.work()
    assert [point.dram_bytes for point in shadow.curve()] == [1 << 20, 1 << 21, 1 << 22, 1 << 23]
    assert shadow.curve()[-1].hit_rate > 0.9  # the sample had it already


def test_nothing_asked_for_has_no_curve() -> None:
    shadow = Shadow(1 << 30)
    assert shadow.curve() == ()
    shadow.note(np.empty((0, 2), dtype=np.uint64), SLOT)
    shadow.work()
    assert shadow.curve() == ()
    without_dram = Shadow(0)
    without_dram.note(np.ones((4, 2), dtype=np.uint64), SLOT)
    without_dram.work()
    assert without_dram.curve() == ()
