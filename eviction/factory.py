"""Policies by name: entry points of the group `kvstore.eviction`, ours and those of other packages alike."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from eviction.base import PolicyFactory
from kvstore.errors import InvalidArgument

__all__ = ["OURS", "names", "policy_factory"]

_GROUP = "kvstore.eviction"
_HOOKS = ("use", "ended", "expect", "victims", "remove")
_TRIED_ROWS, _TRIED_BLOCKS = 64, 16
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
    return sorted({*OURS, *_of_others()})


def policy_factory(name: str) -> PolicyFactory:
    """Raises: InvalidArgument for a name that is not registered, or whose package does not give a policy."""
    others = _of_others().get(name, [])
    if name in OURS:
        if others:
            raise InvalidArgument(
                f"the eviction policy {name!r} is kvstore's own, and {_said(others)} takes its name: "
                "remove that package"
            )
        factory: PolicyFactory = EntryPoint(name, OURS[name], _GROUP).load()
        return factory
    if not others:
        raise InvalidArgument(f"no eviction policy is named {name!r}; there are: {', '.join(names())}")
    if len({point.value for point in others}) > 1:
        raise InvalidArgument(
            f"the eviction policy {name!r} is said to be {_said(others)}: remove all but one"
        )
    return _tried(others[0])


def _tried(point: EntryPoint) -> PolicyFactory:
    """Another package's policy, of which one was made to see whether that goes: said before a load hangs on it."""
    called = f"the eviction policy {point.name!r} ({_said([point])})"
    try:
        factory: PolicyFactory = point.load()
    except Exception as error:  # code of others, which may raise anything
        raise InvalidArgument(f"{called} cannot be loaded: {_in_a_line(error)}") from error
    if not callable(factory):
        raise InvalidArgument(f"{called} is no PolicyFactory: it cannot be called")
    try:
        policy = factory(rows=_TRIED_ROWS, capacity_blocks=_TRIED_BLOCKS)
    except Exception as error:  # as above
        raise InvalidArgument(f"{called} cannot be made: {_in_a_line(error)}") from error
    lacking = [hook for hook in _HOOKS if not callable(getattr(policy, hook, None))]
    if lacking:
        raise InvalidArgument(f"{called} is no Policy: it has no {', '.join(lacking)}")
    return factory


def _of_others() -> dict[str, list[EntryPoint]]:
    """What other packages register, by name. What our own installation says is older than `OURS`, or the same."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=_GROUP):
        if point.dist is None or point.dist.name != "kvstore":
            found.setdefault(point.name, []).append(point)
    return found


def _said(points: Sequence[EntryPoint]) -> str:
    packages = (f"{point.value} of {point.dist.name if point.dist else 'a package'}" for point in points)
    return " and ".join(dict.fromkeys(packages))


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
