"""Where the next extent goes in the address range of a device."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.errors import ResourceExhausted
from kvstore.units import format_size

__all__ = ["first_gap"]


def first_gap(taken: Iterable[tuple[int, int]], nbytes: int, capacity_bytes: int) -> int:
    """Offset of the first gap of `nbytes` between half-open ranges. Raises ResourceExhausted. O(n log n)."""
    begin = 0
    for taken_from, taken_to in sorted(taken):
        if taken_from - begin >= nbytes:
            break
        begin = taken_to
    if begin + nbytes > capacity_bytes:
        raise ResourceExhausted(
            f"no room for {format_size(nbytes)} in {format_size(capacity_bytes)} of the device"
        )
    return begin
