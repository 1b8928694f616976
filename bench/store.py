"""`kvstore bench store`: how fast blocks move between the tiers, beside plain copies of the same bytes.

HBM twin ↔ DRAM: the engines' copier with its checksums, real extents, scattered pages; beside it a loop of memcpy over
the same addresses. DRAM ↔ NVMe: a real mover process with its checksums, trailers and replies; beside it a loop of one
O_DIRECT call a block between the same memory and a file of the same folder. A write ends with fdatasync on both sides.
Sides take turns, and which goes first changes every round; medians over all rounds but a first one, which is not
counted. One GB is 10^9 bytes.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.blocks import LARGE
from bench.storage import MoverSide, PlainFile
from bench.timing import median
from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from kvstore.errors import DeadlineExceeded
from kvstore.moves import MoveKind
from tiers.dram import DramTier
from tiers.twin import TwinTier

__all__ = ["FULL", "SHORT", "Leg", "StorePlan", "measure"]

U64 = NDArray[np.uint64]

_COPY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """Sizes of one run, in bytes; `memory_bytes` and `disk_bytes` are what one round moves."""

    block_bytes: tuple[int, ...] = (LARGE.slot_bytes, 2 << 20)
    memory_bytes: int = 512 << 20
    disk_bytes: int = 256 << 20
    rounds: int = 15


FULL = StorePlan()
SHORT = StorePlan(memory_bytes=64 << 20, disk_bytes=64 << 20, rounds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One direction between two tiers, with the block size in its name."""

    leg: str
    gb_per_s: float
    raw_gb_per_s: float
    ratio: float
    """Median over the rounds of raw time / our time."""


def measure(plan: StorePlan, say: Callable[[str], None], parent: Path | None = None) -> list[Leg]:
    """Runs every leg; `parent` is where the files are made. `say` is told what is being done.

    Raises: KvstoreError when a block does not arrive as it left, or memory or disk is short.
    """
    legs = []
    for block_bytes in plan.block_bytes:
        say(f"HBM twin and DRAM, blocks of {block_bytes:,} bytes")
        legs += _memory_legs(plan, block_bytes)
        say(f"DRAM and NVMe, blocks of {block_bytes:,} bytes")
        legs += _disk_legs(plan, block_bytes, parent)
    return legs


def _race(name: str, rounds: int, nbytes: int, ours: Callable[[], None], raw: Callable[[], None]) -> Leg:
    """Both sides in turns."""
    ours_s: list[float] = []
    raw_s: list[float] = []
    for i in range(rounds + 1):
        for side, times in ((ours, ours_s), (raw, raw_s))[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            side()
            times.append(time.perf_counter() - start)
    ours_s, raw_s = ours_s[1:], raw_s[1:]
    return Leg(
        leg=name,
        gb_per_s=nbytes / median(ours_s) / 1e9,
        raw_gb_per_s=nbytes / median(raw_s) / 1e9,
        ratio=median([theirs / own for own, theirs in zip(ours_s, raw_s, strict=True)]),
    )


def _memory_legs(plan: StorePlan, block_bytes: int) -> list[Leg]:
    count = max(2, plan.memory_bytes // block_bytes)
    nbytes = count * block_bytes
    with _extents(nbytes) as (hbm, dram):
        copier = TwinCopier()
        try:
            order = np.random.default_rng(0).permutation(count).astype(np.uint64)
            pages = np.uint64(hbm.base) + order * np.uint64(block_bytes)
            slots = np.uint64(dram.address(0)) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
            legs = []
            for name, direction, sources, targets in (
                ("hbm_to_dram", Direction.STORE, pages, slots),
                ("dram_to_hbm", Direction.LOAD, slots, pages),
            ):
                ours = partial(_copy, copier, direction, sources, targets, block_bytes)
                raw = partial(_memcpy, sources, targets, block_bytes)
                legs.append(_race(f"{name}_{block_bytes}", plan.rounds, nbytes, ours, raw))
            return legs
        finally:
            copier.close()


@contextmanager
def _extents(nbytes: int) -> Iterator[tuple[TwinTier, DramTier]]:
    hbm, dram = TwinTier(nbytes), DramTier()
    try:
        hbm.create(0, nbytes)
        dram.create(0, nbytes)
        for tier in (hbm, dram):
            tier.populate(0)
        yield hbm, dram
    finally:
        hbm.close()
        dram.close()


def _copy(copier: TwinCopier, direction: Direction, sources: U64, targets: U64, nbytes: int) -> None:
    done = threading.Event()
    batch = CopyBatch(
        direction=direction,
        sources=sources,
        targets=targets,
        nbytes=nbytes,
        done=done.set,
        sums=np.zeros((len(sources), 2), dtype=np.uint64),  # as an engine asks for them
    )
    taken = copier.submit(batch)
    assert taken, "an idle copier takes any batch"
    if not done.wait(_COPY_S):
        raise DeadlineExceeded(f"a copy took more than {_COPY_S:g} s")


def _memcpy(sources: U64, targets: U64, nbytes: int) -> None:
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)


def _disk_legs(plan: StorePlan, block_bytes: int, parent: Path | None) -> list[Leg]:
    count = max(2, plan.disk_bytes // block_bytes)
    nbytes = count * block_bytes
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=parent) as name,
        MoverSide(Path(name), count, block_bytes) as mover,
        PlainFile(Path(name), mover.memory, block_bytes) as plain,
    ):
        legs = []
        for leg, kind, raw in (
            ("dram_to_nvme", MoveKind.WRITE, plain.write),
            ("nvme_to_dram", MoveKind.READ, plain.read),
        ):
            ours = partial(mover.transfer, kind)
            legs.append(_race(f"{leg}_{block_bytes}", plan.rounds, nbytes, ours, raw))
        mover.scribble()
        mover.transfer(MoveKind.READ)
        mover.check()
        return legs
