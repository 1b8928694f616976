"""The last names that left a cache, in order, and no more than so many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eviction.names import NOWHERE, Names
from eviction.order import Order

__all__ = ["Ghosts"]

_PLACES = 4  # a block of the cache, so that hardly a bucket is ever full (`Names`)
_FEWEST_PLACES = 1 << 12


class Ghosts:
    """A bounded queue of names."""

    __slots__ = ("_names", "_order")

    def __init__(self, *, capacity_blocks: int) -> None:
        self._names = Names(max(_PLACES * capacity_blocks, _FEWEST_PLACES))
        self._order = Order(len(self._names))
        self._names.commit()
        self._order.commit()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, names: NDArray[np.uint64]) -> None:
        """The newest, in this order; distinct."""
        if not len(names):
            return
        places = self._names.find(names)
        new = places == NOWHERE
        if new.any():
            self._order.append(places[~new].astype(np.uint32))  # so that none of these has to make way
            places[new] = self._names.put(names[new], self._order.places)
        self._order.append(places[places != NOWHERE].astype(np.uint32))

    def known(self, names: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """[n] whether each is a ghost."""
        if not len(self._order):
            return np.zeros(len(names), dtype=np.bool_)
        places = self._names.find(names)
        found: NDArray[np.bool_] = places != NOWHERE
        found[found] = self._order.has(places[found].astype(np.uint32))
        return found

    def discard(self, names: NDArray[np.uint64]) -> None:
        """These, all known, are ghosts no more."""
        if len(names):
            self._order.remove(self._names.find(names).astype(np.uint32))

    def trim(self, most: int) -> None:
        """The oldest go until there are at most so many."""
        self._order.take(len(self._order) - most)
