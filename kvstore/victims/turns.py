"""Whose blocks may be victims now: has the evictor look for victims among one group of tenants after the other.

The group stands in `who` while it looks, and every check of a victim asks `passes`. Owned by one evictor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import Tier
from kvstore.moves import U32
from kvstore.tables.slots import ClassKey, SlotClass
from kvstore.victims.quotas import Quotas

__all__ = ["Turns"]

_FEW_SLOTS = 1 << 15  # so many are soon looked at one by one
_NOBODY: U32 = np.empty(0, dtype=np.uint32)


class Turns:
    """See the module."""

    __slots__ = ("_barren", "_quotas", "_who")

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._who: NDArray[np.bool_] | None = None  # [tenants]; None: everybody
        self._barren: dict[tuple[Tier, ClassKey], set[int]] = {}

    @property
    def name(self) -> bytes:
        """Of the group whose turn it is: what was chosen ahead is of one group."""
        return b"" if self._who is None else self._who.tobytes()

    def passes(self, good: NDArray[np.bool_], tier: Tier, slots: U32) -> NDArray[np.bool_]:
        """[n] `good`, without slots with blocks of those whose turn it is not."""
        return good if self._who is None else good & self._quotas.of(self._who, tier, slots)

    def few(self, tier: Tier, owner: SlotClass) -> U32 | None:
        """The slots of those whose turn it is, of every class of the tier, where they are few of a large class."""
        if self._who is None or owner.slots <= _FEW_SLOTS:
            return None
        return self._quotas.few(self._who, tier, owner.key.slot_bytes, _FEW_SLOTS)

    def take(
        self, tier: Tier, owner: SlotClass, asks: int, count: int, missing: int, look: Callable[[int], U32]
    ) -> U32:
        """Some of the `missing` victims for `asks`, which needs `count` slots; `look(n)` finds at most n in this turn.

        None where nobody who may give has any; that is remembered until the class is no longer marked as exhausted.
        """
        quotas, name = self._quotas, (tier, owner.key)
        if not quotas.active:
            return look(missing)
        barren = self._barren.setdefault(name, set()) if owner.exhausted else set()
        if asks in barren:
            return _NOBODY
        try:
            for givers in quotas.givers(tier, owner.key.slot_bytes, asks, count, missing):
                self._who, owner.exhausted = givers.who, False
                victims = look(givers.slots)
                if len(victims):
                    return victims
        finally:
            self._who = None
        owner.exhausted = True
        self._barren[name] = barren | {asks}
        return _NOBODY
