"""Fields of a row, as readers take them: what is not of the kind or in the range that the format has raises ValueError.

A trace is a file of others. A number that is taken as it comes fails far from its line: as a length that no memory
holds, or as another number, where it does not fit into the arrays of a `Trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.simulate.readers.base import Row

__all__ = [
    "MOST_TOKENS",
    "ids_of",
    "list_of",
    "number_of",
    "once",
    "text_of",
    "tokens_of",
    "whole",
    "whole_number",
]

MOST_TOKENS = (1 << 31) - 1
"""Of a prompt or an answer: what a column of a trace holds."""
_MOST = 1 << 52
"""Of a number: a double holds it exactly, and a thousand times as much fits into 64 bits. NaN is not below it."""
_ID_BITS = 63
_SHOWN_CHARACTERS = 40


def whole(row: Row, key: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`, which may be written as 5.0. Raises: KeyError, ValueError."""
    return whole_number(row[key], key, low, high)


def whole_number(value: object, name: str, low: int, high: int) -> int:
    """The same of a value that has that name. Raises: ValueError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {_shown(value)}, not a whole number from {low:,} to {high:,}")
    return value


def tokens_of(row: Row, key: str) -> int:
    """A length in tokens. Raises: KeyError, ValueError."""
    return whole(row, key, 0, MOST_TOKENS)


def number_of(row: Row, key: str) -> float:
    """A number, whole or not, as times are. Raises: KeyError, ValueError."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise ValueError(f"{key} is {_shown(value)}, not a number up to {_MOST:,}")
    return value


def text_of(row: Row, key: str) -> str:
    """Raises: KeyError, ValueError."""
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is {_shown(value)}, not text")
    return value


def list_of(row: Row, key: str) -> Sequence[Any]:
    """Raises: KeyError, ValueError."""
    value = row[key]
    if not isinstance(value, list):
        raise ValueError(f"{key} is {_shown(value)}, not a list")
    return value


def ids_of(row: Row, key: str) -> Sequence[int]:
    """Ids of blocks, each with its sign in 64 bits. Raises: KeyError, ValueError."""
    ids = list_of(row, key)
    for value in ids:
        if type(value) is not int or value.bit_length() > _ID_BITS:
            raise ValueError(f"{key} has {_shown(value)}, which is no id of a block")
    return ids


def once(ids: Sequence[int], key: str) -> Sequence[int]:
    """`ids`, of blocks with their prefixes: none can stand in a prompt twice. Raises: ValueError."""
    if len(set(ids)) < len(ids):
        raise ValueError(f"{key} has a block twice")
    return ids


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
