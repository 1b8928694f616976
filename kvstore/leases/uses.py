"""Who may use the cache how: the service, each namespace and each session allow something, and all of it must.

The store asks at each acquire and seal; the shell says what service and namespaces allow, and a session says its part
when it attaches. What service and namespaces take away stands in the tables too, for lookups of clients. Owner only.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.cache_use import Access, CacheUse

__all__ = ["Allowed", "Uses"]

_ALL = CacheUse.ON.access


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one request may do: the bits of `Access`, as the store asks for them."""

    reads: bool
    writes: bool
    counts: bool


# An operation on an IntFlag costs a microsecond, and an acquire would have several.
_OF_BITS = tuple(
    Allowed(bool(bits & Access.READS), bool(bits & Access.WRITES), bool(bits & Access.COUNTS))
    for bits in range(8)
)
_WRITES = int(Access.WRITES)


class Uses:
    """What is allowed to whom. One owner; the shell sets it, the store asks."""

    __slots__ = ("_everywhere", "_forbidden", "_of_namespace")

    def __init__(self, max_namespaces: int, forbidden: NDArray[np.uint8]) -> None:
        """`forbidden`: the column of the tables; what a daemon before this one said there ends."""
        self._everywhere = int(_ALL)
        self._of_namespace = bytearray([int(_ALL)]) * max_namespaces
        self._forbidden = forbidden
        forbidden[:] = 0

    def allow_everywhere(self, access: Access) -> None:
        """No request may do more than this."""
        self._everywhere = int(access)
        self._forbidden[0] = int(_ALL & ~access)

    def allow(self, namespace: int, access: Access) -> None:
        """A namespace, and the tenant that it is of, allow this."""
        self._of_namespace[namespace] = int(access)
        if namespace + 1 < len(self._forbidden):
            self._forbidden[namespace + 1] = int(_ALL & ~access)

    def of(self, session: int, namespace: int) -> Allowed:
        """What a request of a session, which allows `session`, may do with a namespace."""
        return _OF_BITS[self._of_namespace[namespace] & self._everywhere & session]

    def may_write(self, session: int, namespaces: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """[n] whether blocks of each namespace, all known, may be stored."""
        of_namespaces = np.frombuffer(self._of_namespace, dtype=np.uint8)[namespaces]
        allowed = of_namespaces & np.uint8(self._everywhere & session)
        found: NDArray[np.bool_] = (allowed & np.uint8(_WRITES)) != 0
        return found

    def needs_room(self, session: int) -> bool:
        """Whether what a session stores may need room in DRAM."""
        return bool(self._everywhere & session & _WRITES)
