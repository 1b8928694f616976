"""How a cache is used: whether lookups are served, blocks are stored, and hits are counted that were not served.

Said in several places at once (the service, a tenant, a namespace, a session); what all of them allow is done. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntFlag

__all__ = ["Access", "CacheUse"]


class Access(IntFlag):
    """What a request may do. Of several that hold for it the bits that all of them have count."""

    NONE = 0
    READS = 1
    """Lookups are answered with what is cached."""
    WRITES = 2
    """Blocks that it has computed are stored."""
    COUNTS = 4
    """What its lookups find is counted, also where it is not given."""


class CacheUse(Enum):
    """How people say it."""

    ON = "on"
    READ = "read"
    """Hits are served, nothing new is stored."""
    WRITE = "write"
    """Every lookup misses; what is computed is stored."""
    OFF = "off"
    """Every lookup misses and nothing is stored; what there is stays."""
    DRY_RUN = "dry-run"
    """As `write`, and what the lookups would have hit is counted."""

    @property
    def access(self) -> Access:
        """As bits."""
        return _ACCESS[self]


_ACCESS: Mapping[CacheUse, Access] = {
    CacheUse.ON: Access.READS | Access.WRITES | Access.COUNTS,
    CacheUse.READ: Access.READS | Access.COUNTS,
    CacheUse.WRITE: Access.WRITES,
    CacheUse.OFF: Access.NONE,
    CacheUse.DRY_RUN: Access.WRITES | Access.COUNTS,
}
