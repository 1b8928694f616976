"""Eviction as the store has it, by name."""

from __future__ import annotations

from eviction.base import EvictionPolicy
from eviction.lru import Lru
from kvstore.errors import InvalidArgument

__all__ = ["store_policy"]


def store_policy(name: str) -> EvictionPolicy:
    """Raises: InvalidArgument for a policy that the store cannot evict by."""
    if name != "lru":
        raise InvalidArgument(
            f"the store does not evict by {name!r} yet, only by 'lru': compare policies with --capacity"
        )
    return Lru()
