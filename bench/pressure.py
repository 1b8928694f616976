"""`kvstore bench pressure`: long documents whose KV is a multiple of HBM, visited again and again with new questions.

Of the tiers of a cell (`pressure_plan`) `off` computes every prompt, `hbm` keeps HBM alone (beside a DRAM tier of the
smallest size), `dram` adds DRAM and `disk` a disk. In each cell a daemon and an engine process of random weights are
started, every document is visited once (not counted), and then visits are measured, one request at a time: a document,
a new question behind it, a short answer. Beside the hit rate stands that of a plain LRU cache of single blocks with as
much memory (`bench.lru_model`).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.asked import Answer, AskedWorker, spawn_asked
from bench.lru_model import plain_lru_hits
from bench.pressure_plan import Cell, PressurePlan, Tiers
from bench.prompts import Schedule, document_lengths, visits
from bench.service import disk_room, serve_in
from bench.timing import percentile
from engine_adapter.engine.device import compute_dtype, resolve_device
from engine_adapter.engine.source import find_shape
from kvstore.errors import KvstoreError
from kvstore.geometry import DTYPE_BYTES
from kvstore.units import parse_size, write_size

__all__ = ["CellResult", "measure_cell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one cell gave. Rates of hits are shares of the prompts' tokens, by where those were found.

    `tokens_per_s` counts the answers' tokens, `prompt_tokens_per_s` the prompts', both over the whole time of the
    measured visits. `hit_rate_by_round`: of each whole round of the documents, where they are visited in a round.
    `seconds`: of the whole cell, starts and first visits too.
    """

    cell: str
    policy: str
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
    hit_rate_by_round: tuple[float, ...] = ()
    seconds: float = 0.0
    disk: str = ""
    """Capacity of the disk tier, which may have less room than planned; empty where it is off."""


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
    started = time.monotonic()
    name = resolve_device(device)
    config = find_shape(plan.model).config
    slot_bytes = config.page_bytes(plan.block_tokens, DTYPE_BYTES[compute_dtype(name)])
    total_tokens = cell.ratio * parse_size(plan.hbm) // slot_bytes * plan.block_tokens
    lengths = document_lengths(total_tokens, plan.shortest_tokens, plan.longest_tokens, seed=cell.ratio)
    off = cell.tiers is Tiers.OFF
    if cell.tiers is Tiers.DISK:
        plan = replace(plan, disk=disk_room(parent or Path(tempfile.gettempdir()), plan.disk))
    count = plan.visits_to(len(lengths), cell)
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
    found = _result(plan, cell, lengths, cold, answers, taken, lru)
    return replace(found, seconds=time.monotonic() - started)


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
                settings = _daemon_settings(plan, cell, slot_bytes)
                service = stack.enter_context(serve_in(folder, settings))
                flags["socket"] = str(service.socket)
            yield stack.enter_context(spawn_asked(flags, folder / "engine.log", plan.timeout_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _daemon_settings(plan: PressurePlan, cell: Cell, slot_bytes: int) -> Mapping[str, str]:
    settings = {
        "hbm": write_size(parse_size(plan.hbm) * 5 // 4 + (64 << 20)),
        "min_slot": write_size(slot_bytes),
        "dram": plan.dram_extent if cell.tiers is Tiers.HBM else plan.dram,
        "dram_extent": plan.dram_extent,
        "dram_policy": cell.policy,
        "nvme_policy": cell.policy,
    }
    return settings | ({"nvme": "{folder}/nvme:" + plan.disk} if cell.tiers is Tiers.DISK else {})


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
        policy=cell.policy,
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
        hit_rate_by_round=_by_round(cell, answers, len(lengths)),
        disk=plan.disk if cell.tiers is Tiers.DISK else "",
    )


def _by_round(cell: Cell, answers: Sequence[Answer], documents: int) -> tuple[float, ...]:
    """Nothing where documents are not visited in a round; a last round that was not completed is left out."""
    if cell.schedule is not Schedule.ROUND_ROBIN:
        return ()
    rounds = [answers[at : at + documents] for at in range(0, len(answers) - documents + 1, documents)]
    return tuple(
        sum(answer.cached_tokens for answer in one) / sum(answer.prompt_tokens for answer in one)
        for one in rounds
    )
