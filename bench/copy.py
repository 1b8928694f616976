"""`kvstore bench copy`: how fast blocks move between HBM and DRAM, beside raw copies of the same bytes.

Each direction and both at once, by block size; scattered blocks, pages (small blocks that are neighbours on the host
alone), runs of eight neighbours, and one block alone, which shows what a batch costs before and after its bytes. Beside
it, in this process and in turns, one raw copy of as many bytes, and a loop of one call a block where blocks are so
large that a loop in Python says something. "Summed" is the same with the checksum of each block, as engines copy whose
loads are compared; pairs are with the copy without. Times run from the call of `submit` to the call of `done`, and for
a raw copy until the thread that issued it has seen its end. Medians over all rounds but a first one, which is not
counted; ratios are of each round. One GB is 10^9 bytes. Without a CUDA device: the twin's copier over host memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from bench.copy_places import PATTERNS, Places, placed
from bench.copy_sides import HOST_NAME, CopyBed, open_bed
from bench.report import Figure
from bench.timing import median
from engine_adapter.copying.copier import Copier, CopyBatch, Direction
from engine_adapter.copying.cuda_driver import cuda_devices
from kvstore.errors import DeadlineExceeded, KvstoreError

__all__ = [
    "FULL",
    "SHORT",
    "TWIN",
    "WAYS",
    "CopyLeg",
    "CopyPlan",
    "CopyResult",
    "Sums",
    "bound",
    "default_plan",
    "figures",
    "measure",
    "race",
    "transfer",
]

_COPY_S = 120.0
_LOOP_FROM_BYTES = 256 << 10
_CHECKED = 64
_ONE_ROUNDS = 10
"""Times as many where a round is one block."""
_KIB, _MIB = 1 << 10, 1 << 20
_LARGE_FROM_BYTES = 1 * _MIB
WAYS: Mapping[str, tuple[Direction, ...]] = {
    "load": (Direction.LOAD,),
    "store": (Direction.STORE,),
    "both": (Direction.LOAD, Direction.STORE),
}
"""DRAM → HBM, HBM → DRAM, and the two at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Sizes of one run, in bytes."""

    block_bytes: tuple[int, ...]
    nbytes: int
    """What a round moves each way, of blocks of at least 1 MiB."""
    rounds: int
    patterns: tuple[str, ...] = PATTERNS
    small_nbytes: int = 0
    """The same of smaller blocks; 0: as much."""

    def round_bytes(self, block_bytes: int) -> int:
        """What a round of such blocks moves each way."""
        return self.nbytes if block_bytes >= _LARGE_FROM_BYTES else self.small_nbytes or self.nbytes


FULL = CopyPlan(
    block_bytes=tuple(size * _KIB for size in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    nbytes=8192 * _MIB,
    small_nbytes=2048 * _MIB,
    rounds=7,
)
SHORT = CopyPlan(
    block_bytes=tuple(size * _KIB for size in (32, 64, 256, 4096)),
    nbytes=4096 * _MIB,
    small_nbytes=2048 * _MIB,
    rounds=5,
    patterns=("scattered", "pages", "one"),
)
TWIN = CopyPlan(block_bytes=(64 * _KIB, 1024 * _KIB), nbytes=64 * _MIB, rounds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLeg:
    """One way, pattern and block size."""

    way: str
    pattern: str
    block_bytes: int
    gb_per_s: float
    raw_gb_per_s: float
    loop_gb_per_s: float | None
    ratio: float
    """Median over the rounds of raw time / our time."""
    beyond_raw_us: float
    """Median over the rounds of our time - raw time."""
    summed_ratio: float | None
    """Median over the rounds of our time / our time with checksums; None where this copier takes none."""
    summed_beyond_us: float | None
    """Median over the rounds of our time with checksums - our time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """What was measured, and between what."""

    device: str
    nbytes: int
    legs: list[CopyLeg]


def default_plan(*, short: bool) -> CopyPlan:
    """Small sizes where the twin stands in: there it shows only that the command works."""
    if not cuda_devices():
        return TWIN
    return SHORT if short else FULL


def bound(way: str, block_bytes: int) -> float | None:
    """What the ratio must reach on one H200."""
    if way == "both":
        return 0.92 if block_bytes >= 4 * _MIB else None
    if block_bytes >= 4 * _MIB:
        return 0.98
    return 0.90 if 32 * _KIB <= block_bytes <= 64 * _KIB else None


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """Of `asdict(CopyResult)`."""
    found = []
    for leg in result["legs"]:
        name = f"{leg['way']} {leg['pattern']} {leg['block_bytes'] // _KIB:,} KiB"
        found.append(Figure(name=name, value=leg["gb_per_s"], unit="GB/s", larger_is_better=True))
        if leg["pattern"] == "one":
            found.append(Figure(name=f"{name}, beyond raw", value=leg["beyond_raw_us"], unit="µs"))
        if leg.get("summed_ratio") is not None:  # results of before lack it
            found.append(
                Figure(
                    name=f"{name}, summed / not", value=leg["summed_ratio"], unit="", larger_is_better=True
                )
            )
            if leg["pattern"] == "one":
                found.append(Figure(name=f"{name}, summed", value=leg["summed_beyond_us"], unit="µs"))
        stated = result["device"] != HOST_NAME and leg["pattern"] != "one"
        must = bound(leg["way"], leg["block_bytes"]) if stated else None
        found.append(
            Figure(name=f"{name} / raw", value=leg["ratio"], unit="", bound=must, larger_is_better=True)
        )
    return found


def measure(plan: CopyPlan, say: Callable[[str], None]) -> CopyResult:
    """Runs every leg. Raises: KvstoreError when a block does not arrive as it left, or memory is short."""
    say(f"preparing {2 * plan.nbytes:,} bytes of memory on each side")
    with open_bed(plan.nbytes) as bed:
        copier = bed.copier()
        legs = []
        for block_bytes in plan.block_bytes:
            for pattern in plan.patterns:
                if pattern == "pages" and block_bytes >= _LARGE_FROM_BYTES:
                    continue
                say(f"{bed.name}: {pattern} blocks of {block_bytes:,} bytes")
                places = placed(plan.round_bytes(block_bytes), block_bytes, pattern)
                transfer(bed, copier, WAYS["both"], places)
                _check(bed, places)
                legs += [_leg(bed, copier, plan, way, pattern, places) for way in WAYS]
        copier.close(_COPY_S)
        return CopyResult(device=bed.name, nbytes=plan.nbytes, legs=legs)


class Sums(Enum):
    """Whether a copy takes checksums."""

    NONE = "none"
    ASKED = "asked"


def transfer(
    bed: CopyBed,
    copier: Copier,
    directions: Sequence[Direction],
    places: Places,
    sums: Sums = Sums.NONE,
) -> float:
    """Copies blocks each way and waits until all have arrived; when the last did, of time.perf_counter.

    Raises: DeadlineExceeded.
    """
    waiting, ends = [], []
    for direction in directions:
        area = bed.areas[direction]
        done = threading.Event()

        def arrived(done: threading.Event = done) -> None:
            ends.append(time.perf_counter())
            done.set()

        batch = CopyBatch(
            direction=direction,
            sources=places.sources(direction) + np.uint64(area.source),
            targets=places.targets(direction) + np.uint64(area.target),
            nbytes=places.nbytes,
            done=arrived,
            sums=np.zeros((len(places), 2), dtype=np.uint64) if sums is Sums.ASKED else None,
        )
        taken = copier.submit(batch)
        assert taken, "an idle copier takes any batch"
        waiting.append(done)
    if not all(done.wait(_COPY_S) for done in waiting):
        raise DeadlineExceeded(f"a copy took more than {_COPY_S:g} s")
    return max(ends)


def race(rounds: int, sides: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Seconds of each side and round. The sides take turns, and another one goes first in every round.

    A side says when it ended, of time.perf_counter.
    """
    times: list[list[float]] = [[] for _ in sides]
    for i in range(rounds + 1):
        for j in range(len(sides)):
            side = (i + j) % len(sides)
            start = time.perf_counter()
            times[side].append(sides[side]() - start)
    return [taken[1:] for taken in times]


def _leg(bed: CopyBed, copier: Copier, plan: CopyPlan, way: str, pattern: str, places: Places) -> CopyLeg:
    directions = WAYS[way]
    moved = places.total_bytes * len(directions)
    sides = [
        partial(transfer, bed, copier, directions, places),
        partial(bed.raw, directions, places.total_bytes),
    ]
    has_sums = copier.takes_sums(places.nbytes)
    if has_sums:
        sides.append(partial(transfer, bed, copier, directions, places, Sums.ASKED))
    if places.nbytes >= _LOOP_FROM_BYTES and pattern != "one":
        sides.append(partial(bed.loop, directions, places))
    ours, raw, *others = race(plan.rounds * (_ONE_ROUNDS if pattern == "one" else 1), sides)
    pairs = list(zip(ours, raw, strict=True))
    summed = list(zip(ours, others.pop(0), strict=True)) if has_sums else []
    return CopyLeg(
        way=way,
        pattern=pattern,
        block_bytes=places.nbytes,
        gb_per_s=moved / median(ours) / 1e9,
        raw_gb_per_s=moved / median(raw) / 1e9,
        loop_gb_per_s=moved / median(others[0]) / 1e9 if others else None,
        ratio=median([theirs / own for own, theirs in pairs]),
        beyond_raw_us=median([own - theirs for own, theirs in pairs]) * 1e6,
        summed_ratio=median([own / longer for own, longer in summed]) if summed else None,
        summed_beyond_us=median([longer - own for own, longer in summed]) * 1e6 if summed else None,
    )


def _check(bed: CopyBed, places: Places) -> None:
    """Compares the first and the last blocks of both directions."""
    count, nbytes = len(places), places.nbytes
    for direction in Direction:
        sources, targets = places.sources(direction), places.targets(direction)
        for i in sorted({*range(_CHECKED)[:count], *range(max(0, count - _CHECKED), count)}):
            source = bed.read(direction, "source", int(sources[i]), nbytes)
            if source != bed.read(direction, "target", int(targets[i]), nbytes):
                raise KvstoreError(f"{direction.name}: block {i} of {nbytes} bytes is not what was copied")
