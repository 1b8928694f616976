"""Prompts and schedules that every process makes alike."""

from __future__ import annotations

import pytest

from bench.prompts import Schedule, document_lengths, random_prompt, visits


def test_a_longer_prompt_begins_with_the_shorter_one() -> None:
    short, long = random_prompt(3, 100, 512), random_prompt(3, 1000, 512)
    assert long[:100] == short
    assert random_prompt(4, 100, 512) != short
    assert min(long) >= 3
    assert max(long) < 512


def test_documents_reach_the_total_and_keep_their_bounds() -> None:
    lengths = document_lengths(1_000_000, 32_768, 131_072, seed=2)
    assert sum(lengths) >= 1_000_000 > sum(lengths[:-1])
    assert all(32_768 <= length <= 131_072 for length in lengths)
    assert lengths == document_lengths(1_000_000, 32_768, 131_072, seed=2)


def test_round_robin_visits_each_before_any_again() -> None:
    assert visits(Schedule.ROUND_ROBIN, 3, 7, seed=0) == [0, 1, 2, 0, 1, 2, 0]


def test_zipf_prefers_a_few() -> None:
    order = visits(Schedule.ZIPF, 20, 5000, seed=1)
    counts = sorted((order.count(document) for document in range(20)), reverse=True)
    # 1 / n over 20: the first is visited about twice as often as the second, and 20 times as often as the last.
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.2)
    assert counts[0] > 10 * counts[-1]
    assert order == visits(Schedule.ZIPF, 20, 5000, seed=1)
