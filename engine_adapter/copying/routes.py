"""Which means a copy takes, by direction and size of piece: the one table to change after measuring a machine.

`kvstore bench copy --tune` prints the rate of every candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine_adapter.copying.copier import Direction
from engine_adapter.copying.cuda_driver import SourceOrder
from engine_adapter.copying.kernel import KernelKind, KernelShape

__all__ = ["DEFAULT_ROUTES", "Lane", "Route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Streams and what is put into them."""

    kernel: KernelShape | None = None
    """None: the copy engines."""
    order: SourceOrder = SourceOrder.STREAM
    """Of the copy engines. ANY asks that nothing has to come before a batch."""
    weight: int = 1
    """Its share of the pieces beside the other lanes of the route."""
    streams: int = 2
    """Portions take turns on them: what one costs before and after its bytes hides behind the bytes of another."""
    staging_bytes: int = 0
    """Of each buffer, device memory between a kernel there and large copies by an engine; 0: copies go straight."""
    staging_buffers: int = 2

    def __post_init__(self) -> None:
        """A staged lane has one stream of copies and one of kernels."""
        assert self.streams == 2 or not self.staging_bytes, "copies, kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One direction. Where there are staged lanes, they take what is shorter than `staged_below_bytes` and lies on the
    host in runs of at least `staged_from_bytes`. Of the rest, pieces of at least `large_from_bytes` take the large
    lanes and the others the small ones. While the engine computes, the lanes `beside` it take what staged and small
    lanes would: their kernels would hold up its own. Where there are none, nothing changes.
    """

    large_from_bytes: int = 64 << 10
    large: tuple[Lane, ...] = (Lane(),)
    staged_below_bytes: int = 256 << 10
    staged_from_bytes: int = 256 << 10
    staged: tuple[Lane, ...] = ()
    small: tuple[Lane, ...] = (Lane(),)
    beside: tuple[Lane, ...] = ()


_STAGED = Lane(
    kernel=KernelShape(kind=KernelKind.BULK, ctas=16, stages=8, lag=4), staging_bytes=32 << 20
)  # the kernel reads and writes device memory alone, so it is short: more CTAs delay the ends of a batch less
DEFAULT_ROUTES: Mapping[Direction, Route] = MappingProxyType(
    {
        Direction.LOAD: Route(
            # Scattered 64 KiB, H200: 0.91 of a raw copy by the kernel, 0.88-0.93 by the engines: issuing their copies
            # takes a core nearly as long as the link. Dealt to both, 32 KiB gain 0.01, and 16 KiB fall to 0.18.
            large_from_bytes=128 << 10,
            staged=(_STAGED,),
            small=(Lane(kernel=KernelShape(kind=KernelKind.BULK, ctas=8, stages=8, lag=6)),),
            # Decode beside loads of 64 KiB, H200: 56 % slower where a kernel has a part in them, 5 % by the engines.
            beside=(Lane(),),
        ),
        Direction.STORE: Route(
            # Scattered 64 KiB, H200: 0.90 of a raw copy by the kernel, 0.83-0.85 by the engines.
            large_from_bytes=128 << 10,
            staged=(_STAGED,),
            small=(Lane(kernel=KernelShape(kind=KernelKind.BULK, ctas=8, stages=8, lag=3)),),
            # Decode beside stores of 64 KiB, H200: 85 % slower by the kernel (8 % at 6 GB/s), 0.6 % by the engines.
            beside=(Lane(),),
        ),
    }
)
