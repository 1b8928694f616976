"""`kvstore bench copy`: how fast blocks move between HBM and DRAM, beside raw copies of the same bytes.

Each direction and both at once, by block size; scattered blocks, runs of eight neighbours, and one block alone, which
shows what a batch costs before and after its bytes. Beside it, in this process and in turns, one raw copy of as many
bytes, and a loop of one call a block where blocks are so large that a loop in Python says something. Times run from
`submit` to `done`. Medians over all rounds but a first one, which is not counted; ratios are of each round. One GB is
10^9 bytes. Without a CUDA device: the twin's copier over host memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.copy_sides import HOST_NAME, CopyBed, open_bed
from bench.report import Figure
from bench.timing import median
from engine_adapter.copier import Copier, CopyBatch, Direction
from engine_adapter.cuda_driver import cuda_devices
from kvstore.errors import DeadlineExceeded, KvstoreError

__all__ = [
    "FULL",
    "SHORT",
    "TWIN",
    "WAYS",
    "CopyLeg",
    "CopyPlan",
    "CopyResult",
    "bound",
    "default_plan",
    "figures",
    "measure",
    "placed",
    "race",
    "transfer",
]

U64 = NDArray[np.uint64]

_COPY_S = 120.0
_RUN_BLOCKS = 8
_LOOP_FROM_BYTES = 256 << 10
_CHECKED = 64
_ONE_ROUNDS = 10
"""Times as many where a round is one block."""
_KIB, _MIB = 1 << 10, 1 << 20
WAYS: Mapping[str, tuple[Direction, ...]] = {
    "load": (Direction.LOAD,),
    "store": (Direction.STORE,),
    "both": (Direction.LOAD, Direction.STORE),
}
"""DRAM → HBM, HBM → DRAM, and the two at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Sizes of one run, in bytes; `nbytes` is what a round moves each way."""

    block_bytes: tuple[int, ...]
    nbytes: int
    rounds: int
    patterns: tuple[str, ...] = ("scattered", "runs", "one")


FULL = CopyPlan(
    block_bytes=tuple(size * _KIB for size in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    nbytes=2048 * _MIB,
    rounds=7,
)
SHORT = CopyPlan(
    block_bytes=tuple(size * _KIB for size in (32, 64, 256, 4096)),
    nbytes=1024 * _MIB,
    rounds=5,
    patterns=("scattered", "one"),
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
                say(f"{bed.name}: {pattern} blocks of {block_bytes:,} bytes")
                sources, targets = placed(plan.nbytes, block_bytes, pattern)
                transfer(bed, copier, WAYS["both"], sources, targets, block_bytes)
                _check(bed, sources, targets, block_bytes)
                legs += [
                    _leg(bed, copier, plan, way=way, pattern=pattern, block_bytes=block_bytes) for way in WAYS
                ]
        copier.close(_COPY_S)
        return CopyResult(device=bed.name, nbytes=plan.nbytes, legs=legs)


def transfer(
    bed: CopyBed, copier: Copier, directions: Sequence[Direction], sources: U64, targets: U64, nbytes: int
) -> None:
    """Copies blocks each way and waits until all have arrived; addresses are within an area.

    Raises: DeadlineExceeded.
    """
    waiting = []
    for direction in directions:
        area = bed.areas[direction]
        done = threading.Event()
        batch = CopyBatch(
            direction=direction,
            sources=sources + np.uint64(area.source),
            targets=targets + np.uint64(area.target),
            nbytes=nbytes,
            done=done.set,
        )
        taken = copier.submit(batch)
        assert taken, "an idle copier takes any batch"
        waiting.append(done)
    if not all(done.wait(_COPY_S) for done in waiting):
        raise DeadlineExceeded(f"a copy took more than {_COPY_S:g} s")


def race(rounds: int, sides: Sequence[Callable[[], None]]) -> list[list[float]]:
    """Seconds of each side and round. The sides take turns, and another one goes first in every round."""
    times: list[list[float]] = [[] for _ in sides]
    for i in range(rounds + 1):
        for j in range(len(sides)):
            side = (i + j) % len(sides)
            start = time.perf_counter()
            sides[side]()
            times[side].append(time.perf_counter() - start)
    return [taken[1:] for taken in times]


def _leg(
    bed: CopyBed, copier: Copier, plan: CopyPlan, *, way: str, pattern: str, block_bytes: int
) -> CopyLeg:
    directions = WAYS[way]
    sources, targets = placed(plan.nbytes, block_bytes, pattern)
    moved = len(sources) * block_bytes * len(directions)
    sides = [
        partial(transfer, bed, copier, directions, sources, targets, block_bytes),
        partial(bed.raw, directions, len(sources) * block_bytes),
    ]
    if block_bytes >= _LOOP_FROM_BYTES and pattern != "one":
        sides.append(partial(bed.loop, directions, sources, targets, block_bytes))
    ours, raw, *loop = race(plan.rounds * (_ONE_ROUNDS if pattern == "one" else 1), sides)
    return CopyLeg(
        way=way,
        pattern=pattern,
        block_bytes=block_bytes,
        gb_per_s=moved / median(ours) / 1e9,
        raw_gb_per_s=moved / median(raw) / 1e9,
        loop_gb_per_s=moved / median(loop[0]) / 1e9 if loop else None,
        ratio=median([theirs / own for own, theirs in zip(ours, raw, strict=True)]),
    )


def placed(nbytes: int, block_bytes: int, pattern: str) -> tuple[U64, U64]:
    """[n] places of blocks within their areas, anywhere on both sides: scattered, in runs, or just one."""
    rng = np.random.default_rng(block_bytes)
    step = _RUN_BLOCKS if pattern == "runs" else 1
    groups = 1 if pattern == "one" else nbytes // block_bytes // step
    sources, targets = (
        ((rng.permutation(groups) * step)[:, None] + np.arange(step)).ravel().astype(np.uint64)
        * np.uint64(block_bytes)
        for _ in range(2)
    )
    return sources, targets


def _check(bed: CopyBed, sources: U64, targets: U64, block_bytes: int) -> None:
    """Compares the first and the last blocks of both directions."""
    for direction in Direction:
        for i in (*range(_CHECKED)[: len(sources)], *range(max(0, len(sources) - _CHECKED), len(sources))):
            source = bed.read(direction, "source", int(sources[i]), block_bytes)
            if source != bed.read(direction, "target", int(targets[i]), block_bytes):
                raise KvstoreError(
                    f"{direction.name}: block {i} of {block_bytes} bytes is not what was copied"
                )
