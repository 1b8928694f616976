"""Sides of a benchmark that are asked by turns: the ratio of two of them, and how far it is from what it would be.

What else a machine does changes by the minute, and strikes whoever is asked then. So what counts are ratios within a
round, in which every side is asked once, each time in another order, and of them the median.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from bench.timing import median, percentile

__all__ = ["in_turn", "noise_alike", "noise_of", "ratio", "ratios"]

_NOTCH = 1.57
"""McGill, Tukey and Larsen (1978): medians are 1.57 x (quartiles' distance) / sqrt(n) from where they belong, at most,
in 95 of 100 samples."""

_Side = TypeVar("_Side")


def in_turn(sides: Sequence[_Side], number: int) -> list[_Side]:
    """The sides in the order of that round: each begins as often as the others, and follows each other one as often."""
    start = number % len(sides)
    order = [*sides[start:], *sides[:start]]
    return order if number // len(sides) % 2 == 0 else order[::-1]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Of each round."""
    return [one / other for one, other in zip(over, under, strict=True)]


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return median(ratios(over, under))


def noise_of(found: Sequence[float]) -> float:
    """How far the median of these ratios may be from where it belongs, by chance; 0 of a single one."""
    return _NOTCH * (percentile(found, 75) - percentile(found, 25)) / math.sqrt(len(found)) if found else 0.0


def noise_alike(found: Sequence[float]) -> float:
    """Of ratios of two sides that are the same: how far they are from 1, or may be; 0 of none."""
    return max(abs(median(found) - 1.0), noise_of(found)) if found else 0.0
