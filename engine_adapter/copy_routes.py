"""Which means a copy takes, by direction and size of piece: the one table to change after measuring a machine.

`kvstore bench copy --tune` prints the rate of every candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine_adapter.copier import Direction
from engine_adapter.copy_kernel import KernelKind, KernelShape
from engine_adapter.cuda_driver import SourceOrder

__all__ = ["DEFAULT_ROUTES", "Lane", "Route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A stream of its own and what is put into it."""

    kernel: KernelShape | None = None
    """None: the copy engines."""
    order: SourceOrder = SourceOrder.STREAM
    """Of the copy engines. ANY asks that nothing has to come before a batch."""
    weight: int = 1
    """Its share of the pieces beside the other lanes of the route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One direction. Pieces of at least `large_from_bytes` take the large lanes, the others the small ones."""

    large_from_bytes: int = 128 << 10
    large: tuple[Lane, ...] = (Lane(),)
    small: tuple[Lane, ...] = (Lane(),)


DEFAULT_ROUTES: Mapping[Direction, Route] = MappingProxyType(
    {
        Direction.LOAD: Route(
            small=(Lane(kernel=KernelShape(kind=KernelKind.BULK, ctas=8, stages=8, lag=6)),)
        ),
        Direction.STORE: Route(
            small=(Lane(kernel=KernelShape(kind=KernelKind.BULK, ctas=8, stages=8, lag=3)),)
        ),
    }
)
