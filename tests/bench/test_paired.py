"""Ratios of sides that are asked by turns."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from bench.paired import in_turn, noise_alike, noise_of, ratio, ratios


@pytest.mark.parametrize("sides", ["ab", "abc"])
def test_each_side_has_each_place_as_often_and_follows_each_other_as_often(sides: str) -> None:
    orders = [in_turn(sides, number) for number in range(2 * len(sides))]
    for place in range(len(sides)):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == len(sides) * (len(sides) - 1)
    assert len(set(followed.values())) == 1


def test_load_that_comes_and_goes_is_in_no_ratio() -> None:
    """Medians of each side apart told how many of its rounds were in the busy half."""
    load = [1.0] * 9 + [4.0] * 8
    assert ratio([1.1 * each for each in load], load) == pytest.approx(1.1)


def test_the_noise_covers_what_chance_does_to_two_like_sides() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(200):
        one, other = ([rng.lognormvariate(0.0, 0.2) for _ in range(15)] for _ in range(2))
        found = ratios(one, other)
        covered += abs(ratio(one, other) - 1.0) <= noise_of(found)
    assert covered >= 180


def test_a_single_round_has_no_noise_and_none_has_none() -> None:
    assert noise_of([1.2]) == 0.0
    assert noise_alike([1.2]) == pytest.approx(0.2)
    assert noise_of([]) == noise_alike([]) == 0.0
