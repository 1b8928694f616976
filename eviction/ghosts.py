"""The last names that left a cache, in order, and no more than so many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.names import Names
from eviction.order import Order

__all__ = ["Ghosts"]


class Ghosts:
    """A bounded queue of names. Names that share a place of the table push each other out (`Names`)."""

    __slots__ = ("_names", "_order")

    def __init__(self, *, rows: int, capacity_blocks: int) -> None:
        self._names = Names(max(rows, 4 * capacity_blocks))
        self._order = Order(len(self._names))

    def __len__(self) -> int:
        return len(self._order)

    def add(self, names: NDArray[np.uint64]) -> None:
        """The newest, in this order; distinct."""
        places = self._names.put(names)
        held = self._names.hold(places, names)  # but for those that others of these pushed out
        self._order.append(places if held.all() else places[held])

    def known(self, names: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """[n] whether each is a ghost."""
        places = self._names.places(names)
        found: NDArray[np.bool_] = self._order.has(places) & self._names.hold(places, names)
        return found

    def discard(self, names: NDArray[np.uint64]) -> None:
        """These, all known, are ghosts no more."""
        self._order.remove(self._names.places(names))

    def trim(self, most: int) -> None:
        """The oldest go until there are at most so many."""
        self._order.take(len(self._order) - most)
