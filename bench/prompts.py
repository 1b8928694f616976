"""Prompts of random tokens that are the same in every process, and schedules of visits to long documents. Pure."""

from __future__ import annotations

from enum import Enum

import numpy as np

__all__ = ["Schedule", "document_lengths", "random_prompt", "visits"]

_FIRST_TOKEN = 3  # no control token of a vocabulary


class Schedule(Enum):
    """In which order documents are visited again."""

    ZIPF = "zipf"
    """A few of them most of the time: the n-th most popular with a probability in proportion to 1 / n."""
    ROUND_ROBIN = "round_robin"
    """One after the other: just over the capacity of a cache, pure LRU never hits."""


def random_prompt(seed: int, tokens: int, vocab_size: int) -> list[int]:
    """`tokens` token ids; a longer prompt of the same seed begins with the shorter one."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(_FIRST_TOKEN, vocab_size, tokens).tolist()
    return ids


def document_lengths(total_tokens: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths between `shortest` and `longest`, evenly spread at random, that add up to `total_tokens` at least."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < total_tokens:
        lengths.append(int(rng.integers(shortest, longest + 1)))
    return lengths


def visits(schedule: Schedule, documents: int, count: int, seed: int) -> list[int]:
    """Which document each of `count` visits goes to. Popularity has nothing to do with the documents' numbers."""
    if schedule is Schedule.ROUND_ROBIN:
        return [visit % documents for visit in range(count)]
    rng = np.random.default_rng(seed)
    ranks = rng.permutation(documents)
    weights = 1.0 / np.arange(1, documents + 1)
    chosen: list[int] = ranks[rng.choice(documents, count, p=weights / weights.sum())].tolist()
    return chosen
