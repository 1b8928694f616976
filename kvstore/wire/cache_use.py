"""How a cache is used, on the wire."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.cache_use import Access, CacheUse
from kvstore.errors import InvalidArgument
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["cache_use_message", "cache_use_of"]

_NUMBERS: Mapping[CacheUse, pb.CacheUse] = {
    CacheUse.ON: pb.CACHE_USE_ON,
    CacheUse.READ: pb.CACHE_USE_READ,
    CacheUse.WRITE: pb.CACHE_USE_WRITE,
    CacheUse.OFF: pb.CACHE_USE_OFF,
    CacheUse.DRY_RUN: pb.CACHE_USE_DRY_RUN,
}
_USES: Mapping[int, CacheUse] = {number: use for use, number in _NUMBERS.items()}
_OF_ACCESS: Mapping[int, pb.CacheUse] = {int(use.access): number for use, number in _NUMBERS.items()}


def cache_use_message(access: Access) -> pb.CacheUse:
    """What allows just this, which one use does."""
    return _OF_ACCESS[int(access)]


def cache_use_of(number: int, absent: CacheUse) -> CacheUse:
    """`absent` where nothing is said. Raises InvalidArgument."""
    if number == pb.CACHE_USE_UNSPECIFIED:
        return absent
    if number not in _USES:
        raise InvalidArgument(f"{number} is no use of a cache that is known here")
    return _USES[number]
