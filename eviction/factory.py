"""Policies by name: entry points of the group `kvstore.eviction`, ours and those of other packages alike."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from eviction.base import PolicyFactory
from kvstore.errors import InvalidArgument

__all__ = ["OURS", "names", "policy_factory"]

_GROUP = "kvstore.eviction"
OURS = {
    "arc": "eviction.arc:ArcPolicy",
    "auto": "eviction.auto:AutoPolicy",
    "fifo": "eviction.fifo:FifoPolicy",
    "gdsf": "eviction.gdsf:GdsfPolicy",
    "hazard": "eviction.hazard:HazardPolicy",
    "lru": "eviction.lru:LruPolicy",
    "s3fifo": "eviction.s3fifo:S3FifoPolicy",
    "sieve": "eviction.sieve:SievePolicy",
    "wtinylfu": "eviction.wtinylfu:WTinyLfuPolicy",
}
"""As in pyproject.toml: a checkout that was installed before a policy was added has it all the same."""


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_registered())


def policy_factory(name: str) -> PolicyFactory:
    """Raises: InvalidArgument for a name that is not registered."""
    found = _registered().get(name)
    if found is None:
        raise InvalidArgument(f"no eviction policy is named {name!r}; there are: {', '.join(names())}")
    factory: PolicyFactory = found.load()
    return factory


def _registered() -> dict[str, EntryPoint]:
    ours = {name: EntryPoint(name, value, _GROUP) for name, value in OURS.items()}
    return ours | {point.name: point for point in entry_points(group=_GROUP)}
