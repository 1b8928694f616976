"""Conversations: when the next turn of each may come, and which blocks it will ask for.

A prompt that goes on where an earlier one ended is its next turn. How long that takes is learned by class (turns so
far, and the last gap) from all conversations, as reuse ages (`Ages`; `eviction.reuse_ages` is one). A conversation is
known from its second prompt on: before it there was nothing cached to know it by. Volatile and bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import GENERATION_SHIFT
from kvstore.moves import U32, U64

__all__ = ["CLASSES", "Ages", "ExpectedTurn", "NextTurns"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_MOST_TURNS = 6  # and more
_GAPS = 11  # two octaves of seconds each; the last: no gap yet
CLASSES = (_MOST_TURNS + 1, _GAPS)
"""Factors of the classes that `Ages` is made for; no life is ever begun in the last row, which stands for all."""
_OF_ALL = _MOST_TURNS * _GAPS
_MOST = 4096  # conversations
_REFRESH_TURNS = 64
_LEAST_WORTH = 1.0 / 3600.0
"""Hits a second of a slot: a block that is brought up should be asked for within an hour at the best."""


class Ages(Protocol):
    """How soon lives of each class end, learned from those that did."""

    def begin(self, classes: I64, now_s: float, /) -> int:
        """Lives begin; the number of the first."""
        ...

    def end(self, lives: I64, now_s: float, /) -> F64:
        """[n] ages of lives that end now."""
        ...

    def refresh(self, now_s: float, /) -> None:
        """What was learned counts from now on."""
        ...

    def worth_at(self, classes: I64, ages_s: F64, /) -> F64:
        """[n] hits a second of a slot that holds a block of such a life, at such an age."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTurn:
    """A conversation that may go on soon. `rows` and `words` are as they were at its last turn."""

    place: int
    rows: U32
    words: U64
    worth: float


class NextTurns:
    """See the module. One call a prompt, O(its blocks)."""

    __slots__ = (
        "_ages",
        "_at",
        "_class",
        "_done",
        "_last_ms",
        "_life",
        "_of_row",
        "_rows",
        "_turns",
        "_words",
    )

    def __init__(self, rows: int, ages: Ages) -> None:
        self._ages = ages
        self._of_row: NDArray[np.int32] = np.full(rows, -1, dtype=np.int32)
        """[rows] the conversation whose last known block it was."""
        self._rows: list[U32 | None] = [None] * _MOST
        self._words: list[U64 | None] = [None] * _MOST
        self._class: I64 = np.zeros(_MOST, dtype=np.int64)
        self._life: I64 = np.zeros(_MOST, dtype=np.int64)
        self._last_ms: I64 = np.zeros(_MOST, dtype=np.int64)
        self._done: NDArray[np.bool_] = np.ones(_MOST, dtype=np.bool_)  # also: there is none
        self._at = 0
        self._turns = 0

    def turn(self, rows: U32, words: U64, now_ms: int) -> None:
        """A prompt was served whose leading blocks had these rows, at least one, and state words; both are kept."""
        before = self._before(rows, words)
        turns, gap = 0, _GAPS - 1
        if before is not None:
            (age_s,) = self._ages.end(self._life[before : before + 1], now_ms / 1000)
            turns = min(int(self._class[before]) // _GAPS + 1, _MOST_TURNS - 1)
            gap = (
                min(int(np.log2(max(float(age_s), 1.0))) // 2, _GAPS - 2) if np.isfinite(age_s) else _GAPS - 2
            )
            self._forget(before)
        place = self._at if before is None else before
        if before is None:
            self._at = (self._at + 1) % _MOST
            self._forget(place)
        self._rows[place], self._words[place] = rows, words
        self._class[place] = turns * _GAPS + gap
        self._life[place] = self._ages.begin(self._class[place : place + 1], now_ms / 1000)
        self._last_ms[place] = now_ms
        self._done[place] = False
        self._of_row[rows[-1]] = place
        self._turns += 1

    def due(self, now_ms: int, count: int) -> list[ExpectedTurn]:
        """Up to `count` conversations that are worth a slot most, and worth one at all. O(conversations).

        For the background: what was learned lately is made to count here, which takes milliseconds.
        """
        if self._turns >= _REFRESH_TURNS:
            self._turns = 0
            self._ages.refresh(now_ms / 1000)
        places = np.flatnonzero(~self._done)
        worth = self._ages.worth_at(self._class[places], (now_ms - self._last_ms[places]) / 1000.0)
        order = np.argsort(-worth, kind="stable")[:count]
        found = []
        for place, value in zip(places[order].tolist(), worth[order].tolist(), strict=True):
            rows, words = self._rows[place], self._words[place]
            if value >= _LEAST_WORTH and rows is not None and words is not None:
                found.append(ExpectedTurn(place=place, rows=rows, words=words, worth=value))
        return found

    def brought(self, turn: ExpectedTurn) -> None:
        """Nothing more is to be done for it before its next turn."""
        self._done[turn.place] = True

    def worth_of_all(self, touched_ms: I64, now_ms: int) -> F64:
        """[n] of blocks that were used then for the last time, whatever conversations they are of."""
        return self._ages.worth_at(np.full(len(touched_ms), _OF_ALL), (now_ms - touched_ms) / 1000.0)

    def _before(self, rows: U32, words: U64) -> int | None:
        """The conversation that this prompt goes on with: the one whose last block lies deepest in it."""
        at = np.flatnonzero(self._of_row[rows] >= 0)
        for position in at[::-1].tolist():
            place = int(self._of_row[rows[position]])
            of_place = self._words[place]
            same = (
                of_place is not None
                and of_place[-1] >> GENERATION_SHIFT == words[position] >> GENERATION_SHIFT
            )
            if same:
                return place
        return None

    def _forget(self, place: int) -> None:
        rows = self._rows[place]
        if rows is not None and self._of_row[rows[-1]] == place:
            self._of_row[rows[-1]] = -1
        self._rows[place] = self._words[place] = None
        self._done[place] = True
