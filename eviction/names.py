"""What left a cache, by name, so that it is recognised when it comes back in another row.

One column of names in a table that is addressed by the name itself: what collides is forgotten, which costs a policy
a little knowledge and nothing else. Names below the table's size never collide (a simulation uses its block numbers).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Names"]

_NO_NAME = np.uint64(0xFFFFFFFFFFFFFFFF)


class Names:
    """Places of names. A place holds the last name that was put there."""

    __slots__ = ("_mask", "_names")

    def __init__(self, at_least: int) -> None:
        size = 1 << max(at_least - 1, 1).bit_length()
        self._names = np.full(size, _NO_NAME)
        self._mask = np.uint64(size - 1)

    def __len__(self) -> int:
        return len(self._names)

    def places(self, names: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """[n] where each name stands if it stands anywhere."""
        return (names & self._mask).astype(np.uint32)

    def put(self, names: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """[n] the names' places, theirs now."""
        places = self.places(names)
        self._names[places] = names
        return places

    def hold(self, places: NDArray[np.uint32], names: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """[n] whether each place holds that name."""
        found: NDArray[np.bool_] = self._names[places] == names
        return found
