"""The portions of a batch: which of its blocks are issued at once, and by which lanes, within the bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import CopyBatch, Direction
from engine_adapter.copying.kernel import MAX_PIECES
from engine_adapter.copying.lanes import Lanes, OpenLane
from engine_adapter.copying.pinned_host import PinnedHost
from engine_adapter.copying.plan import Pieces, portions, ranges, runs, shares, split, staged
from engine_adapter.copying.routes import Route

__all__ = ["CopyLimits", "Planner", "Portion", "host_side"]

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Of one direction."""

    max_blocks: int = 16384
    """Most blocks taken and not complete; a batch that finds none is always taken."""
    first_bytes: int = 32 << 20
    """Of the first portion where nothing is under way, at most `portion_copies` blocks; each one after it may be twice
    as large. 0.6 ms of a link at 55 GB/s: planning and issuing the next takes 0.3-0.5 ms. With 8 MiB the link was idle
    for 0.5 ms after the first portions of 32 KiB."""
    portion_bytes: int = 64 << 20
    """What is issued at once, and has an event: 1.2 ms at 55 GB/s."""
    portion_copies: int = MAX_PIECES
    """Most copies of a portion: what one launch of a kernel takes."""
    planned_portions: int = 4
    """Planned together, once a batch is well under way: most of what planning costs does not grow with the pieces."""
    flight_bytes: int = 256 << 20
    """Most bytes issued and not complete, but for a single larger block."""
    flight_portions: int = 16
    summed_from_bytes: int = 256 << 10
    """Smaller blocks get no checksum on the way: stores of 64 KiB went at half their rate with it (H200)."""


_NONE = range(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """What is issued at once, and by which lanes."""

    lanes: Sequence[OpenLane]
    pieces: Pieces
    nbytes: int
    left_bytes: int
    """About what of the batch comes after it."""
    last: bool
    group: int = 0
    ends_group: bool = False
    """Whether that group of the batch has come with it, and with all before it."""
    whole: range = _NONE
    """Blocks of the batch of which the last comes with it: all groups of them."""

    def dealt(self) -> Iterator[tuple[OpenLane, Pieces]]:
        """The part of each lane that gets one."""
        if len(self.lanes) == 1:
            return iter([(self.lanes[0], self.pieces)] if len(self.pieces) else [])
        parts = shares(self.pieces, [lane.lane.weight for lane in self.lanes])
        return ((lane, part) for lane, part in zip(self.lanes, parts, strict=True) if len(part))


def host_side(batch: CopyBatch) -> U64:
    """[n] the addresses of a batch's blocks in host memory."""
    return batch.sources if batch.direction is Direction.LOAD else batch.targets


class Planner:
    """Of one direction. Any thread. `computing`: whether the engine computes; set by anybody."""

    def __init__(
        self, host: PinnedHost, direction: Direction, route: Route, limits: CopyLimits, lanes: Lanes
    ) -> None:
        self._host = host
        self._direction = direction
        self._route = route
        self._limits = limits
        self._lanes = lanes
        self.computing = False

    def portions(self, batch: CopyBatch, first_bytes: int) -> Iterator[Portion]:
        """Planned as they are asked for, group by group. At least one, which is empty for an empty batch.

        `first_bytes`: of the first one; each one after it may be twice as large.
        """
        left = len(batch.sources) * batch.nbytes
        if not left:
            yield Portion(lanes=self._lanes.large, pieces=Pieces.none(), nbytes=0, left_bytes=0, last=True)
        for number in range(batch.groups):
            group = batch.group(number)
            ends_at = left - len(group.sources) * group.nbytes
            last_group = number == batch.groups - 1
            for lanes, pieces, part in self._cut(group, first_bytes):
                nbytes = pieces.nbytes
                left -= nbytes
                yield Portion(
                    lanes=lanes,
                    pieces=pieces,
                    nbytes=nbytes,
                    left_bytes=left,
                    last=not left,
                    group=number,
                    ends_group=left == ends_at,
                    whole=part if last_group else _NONE,
                )
            first_bytes = self._limits.planned_portions * self._limits.portion_bytes

    def _cut(self, batch: CopyBatch, first_bytes: int) -> Iterator[tuple[Sequence[OpenLane], Pieces, range]]:
        """The blocks of a batch, pinned as they are asked for; and which of them have come whole with each portion."""
        limits, host = self._limits, host_side(batch)
        for part in ranges(
            len(batch.sources),
            batch.nbytes,
            first_bytes=min(first_bytes, limits.portion_copies * batch.nbytes),
            max_bytes=limits.planned_portions * limits.portion_bytes,
            max_blocks=limits.planned_portions * limits.portion_copies,
        ):
            self._host.pin(host[part.start : part.stop])  # waits: on the thread that issues
            planned = list(self._planned(batch, part))
            in_order = all(lanes is planned[0][0] for lanes, _ in planned)
            begin = part.start
            for at, (lanes, pieces) in enumerate(planned):
                end = part.stop if at == len(planned) - 1 else begin
                if in_order:
                    end = begin + pieces.nbytes // batch.nbytes
                yield lanes, pieces, range(begin, end)
                begin = end

    def _planned(self, batch: CopyBatch, part: range) -> Iterator[tuple[Sequence[OpenLane], Pieces]]:
        """A range of a batch's blocks by lanes."""
        limits, route, nbytes = self._limits, self._route, batch.nbytes
        beside = self.computing and self._lanes.beside
        sources, targets = batch.sources[part.start : part.stop], batch.targets[part.start : part.stop]
        cut: list[tuple[Sequence[OpenLane], Pieces]] = []
        if self._lanes.staged and not beside and nbytes < route.staged_below_bytes:
            long, short = self._split(sources, targets, nbytes, route.staged_below_bytes)
            host = short.sources if self._direction is Direction.LOAD else short.targets
            together, rest = staged(
                short, host, nbytes, borders=(self._host.starts,), from_bytes=route.staged_from_bytes
            )
            cut += (self._lanes.large, long), (self._lanes.staged, together)
            sources, targets = rest.sources, rest.targets
        if len(sources):
            large, small = self._split(sources, targets, nbytes, route.large_from_bytes)
            cut += (self._lanes.large, large), (beside or self._lanes.small, small)
        for lanes, pieces in cut:
            most = min((limits.portion_copies, *(lane.max_pieces for lane in lanes)))
            bound = min((limits.portion_bytes, *(lane.max_bytes for lane in lanes)))
            for portion in portions(pieces, max_bytes=bound, max_pieces=most):
                yield lanes, portion

    def _split(self, sources: U64, targets: U64, nbytes: int, from_bytes: int) -> tuple[Pieces, Pieces]:
        """Runs of at least so many bytes, and single blocks."""
        begins = runs(
            sources,
            targets,
            nbytes,
            borders=(self._host.starts,),
            max_run_bytes=self._limits.portion_bytes,
        )
        return split(sources, targets, nbytes, begins, large_from_bytes=from_bytes)
