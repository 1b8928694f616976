"""How far a load in groups of layers is: `engine_adapter.base.Arriving`, told by the copier's thread."""

from __future__ import annotations

import threading

__all__ = ["Arrival"]

_PATIENCE_S = 60.0
"""Since a group came last. It is a few GiB and takes a fraction of a second, but that the first one may have to wait
until as much as all groups together is pinned, 0.3 s a GiB; a copier that takes longer is broken."""


class Arrival:
    """Of one load. `came` is called on a copier's thread, `wait_for` on the engine's."""

    def __init__(self, *, layers: int, groups: int, patience_s: float = _PATIENCE_S) -> None:
        """`groups` divides `layers`."""
        assert layers % groups == 0, "a group is a whole number of layers"
        self.groups = groups
        self._layers_each = layers // groups
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._groups_here = 0
        self._failed = False
        self._differs = False

    @property
    def differs(self) -> bool:
        """See Arriving."""
        return self._differs

    def reject(self) -> None:
        """What came is not what was stored; its last group has not been given to anybody."""
        self._differs = True
        self.fail()

    def fail(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def came(self, group: int) -> None:
        """A group has, and all before it had."""
        with self._changed:
            self._groups_here = group + 1
            self._changed.notify_all()

    def wait_for(self, layer: int) -> bool:
        """See Arriving."""
        group = layer // self._layers_each
        with self._changed:
            while (here := self._groups_here) <= group:
                news = self._changed.wait_for(
                    lambda: self._failed or self._groups_here != here, self._patience_s
                )
                if self._failed or not news:
                    return False
        return True
