"""What `kvstore bench pressure` measures: its cells, and the sizes of its runs on a GPU and on the CPU.

A cell is a ratio (KV of all documents over the HBM budget), a schedule (Zipf or round-robin), the tiers that are on,
and by which policy DRAM and disk evict. LRU is what a cell has that names none; where documents are visited in a round,
which is where LRU collapses, `auto` stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bench.prompts import Schedule
from engine_adapter.engine.device import resolve_device
from eviction.factory import names
from kvstore.errors import InvalidArgument

__all__ = ["CPU", "CUDA", "CUDA_SHORT", "Cell", "PressurePlan", "Tiers", "parse_cell", "plan_for"]

_LRU, _AUTO = "lru", "auto"


class Tiers(Enum):
    """Which tiers are on."""

    OFF = "off"
    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid. `ratio`: KV of all documents over the HBM budget; `policy`: of DRAM and of the disk."""

    ratio: int
    schedule: Schedule
    tiers: Tiers
    policy: str = _LRU

    def __str__(self) -> str:
        text = f"{self.ratio}/{self.schedule.value}/{self.tiers.value}"
        return text if self.policy == _LRU else f"{text}/{self.policy}"


def parse_cell(text: str) -> Cell:
    """A cell as `str` writes it: `8/round_robin/dram`, or `8/round_robin/dram/auto`. Raises: InvalidArgument."""
    try:
        ratio, schedule, tiers, policy = text.split("/") if text.count("/") > 2 else (*text.split("/"), _LRU)
        if policy not in names():
            raise ValueError(policy)
        return Cell(ratio=int(ratio), schedule=Schedule(schedule), tiers=Tiers(tiers), policy=policy)
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is no cell: write it like 8/round_robin/dram or 8/round_robin/dram/auto (schedules zipf, "
            "round_robin; tiers off, hbm, dram, disk; a policy of `dram_policy`)"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePlan:
    """Sizes of one run. Sizes of memory as the configuration writes them."""

    model: str
    cells: tuple[Cell, ...]
    hbm: str
    dram: str
    dram_extent: str
    disk: str
    shortest_tokens: int
    longest_tokens: int
    question_tokens: int
    answer_tokens: int
    visits: int
    """Of a cell, and at least one a document."""
    rounds: int
    """Of a round-robin cell at least: the first round after that in which nothing is cached is not like the others."""
    visits_off: int
    """With the tiers off, where visits do not depend on each other."""
    chunk_tokens: int
    block_tokens: int = 32
    timeout_s: float = 240.0

    def visits_to(self, documents: int, cell: Cell) -> int:
        """How many visits of a cell are measured."""
        if cell.tiers is Tiers.OFF:
            return self.visits_off
        rounds = self.rounds if cell.schedule is Schedule.ROUND_ROBIN else 1
        return max(self.visits, rounds * documents)


def _in_a_round(ratio: int, *, beside: tuple[Tiers, ...]) -> tuple[Cell, ...]:
    """All tiers by LRU, and those `beside` by `auto` too."""
    return tuple(
        Cell(ratio=ratio, schedule=Schedule.ROUND_ROBIN, tiers=tiers, policy=policy)
        for tiers in Tiers
        for policy in ((_LRU, _AUTO) if tiers in beside else (_LRU,))
    )


def _by_zipf(ratio: int) -> tuple[Cell, ...]:
    return tuple(Cell(ratio=ratio, schedule=Schedule.ZIPF, tiers=tiers) for tiers in Tiers)


_GRID = tuple(
    cell
    for ratio in (2, 4, 8)
    for cell in (*_by_zipf(ratio), *_in_a_round(ratio, beside=(Tiers.DRAM, Tiers.DISK)))
)
CUDA = PressurePlan(
    model="llama-3.2-1b",
    cells=_GRID,
    hbm="8GiB",
    dram="32GiB",
    dram_extent="256MiB",
    disk="44GiB",
    shortest_tokens=32768,
    longest_tokens=131072,
    question_tokens=64,
    answer_tokens=32,
    visits=16,
    rounds=2,
    visits_off=6,
    chunk_tokens=8192,
)
# Shorter documents, which take less computing: five cells should end in three minutes. DRAM is smaller than what all
# of them need, so that the disk has something to do.
CUDA_SHORT = PressurePlan(
    model="llama-3.2-1b",
    cells=_in_a_round(2, beside=(Tiers.DRAM,)),
    hbm="8GiB",
    dram="12GiB",
    dram_extent="256MiB",
    disk="24GiB",
    shortest_tokens=32768,
    longest_tokens=65536,
    question_tokens=64,
    answer_tokens=32,
    visits=8,
    rounds=2,
    visits_off=4,
    chunk_tokens=8192,
)
CPU = PressurePlan(
    model="llama-tiny",
    cells=_in_a_round(2, beside=(Tiers.DRAM,)),
    hbm="2MiB",
    dram="8MiB",
    dram_extent="1MiB",
    disk="64MiB",
    shortest_tokens=128,
    longest_tokens=512,
    question_tokens=8,
    answer_tokens=4,
    visits=8,
    rounds=2,
    visits_off=4,
    chunk_tokens=256,
)


def plan_for(device: str, *, short: bool) -> PressurePlan:
    """The sizes that suit a device, as `--device` names it."""
    if not resolve_device(device).startswith("cuda"):
        return CPU
    return CUDA_SHORT if short else CUDA
