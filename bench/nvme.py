"""`kvstore bench nvme`: how fast and how cheaply blocks move between DRAM and disk, beside a plain loop.

Ours is a real mover process with its checksums, trailers and replies, and the process that feeds it. The plain loop is
a pool of threads with one O_DIRECT call after the other on the same slab, slots and memory; for each leg it gets the
number of threads, and for runs the size of a call, that it is fastest with. A write ends with fdatasync on both sides.
Sides take turns, and which goes first changes every round; medians over all rounds but a first one, which is not
counted. Seconds of processors are those of all our processes, user and system, while the side runs. "Unread" is the
same mover where the checksums are known by the word of the engine that stored the blocks, and compared by the one that
loads them, as our engines do it: it makes no pass over the bytes. What the checksum of the same blocks costs by itself,
out of the same memory in the same turns, stands beside them. One GB is 10^9 bytes of payload.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report import Figure
from bench.storage import MoverSide, PlainPool, Shape
from bench.timing import median
from kvstore.moves import MoveKind
from kvstore.units import KIB, MIB
from tiers.nvme.carry import IS_COMPILED

__all__ = ["FULL", "PATTERNS", "SHORT", "NvmeLeg", "NvmePlan", "NvmeResult", "figures", "measure", "slots_of"]

U64 = NDArray[np.uint64]

PATTERNS = ("scattered", "runs")
LEAST_RATIO = 0.92
MOST_CPU_S_PER_GB = 0.04
_WAYS = {"write": MoveKind.WRITE, "read": MoveKind.READ}
_MERGED_BYTES = 4 * MIB
_SLAB_FACTOR = 2
"""Slots of the slab for each block: scattered blocks have no neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmePlan:
    """Sizes of one run. `nbytes`: what a side moves in a round; `threads`: those that the plain loop may choose."""

    block_bytes: tuple[int, ...] = (256 * KIB, 2 * MIB, 8 * MIB)
    nbytes: int = 256 * MIB
    rounds: int = 11
    threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    probes: int = 2


FULL = NvmePlan()
SHORT = NvmePlan(nbytes=128 * MIB, rounds=5, probes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeLeg:
    """One direction, pattern and block size. Ratio and difference are medians over the rounds, not of medians."""

    way: str
    """ "write" (DRAM to disk) or "read"."""
    pattern: str
    block_bytes: int
    gb_per_s: float
    plain_gb_per_s: float
    ratio: float
    """Plain time / our time."""
    cpu_s_per_gb: float
    plain_cpu_s_per_gb: float
    more_cpu_s_per_gb: float
    """Ours less the plain loop's."""
    unread_ratio: float
    unread_more_cpu_s_per_gb: float
    """The same of the mover that takes no checksum."""
    checksum_cpu_s_per_gb: float
    """The checksum alone, which is one pass over memory that is in no cache: ours contains it, the plain loop none."""
    plain_threads: int
    plain_blocks_a_call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeResult:
    """All legs of one run."""

    direct: bool
    """Past the page cache; where it is not, the figures are the page cache's."""
    compiled: bool
    """Whether the data path is the compiled one; in Python it is several times as dear (`kvstore/native/build.py`)."""
    nbytes: int
    mover_threads: int
    legs: list[NvmeLeg]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    seconds: float
    cpu_s: float


def measure(plan: NvmePlan, say: Callable[[str], None], parent: Path | None = None) -> NvmeResult:
    """Runs every leg; `parent` is where the files are made. `say` is told what is being done.

    Raises: KvstoreError when a block does not arrive as it left, or memory or disk is short.
    """
    legs: list[NvmeLeg] = []
    direct, threads = True, 0
    for block_bytes in plan.block_bytes:
        count = max(2, plan.nbytes // block_bytes)
        with (
            tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=parent) as name,
            MoverSide(Path(name), count, block_bytes, slots=_SLAB_FACTOR * count) as mover,
        ):
            direct, threads = direct and mover.direct, mover.threads
            for pattern in PATTERNS:
                legs += _legs(plan, mover, pattern, block_bytes, say)
                mover.scribble()
                mover.transfer(MoveKind.READ)
                mover.check()
    return NvmeResult(
        direct=direct, compiled=IS_COMPILED, nbytes=plan.nbytes, mover_threads=threads, legs=legs
    )


def slots_of(pattern: str, count: int) -> tuple[U64, U64]:
    """[count] DRAM slots and [count] slots of a slab with twice as many, in the order in which blocks are asked for."""
    if pattern == "runs":
        run = np.arange(count, dtype=np.uint64)
        return run, run
    rng = np.random.default_rng(count)
    dram, nvme = (rng.permutation(count).astype(np.uint64) for _ in range(2))
    return dram, nvme * np.uint64(_SLAB_FACTOR)


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """Of `asdict(NvmeResult)`."""
    found = []
    for leg in result["legs"]:
        name = f"{leg['way']} {leg['pattern']} {leg['block_bytes'] // KIB:,} KiB"
        found += [
            Figure(name=name, value=leg["gb_per_s"], unit="GB/s", larger_is_better=True),
            Figure(
                name=f"{name} / plain", value=leg["ratio"], unit="", bound=LEAST_RATIO, larger_is_better=True
            ),
            Figure(
                name=f"{name}, CPU beyond plain",
                value=leg["more_cpu_s_per_gb"],
                unit="s/GB",
                bound=MOST_CPU_S_PER_GB,
            ),
            Figure(
                name=f"{name}, CPU of the checksum alone", value=leg["checksum_cpu_s_per_gb"], unit="s/GB"
            ),
        ]
        if "unread_ratio" in leg:  # results of before lack it
            found += [
                Figure(
                    name=f"{name}, unread / plain",
                    value=leg["unread_ratio"],
                    unit="",
                    bound=LEAST_RATIO,
                    larger_is_better=True,
                ),
                Figure(
                    name=f"{name}, unread, CPU beyond plain",
                    value=leg["unread_more_cpu_s_per_gb"],
                    unit="s/GB",
                    bound=MOST_CPU_S_PER_GB,
                ),
            ]
    return found


def _legs(
    plan: NvmePlan, mover: MoverSide, pattern: str, block_bytes: int, say: Callable[[str], None]
) -> list[NvmeLeg]:
    dram_slots, nvme_slots = slots_of(pattern, mover.count)
    mover.place(dram_slots, nvme_slots)
    mover.learn()
    mover.transfer(MoveKind.WRITE)  # also gives each slot its place on the disk before anything is timed
    legs = []
    with PlainPool(mover, block_bytes, dram_slots, nvme_slots, most_threads=max(plan.threads)) as pool:
        for way, kind in _WAYS.items():
            shape = _best_shape(plan, pool, kind, pattern, block_bytes)
            say(
                f"{way} {pattern} blocks of {block_bytes:,} bytes; plain loop: {shape.threads} threads, "
                f"{shape.blocks_a_call} blocks a call"
            )
            sides = (
                partial(mover.transfer, kind),
                partial(pool.transfer, kind, shape),
                mover.checksum,
                partial(mover.transfer_unread, kind),
            )
            samples = _race(plan.rounds, sides, mover.cpu_s)
            legs.append(_leg(way, pattern, block_bytes, mover.count * block_bytes, samples, shape))
    return legs


def _best_shape(plan: NvmePlan, pool: PlainPool, kind: MoveKind, pattern: str, block_bytes: int) -> Shape:
    """The fastest, by its best time of some."""
    merged = max(1, _MERGED_BYTES // block_bytes) if pattern == "runs" else 1
    shapes = [
        Shape(threads=threads, blocks_a_call=blocks)
        for blocks in sorted({1, merged})
        for threads in plan.threads
    ]
    times: dict[Shape, float] = {}
    for _ in range(plan.probes):
        for shape in shapes:
            start = time.perf_counter()
            pool.transfer(kind, shape)
            seconds = time.perf_counter() - start
            times[shape] = min(seconds, times.get(shape, seconds))
    return min(shapes, key=lambda shape: times[shape])


def _race(
    rounds: int, sides: Sequence[Callable[[], None]], others_cpu_s: Callable[[], float]
) -> list[list[_Sample]]:
    """All sides in turns. `others_cpu_s`: processor seconds of our other processes."""
    found: list[list[_Sample]] = [[] for _ in sides]
    for i in range(rounds + 1):
        for side, samples in tuple(zip(sides, found, strict=True))[:: 1 if i % 2 else -1]:
            cpu_s, start = time.process_time() + others_cpu_s(), time.perf_counter()
            side()
            seconds = time.perf_counter() - start
            samples.append(_Sample(seconds=seconds, cpu_s=time.process_time() + others_cpu_s() - cpu_s))
    return [samples[1:] for samples in found]


def _leg(
    way: str,
    pattern: str,
    block_bytes: int,
    nbytes: int,
    samples: Sequence[list[_Sample]],
    shape: Shape,
) -> NvmeLeg:
    """`samples`: ours, the plain loop's, the checksum's, and ours unread."""
    ours, plain, checksum, unread = samples
    gb = nbytes / 1e9
    pairs = list(zip(ours, plain, strict=True))
    unread_pairs = list(zip(unread, plain, strict=True))
    return NvmeLeg(
        way=way,
        pattern=pattern,
        block_bytes=block_bytes,
        gb_per_s=gb / median([sample.seconds for sample in ours]),
        plain_gb_per_s=gb / median([sample.seconds for sample in plain]),
        ratio=median([other.seconds / own.seconds for own, other in pairs]),
        cpu_s_per_gb=median([sample.cpu_s for sample in ours]) / gb,
        plain_cpu_s_per_gb=median([sample.cpu_s for sample in plain]) / gb,
        more_cpu_s_per_gb=median([own.cpu_s - other.cpu_s for own, other in pairs]) / gb,
        unread_ratio=median([other.seconds / own.seconds for own, other in unread_pairs]),
        unread_more_cpu_s_per_gb=median([own.cpu_s - other.cpu_s for own, other in unread_pairs]) / gb,
        checksum_cpu_s_per_gb=median([sample.cpu_s for sample in checksum]) / gb,
        plain_threads=shape.threads,
        plain_blocks_a_call=shape.blocks_a_call,
    )
