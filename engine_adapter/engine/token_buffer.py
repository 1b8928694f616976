"""A request's tokens, prompt and answer, in one array: a prompt of 131,072 is taken in without an object a token."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenBuffer"]


class TokenBuffer(Sequence[int]):
    """Behaves like the list of ints that it stands for; a slice is an array."""

    __slots__ = ("_count", "_ids")

    def __init__(self, prompt: NDArray[np.uint32], capacity: int) -> None:
        """Copies the prompt. `capacity`: tokens that are expected in all; more than that still fit."""
        self._count = len(prompt)
        self._ids = np.empty(max(capacity, self._count), dtype=np.int32)
        self._ids[: self._count] = prompt

    def __len__(self) -> int:
        return self._count

    @overload  # type: ignore[override]  # an array in place of a Sequence
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> NDArray[np.int32]: ...

    def __getitem__(self, place: int | slice) -> int | NDArray[np.int32]:
        """One token, or [n] those of a range, which later changes do not reach."""
        known = self._ids[: self._count]
        return known[place].copy() if isinstance(place, slice) else int(known[place])

    def __setitem__(self, place: int, token: int) -> None:
        self._ids[: self._count][place] = token

    def __delitem__(self, place: slice) -> None:
        """Drops the end, from a position on."""
        start, stop, step = place.indices(self._count)
        if stop != self._count or step != 1:
            raise ValueError("only the end of a request's tokens can be dropped")
        self._count = min(start, self._count)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._count].tolist())

    def append(self, token: int) -> None:
        """One more at the end. O(1), amortised."""
        if self._count == len(self._ids):
            self._ids = np.resize(self._ids, max(16, 2 * self._count))
        self._ids[self._count] = token
        self._count += 1

    def pop(self) -> int:
        """Takes the last one away. Raises: IndexError."""
        token = self[-1]
        self._count -= 1
        return token
