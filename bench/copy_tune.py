"""`kvstore bench copy --tune`: the rate of every candidate for the routes of small blocks, as a share of a raw copy.

What it prints decides `engine_adapter/copy_routes.py`. A kernel that this device cannot run is said in the log, and its
lane goes by the copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rich.table import Table

from bench.copy import WAYS, placed, race, transfer
from bench.copy_sides import CopyBed, open_bed
from bench.timing import median
from engine_adapter.copier import Copier, Direction
from engine_adapter.copy_kernel import KernelKind, KernelShape
from engine_adapter.copy_routes import Lane, Route
from engine_adapter.cuda_driver import SourceOrder

__all__ = ["FULL", "SHORT", "TuneCell", "TunePlan", "candidates", "table", "tune"]

_KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """Sizes in bytes; `nbytes` is what a round moves each way."""

    block_bytes: tuple[int, ...]
    nbytes: int = 512 << 20
    rounds: int = 4
    names: tuple[str, ...] = ()
    """Of candidates; none: all."""


FULL = TunePlan(block_bytes=tuple(size * _KIB for size in (4, 16, 32, 64, 128, 256, 512)))
SHORT = TunePlan(block_bytes=(32 * _KIB, 64 * _KIB, 256 * _KIB), nbytes=256 << 20, rounds=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneCell:
    """One candidate, way and block size. `ratio`: median over the rounds of raw time / its time."""

    name: str
    way: str
    block_bytes: int
    gb_per_s: float
    ratio: float


def _bulk(ctas: int, unit_kib: int = 16, stages: int = 8, *, weight: int = 1) -> Callable[[Direction], Lane]:
    """Loads wait long for the host, so most stages are being loaded; stores wait for the link."""

    def lane(direction: Direction) -> Lane:
        lag = stages - 2 if direction is Direction.LOAD else max(1, stages // 3)
        shape = KernelShape(
            kind=KernelKind.BULK, ctas=ctas, unit_bytes=unit_kib * _KIB, stages=stages, lag=lag
        )
        return Lane(kernel=shape, weight=weight)

    return lane


def _threads(ctas: int, threads: int = 512, *, weight: int = 1) -> Callable[[Direction], Lane]:
    return lambda _: Lane(
        kernel=KernelShape(kind=KernelKind.THREADS, ctas=ctas, threads=threads), weight=weight
    )


def _engine(order: SourceOrder = SourceOrder.STREAM, *, weight: int = 1) -> Callable[[Direction], Lane]:
    return lambda _: Lane(order=order, weight=weight)


def candidates() -> Mapping[str, Mapping[Direction, Route]]:
    """Routes by name: each candidate copies pieces of every size, so that sizes can be compared."""
    any_order = _engine(SourceOrder.ANY)
    lanes: dict[str, tuple[Callable[[Direction], Lane], ...]] = {
        "engine": (_engine(),),
        "engine, any order": (any_order,),
        "engine x2": (_engine(), _engine()),
        "engine x4": (_engine(),) * 4,
        "engine x2, any order": (any_order, any_order),
        "threads 4": (_threads(4),),
        "threads 8": (_threads(8),),
        "threads 16": (_threads(16),),
        "threads 32": (_threads(32),),
        "threads 16 of 1024": (_threads(16, 1024),),
        "bulk 1": (_bulk(1),),
        "bulk 2": (_bulk(2),),
        "bulk 4": (_bulk(4),),
        "bulk 8": (_bulk(8),),
        "bulk 16": (_bulk(16),),
        "bulk 4, 8 KiB x8": (_bulk(4, 8),),
        "bulk 8, 8 KiB x8": (_bulk(8, 8),),
        "bulk 4, 32 KiB x6": (_bulk(4, 32, 6),),
        "bulk 16, 4 KiB x8": (_bulk(16, 4),),
        "engine + bulk 2": (_engine(), _bulk(2)),
        "engine + bulk 4": (_engine(), _bulk(4)),
        "engine + 2 bulk 4": (_engine(), _bulk(4, weight=2)),
        "2 engine + bulk 2": (_engine(weight=2), _bulk(2)),
        "engine + threads 8": (_engine(), _threads(8)),
        "engine x2 + bulk 4": (_engine(), _engine(), _bulk(4)),
    }
    return {
        name: {
            direction: Route(large_from_bytes=1 << 62, small=tuple(lane(direction) for lane in made))
            for direction in Direction
        }
        for name, made in lanes.items()
    }


def tune(plan: TunePlan, say: Callable[[str], None]) -> list[TuneCell]:
    """Measures every candidate. Raises: ConfigError without a CUDA device."""
    cells: list[TuneCell] = []
    with open_bed(plan.nbytes) as bed:
        for name, routes in candidates().items():
            if plan.names and name not in plan.names:
                continue
            say(f"{bed.name}: {name}")
            copier = bed.copier(routes)
            for block_bytes in plan.block_bytes:
                cells += [
                    _cell(bed, copier, plan, name=name, way=way, block_bytes=block_bytes) for way in WAYS
                ]
    return cells


def _cell(bed: CopyBed, copier: Copier, plan: TunePlan, *, name: str, way: str, block_bytes: int) -> TuneCell:
    sources, targets = placed(plan.nbytes, block_bytes, "scattered")
    ours, raw = race(
        plan.rounds,
        [
            partial(transfer, bed, copier, WAYS[way], sources, targets, block_bytes),
            partial(bed.raw, WAYS[way], len(sources) * block_bytes),
        ],
    )
    return TuneCell(
        name=name,
        way=way,
        block_bytes=block_bytes,
        gb_per_s=len(sources) * block_bytes * len(WAYS[way]) / median(ours) / 1e9,
        ratio=median([theirs / own for own, theirs in zip(ours, raw, strict=True)]),
    )


def table(cells: list[TuneCell], way: str) -> Table:
    """One way: a line a candidate, a column a block size."""
    sizes = sorted({cell.block_bytes for cell in cells})
    made = Table(title=f"{way}: share of a raw copy", title_justify="left")
    made.add_column("route")
    for size in sizes:
        made.add_column(f"{size // _KIB} KiB", justify="right")
    by_place = {(cell.name, cell.block_bytes): cell for cell in cells if cell.way == way}
    for name in dict.fromkeys(cell.name for cell in cells):
        made.add_row(name, *(f"{by_place[name, size].ratio:.3f}" for size in sizes))
    return made
