"""`kvstore bench pressure`: long documents whose KV is a multiple of HBM, visited again and again with new questions.

A cell is a ratio (KV of all documents over the HBM budget), a schedule (Zipf or round-robin) and the tiers that are
on: `off` computes every prompt, `hbm` keeps HBM alone (beside a DRAM tier of the smallest size), `dram` adds DRAM and
`disk` a disk. In each cell a daemon and an engine process of random weights are started, every document is visited
once (not counted), and then visits are measured, one request at a time: a document, a new question behind it, a short
answer. Beside the hit rate stands that of a plain LRU cache of single blocks with as much memory (`bench.lru_model`).
A cell that fails says why in its place; the others go on.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from bench.asked import Answer, AskedWorker, spawn_asked
from bench.lru_model import plain_lru_hits
from bench.prompts import Schedule, document_lengths, visits
from bench.service import disk_room, serve_in
from bench.timing import percentile
from engine_adapter.engine.device import compute_dtype, resolve_device
from engine_adapter.engine.source import find_shape
from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.geometry import DTYPE_BYTES
from kvstore.units import parse_size, write_size

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_SHORT",
    "Cell",
    "CellResult",
    "PressurePlan",
    "Tiers",
    "measure_cell",
    "parse_cell",
    "plan_for",
]


class Tiers(Enum):
    """Which tiers are on."""

    OFF = "off"
    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid. `ratio`: KV of all documents over the HBM budget."""

    ratio: int
    schedule: Schedule
    tiers: Tiers

    def __str__(self) -> str:
        return f"{self.ratio}/{self.schedule.value}/{self.tiers.value}"


def parse_cell(text: str) -> Cell:
    """A cell as `str` writes it: `8/round_robin/dram`. Raises: InvalidArgument."""
    try:
        ratio, schedule, tiers = text.split("/")
        return Cell(ratio=int(ratio), schedule=Schedule(schedule), tiers=Tiers(tiers))
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is no cell: write it like 8/round_robin/dram (schedules zipf, round_robin; tiers off, hbm, "
            "dram, disk)"
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
    """Of a cell, and at least one a document; with the tiers off, where visits do not depend on each other, fewer."""
    visits_off: int
    chunk_tokens: int
    block_tokens: int = 32
    timeout_s: float = 240.0


_GRID = tuple(
    Cell(ratio=ratio, schedule=schedule, tiers=tiers)
    for ratio in (2, 4, 8)
    for schedule in (Schedule.ZIPF, Schedule.ROUND_ROBIN)
    for tiers in Tiers
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
    visits_off=6,
    chunk_tokens=8192,
)
# Shorter documents, which take less computing: four cells should end in three minutes. DRAM is smaller than what all
# of them need, so that the disk has something to do.
CUDA_SHORT = PressurePlan(
    model="llama-3.2-1b",
    cells=tuple(Cell(ratio=2, schedule=Schedule.ROUND_ROBIN, tiers=tiers) for tiers in Tiers),
    hbm="8GiB",
    dram="12GiB",
    dram_extent="256MiB",
    disk="24GiB",
    shortest_tokens=32768,
    longest_tokens=65536,
    question_tokens=64,
    answer_tokens=32,
    visits=8,
    visits_off=4,
    chunk_tokens=8192,
)
CPU = PressurePlan(
    model="llama-tiny",
    cells=tuple(Cell(ratio=2, schedule=Schedule.ROUND_ROBIN, tiers=tiers) for tiers in Tiers),
    hbm="2MiB",
    dram="8MiB",
    dram_extent="1MiB",
    disk="64MiB",
    shortest_tokens=128,
    longest_tokens=512,
    question_tokens=8,
    answer_tokens=4,
    visits=8,
    visits_off=4,
    chunk_tokens=256,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one cell gave. Rates of hits are shares of the prompts' tokens, by where those were found.

    `tokens_per_s` counts the answers' tokens, `prompt_tokens_per_s` the prompts', both over the whole time of the
    measured visits.
    """

    cell: str
    documents: int
    document_tokens: int
    visits: int
    cold_ttft_p50_s: float | None
    ttft_p50_s: float
    ttft_p99_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float
    hit_rate_by_tier: Mapping[str, float]
    plain_lru_hit_rate: float
    disk: str = ""
    """Capacity of the disk tier, which may have less room than planned; empty where it is off."""


def plan_for(device: str, *, short: bool) -> PressurePlan:
    """The sizes that suit a device, as `--device` names it."""
    if not resolve_device(device).startswith("cuda"):
        return CPU
    return CUDA_SHORT if short else CUDA


def measure_cell(
    plan: PressurePlan,
    cell: Cell,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    parent: Path | None = None,
    worker: Mapping[str, str] | None = None,
) -> CellResult:
    """Runs one cell. Raises: ConfigError where the daemon cannot run here, and what daemon and engine raise."""
    name = resolve_device(device)
    config = find_shape(plan.model).config
    slot_bytes = config.page_bytes(plan.block_tokens, DTYPE_BYTES[compute_dtype(name)])
    total_tokens = cell.ratio * parse_size(plan.hbm) // slot_bytes * plan.block_tokens
    lengths = document_lengths(total_tokens, plan.shortest_tokens, plan.longest_tokens, seed=cell.ratio)
    off = cell.tiers is Tiers.OFF
    if cell.tiers is Tiers.DISK:
        plan = replace(plan, disk=disk_room(parent or Path(tempfile.gettempdir()), plan.disk))
    count = plan.visits_off if off else max(plan.visits, len(lengths))
    order = visits(cell.schedule, len(lengths), count, seed=cell.ratio)
    with _engine(plan, cell, name, slot_bytes, parent, worker or {}) as engine:
        say(f"{cell}: starting")
        engine.ready()
        first = [] if off else list(range(len(lengths)))
        cold = []
        for document in first:
            say(f"{cell}: first visit of document {document + 1} of {len(lengths)}")
            cold.append(_visit(engine, plan, lengths, document, question=document))
        start = time.monotonic()
        answers = []
        for number, document in enumerate(order):
            say(f"{cell}: visit {number + 1} of {count}")
            answers.append(_visit(engine, plan, lengths, document, question=len(lengths) + number))
        taken = time.monotonic() - start
    blocks = [length // plan.block_tokens for length in lengths]
    lru = plain_lru_hits(blocks, first, order, _capacity_bytes(plan, cell.tiers) // slot_bytes)
    return _result(plan, cell, lengths, cold, answers, taken, lru)


def _visit(
    engine: AskedWorker, plan: PressurePlan, lengths: Sequence[int], document: int, question: int
) -> Answer:
    return engine.ask(
        tokens=lengths[document],
        seed=document,
        question_tokens=plan.question_tokens,
        question_seed=1_000_000 + question,
        new_tokens=plan.answer_tokens,
    )


def _capacity_bytes(plan: PressurePlan, tiers: Tiers) -> int:
    """Memory of the tiers that are on, all together: more than one block each can ever be in."""
    sizes = {Tiers.HBM: plan.hbm, Tiers.DRAM: plan.dram, Tiers.DISK: plan.disk}
    order = list(Tiers)
    return sum(parse_size(size) for tier, size in sizes.items() if order.index(tier) <= order.index(tiers))


@contextmanager
def _engine(
    plan: PressurePlan,
    cell: Cell,
    device: str,
    slot_bytes: int,
    parent: Path | None,
    extra: Mapping[str, str],
) -> Iterator[AskedWorker]:
    """A daemon with the cell's tiers, where it has any, and an engine process beside it."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    flags = {
        "worker.model": plan.model,
        "worker.load_format": "dummy",
        "worker.device": device,
        "worker.hbm": plan.hbm,
        "worker.block_tokens": str(plan.block_tokens),
        "worker.chunk_tokens": str(plan.chunk_tokens),
        **extra,
    }
    try:
        with ExitStack() as stack:
            if cell.tiers is not Tiers.OFF:
                settings = _daemon_settings(plan, cell.tiers, slot_bytes)
                service = stack.enter_context(serve_in(folder, settings))
                flags["socket"] = str(service.socket)
            yield stack.enter_context(spawn_asked(flags, folder / "engine.log", plan.timeout_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _daemon_settings(plan: PressurePlan, tiers: Tiers, slot_bytes: int) -> Mapping[str, str]:
    settings = {
        "hbm": write_size(parse_size(plan.hbm) * 5 // 4 + (64 << 20)),
        "min_slot": write_size(slot_bytes),
        "dram": plan.dram_extent if tiers is Tiers.HBM else plan.dram,
        "dram_extent": plan.dram_extent,
    }
    return settings | ({"nvme": "{folder}/nvme:" + plan.disk} if tiers is Tiers.DISK else {})


def _result(
    plan: PressurePlan,
    cell: Cell,
    lengths: Sequence[int],
    cold: Sequence[Answer],
    answers: Sequence[Answer],
    taken_s: float,
    lru_hits: int,
) -> CellResult:
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    by_tier = {
        tier: sum(answer.cached_by_tier.get(tier, 0) for answer in answers) / prompt_tokens
        for tier in ("hbm", "dram", "nvme")
    }
    times = [answer.ttft_s for answer in answers]
    if not times:
        raise KvstoreError(f"{cell}: no visit was planned")
    return CellResult(
        cell=str(cell),
        documents=len(lengths),
        document_tokens=sum(lengths),
        visits=len(answers),
        cold_ttft_p50_s=percentile([answer.ttft_s for answer in cold], 50) if cold else None,
        ttft_p50_s=percentile(times, 50),
        ttft_p99_s=percentile(times, 99),
        tokens_per_s=len(answers) * plan.answer_tokens / taken_s,
        prompt_tokens_per_s=prompt_tokens / taken_s,
        hit_rate=sum(by_tier.values()),
        hit_rate_by_tier=by_tier,
        plain_lru_hit_rate=lru_hits * plan.block_tokens / prompt_tokens,
        disk=plan.disk if cell.tiers is Tiers.DISK else "",
    )
