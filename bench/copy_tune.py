"""`kvstore bench copy --tune`: the rate of every candidate for the routes of small blocks, as a share of a raw copy.

What it prints decides `engine_adapter/copying/routes.py` and the limits of `engine_adapter/copying/cuda_copier.py`. A
kernel that this device cannot run is said in the log, and its lane goes by the copy engines. Patterns are those of
`bench copy`: `pages` lie together on the host alone, which is what a staged lane is for. Where the copier takes
checksums each is measured with them too, as engines copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.table import Table

from bench.copy import WAYS, Sums, race, transfer
from bench.copy_places import Places, placed
from bench.copy_sides import CopyBed, open_bed
from bench.timing import median
from engine_adapter.copying.copier import Copier, Direction
from engine_adapter.copying.cuda_driver import SourceOrder
from engine_adapter.copying.kernel import KernelKind, KernelShape
from engine_adapter.copying.portions import CopyLimits
from engine_adapter.copying.routes import DEFAULT_ROUTES, Lane, Route
from kvstore.errors import ConfigError

__all__ = ["FULL", "LIMITS", "SHORT", "TuneCell", "TunePlan", "candidates", "table", "tune"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """Sizes in bytes; `nbytes` is what a round moves each way."""

    cells: tuple[tuple[str, int], ...]
    """Pattern and block size."""
    nbytes: int = 1024 * _MIB
    rounds: int = 5
    names: tuple[str, ...] = ()
    """Of candidates; none: all."""
    ways: tuple[str, ...] = tuple(WAYS)


FULL = TunePlan(
    cells=(
        *(("scattered", size * _KIB) for size in (4, 16, 32, 64, 128, 256, 4096)),
        *(("pages", size * _KIB) for size in (4, 16, 32, 64, 128)),
    )
)
SHORT = TunePlan(
    cells=(
        ("scattered", 32 * _KIB),
        ("scattered", 64 * _KIB),
        ("scattered", 4096 * _KIB),
        ("pages", 32 * _KIB),
        ("pages", 64 * _KIB),
    ),
    rounds=3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneCell:
    """One candidate, way and block size. Ratios: medians over the rounds of raw time / its time."""

    name: str
    way: str
    pattern: str
    block_bytes: int
    gb_per_s: float
    ratio: float
    summed_ratio: float | None
    """With checksums; None where this copier takes none."""


LaneOf = Callable[[Direction], Lane]
_ANY_SIZE = 1 << 62


def _bulk(
    ctas: int,
    unit_kib: int = 16,
    stages: int = 8,
    *,
    weight: int = 1,
    streams: int = 2,
    staging_mib: int = 0,
    buffers: int = 2,
) -> LaneOf:
    """Loads wait long for the host, so most stages are being loaded; stores wait for the link."""

    def lane(direction: Direction) -> Lane:
        lag = stages - 2 if direction is Direction.LOAD else max(1, stages // 3)
        lag = stages // 2 if staging_mib else lag
        shape = KernelShape(
            kind=KernelKind.BULK, ctas=ctas, unit_bytes=unit_kib * _KIB, stages=stages, lag=lag
        )
        return Lane(
            kernel=shape,
            weight=weight,
            streams=streams,
            staging_bytes=staging_mib * _MIB,
            staging_buffers=buffers,
        )

    return lane


def _threads(ctas: int, *, streams: int = 2, staging_mib: int = 0) -> LaneOf:
    shape = KernelShape(kind=KernelKind.THREADS, ctas=ctas)
    return lambda _: Lane(kernel=shape, streams=streams, staging_bytes=staging_mib * _MIB)


def _engine(*, weight: int = 1, streams: int = 2, order: SourceOrder = SourceOrder.STREAM) -> LaneOf:
    return lambda _: Lane(order=order, weight=weight, streams=streams)


def _straight(*lanes: LaneOf) -> Mapping[Direction, Route]:
    """Every size by the same lanes, so that sizes can be compared."""
    return {
        direction: Route(large_from_bytes=_ANY_SIZE, small=tuple(lane(direction) for lane in lanes))
        for direction in Direction
    }


def _loads(*lanes: LaneOf) -> Mapping[Direction, Route]:
    """Loads of every size by these, stores as they go."""
    return {**DEFAULT_ROUTES, Direction.LOAD: _straight(*lanes)[Direction.LOAD]}


def _staged(lane: LaneOf) -> Mapping[Direction, Route]:
    """Pages by the lane, all else by the copy engines."""
    return {direction: Route(staged=(lane(direction),)) for direction in Direction}


def _mixed(load: LaneOf, store: LaneOf) -> Mapping[Direction, Route]:
    """Another lane each way."""
    ways = {Direction.LOAD: load, Direction.STORE: store}
    return {way: Route(large_from_bytes=_ANY_SIZE, small=(lane(way),)) for way, lane in ways.items()}


LIMITS: Mapping[str, CopyLimits] = {
    "engine, 256 a call": CopyLimits(portion_copies=256),
    "engine, 512 a call": CopyLimits(portion_copies=512),
    "engine x1, 256 MiB a call": CopyLimits(portion_bytes=256 * _MIB, flight_bytes=1024 * _MIB),
    "engine, 16 MiB a call": CopyLimits(portion_bytes=16 * _MIB),
    "load 3 bulk 8 + engine, 32 MiB a call": CopyLimits(portion_bytes=32 * _MIB),
}
"""Of candidates that do not take the usual ones."""


def candidates() -> Mapping[str, Mapping[Direction, Route]]:
    """Routes by name. `x n`: n streams, or buffers, instead of two; `+`: a portion is dealt to both."""
    return {
        "default": DEFAULT_ROUTES,
        "engine": _straight(_engine()),
        "engine x1": _straight(_engine(streams=1)),
        "engine x4": _straight(_engine(streams=4)),
        "engine, any order": _straight(_engine(order=SourceOrder.ANY)),
        "engine + engine": _straight(_engine(), _engine()),
        "engine, 256 a call": _straight(_engine()),
        "engine, 512 a call": _straight(_engine()),
        "engine, 16 MiB a call": _straight(_engine()),
        "engine x1, 256 MiB a call": _straight(_engine(streams=1)),
        "threads 8": _straight(_threads(8)),
        "threads 8 x1": _straight(_threads(8, streams=1)),
        "bulk 4": _straight(_bulk(4)),
        "bulk 8": _straight(_bulk(8)),
        "bulk 8 x1": _straight(_bulk(8, streams=1)),
        "bulk 16": _straight(_bulk(16)),
        "bulk 16, 4 KiB x8": _straight(_bulk(16, 4)),
        "engine + bulk 4": _straight(_engine(), _bulk(4)),
        "3 engine + bulk 4": _straight(_engine(weight=3), _bulk(4)),
        **{f"load {name}": routes for name, routes in _load_candidates().items()},
        "bulk 8 up, engine down": _mixed(_bulk(8), _engine()),
        "engine up, bulk 8 down": _mixed(_engine(), _bulk(8)),
        "staged 8 MiB": _staged(_bulk(16, staging_mib=8)),
        "staged 16 MiB": _staged(_bulk(16, staging_mib=16)),
        "staged 32 MiB": _staged(_bulk(16, staging_mib=32)),
        "staged 64 MiB": _staged(_bulk(16, staging_mib=64)),
        "staged 32 MiB x3": _staged(_bulk(16, staging_mib=32, buffers=3)),
        "staged 32 MiB, bulk 4": _staged(_bulk(4, staging_mib=32)),
        "staged 16 MiB, threads 8": _staged(_threads(8, staging_mib=16)),
    }


def _load_candidates() -> Mapping[str, Mapping[Direction, Route]]:
    """A kernel's reads of host memory are requests of 128 bytes, and fill the link to 0.90; an engine's fill it, but
    each copy costs it time: 4 µs at 16 KiB (H200), where sharing is five times as slow as the kernel alone. At 32 and
    64 KiB the one may fill what the other leaves. The kernel's part is issued first: issuing the engine's takes a
    microsecond a piece.
    """
    return {
        "bulk 6": _loads(_bulk(6)),
        "bulk 12": _loads(_bulk(12)),
        "bulk 8, 8 KiB x16": _loads(_bulk(8, 8, 16)),
        "bulk 8, 32 KiB x6": _loads(_bulk(8, 32, 6)),
        "7 bulk 8 + engine": _loads(_bulk(8, weight=7), _engine()),
        "3 bulk 8 + engine": _loads(_bulk(8, weight=3), _engine()),
        "2 bulk 8 + engine": _loads(_bulk(8, weight=2), _engine()),
        "bulk 8 + engine": _loads(_bulk(8), _engine()),
        "bulk 8 + 3 engine": _loads(_bulk(8), _engine(weight=3)),
        "3 bulk 4 + engine": _loads(_bulk(4, weight=3), _engine()),
        "bulk 2 + engine": _loads(_bulk(2), _engine()),
        "3 bulk 8 + engine x1": _loads(_bulk(8, weight=3), _engine(streams=1)),
        "3 bulk 8 + engine, 32 MiB a call": _loads(_bulk(8, weight=3), _engine()),
    }


def tune(plan: TunePlan, say: Callable[[str], None]) -> list[TuneCell]:
    """Measures every candidate; staged ones on pages alone.

    Raises: ConfigError without a CUDA device, and for a name that is no candidate's.
    """
    cells: list[TuneCell] = []
    if unknown := set(plan.names) - set(tried := candidates()):
        raise ConfigError(f"no candidate is named {min(unknown)!r}: {', '.join(tried)}")
    with open_bed(plan.nbytes) as bed:
        for name, routes in tried.items():
            if plan.names and name not in plan.names:
                continue
            say(f"{bed.name}: {name}")
            copier = bed.copier(routes, LIMITS.get(name))
            for pattern, block_bytes in plan.cells:
                if pattern != "pages" and name.startswith("staged"):
                    continue
                places = placed(plan.nbytes, block_bytes, pattern)
                cells += [_cell(bed, copier, plan.rounds, name, way, pattern, places) for way in plan.ways]
    return cells


def _cell(
    bed: CopyBed, copier: Copier, rounds: int, name: str, way: str, pattern: str, places: Places
) -> TuneCell:
    sides = [
        partial(transfer, bed, copier, WAYS[way], places),
        partial(bed.raw, WAYS[way], places.total_bytes),
    ]
    if copier.takes_sums(places.nbytes):
        sides.append(partial(transfer, bed, copier, WAYS[way], places, Sums.ASKED))
    ours, raw, *summed = race(rounds, sides)
    return TuneCell(
        name=name,
        way=way,
        pattern=pattern,
        block_bytes=places.nbytes,
        gb_per_s=places.total_bytes * len(WAYS[way]) / median(ours) / 1e9,
        ratio=_ratio(raw, ours),
        summed_ratio=_ratio(raw, summed[0]) if summed else None,
    )


def _ratio(raw: Sequence[float], ours: Sequence[float]) -> float:
    return median([theirs / own for own, theirs in zip(ours, raw, strict=True)])


def table(cells: list[TuneCell], way: str) -> Table:
    """One way: a line a candidate, a column a pattern and block size; without checksums, with them."""
    columns = sorted({(cell.pattern, cell.block_bytes) for cell in cells})
    made = Table(title=f"{way}: share of a raw copy", title_justify="left")
    made.add_column("route")
    for pattern, size in columns:
        made.add_column(f"{pattern} {size // _KIB} KiB", justify="right")
    ratios = {(cell.name, cell.pattern, cell.block_bytes): _shown(cell) for cell in cells if cell.way == way}
    for name in dict.fromkeys(cell.name for cell in cells):
        made.add_row(name, *(ratios.get((name, *column), "") for column in columns))
    return made


def _shown(cell: TuneCell) -> str:
    return f"{cell.ratio:.3f}" + (f" {cell.summed_ratio:.3f}" if cell.summed_ratio is not None else "")
