"""`kvstore bench prefetch`: requests that wait for a place in the engine, with their prompts on a slow disk alone.

Two cases. `queue`: one request at a time runs, and DRAM has room for what waits: the disk reads while the engine
answers. `thrash`: four run, and every document is asked twice at once while DRAM holds a fourth of them: what is read
ahead must not push out what somebody needs. In each, a daemon with prefetch and one without (`prefetch_percent = 0`)
take turns over the same files, each started anew, so that only the disk has anything: without, with, with, without, ….
Ratios are medians of those of neighbours (`bench.paired`), and the noise is how far neighbouring turns without prefetch
are apart.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvstore
from bench.asked import AskedWorker, Together, spawn_asked
from bench.paired import in_turn, noise_alike, ratio, ratios
from bench.report import Figure
from bench.service import Service, serve_in
from bench.timing import median
from engine_adapter.engine.device import compute_dtype, resolve_device
from engine_adapter.engine.source import find_shape
from kvstore.errors import DeadlineExceeded
from kvstore.geometry import DTYPE_BYTES
from kvstore.units import write_size

__all__ = [
    "CPU",
    "CPU_SHORT",
    "CUDA",
    "PrefetchCase",
    "PrefetchPlan",
    "PrefetchResult",
    "figures",
    "measure",
    "plan_for",
]

_LEAST_GOODPUT = 0.95
_ON, _OFF = 50, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPlan:
    """Sizes of one run."""

    model: str
    documents: int
    tokens: int
    new_tokens: int
    chunk_tokens: int
    read_bytes_per_s: int
    turns: int
    """With prefetch and without, each."""
    block_tokens: int = 32
    timeout_s: float = 240.0


CPU_SHORT = PrefetchPlan(
    model="llama-tiny",
    documents=8,
    tokens=2048,
    new_tokens=96,
    chunk_tokens=256,
    read_bytes_per_s=8 << 20,
    turns=4,
)
CPU = PrefetchPlan(
    model="llama-tiny",
    documents=16,
    tokens=2048,
    new_tokens=96,
    chunk_tokens=256,
    read_bytes_per_s=8 << 20,
    turns=4,
)
CUDA = PrefetchPlan(
    model="llama-3.1-8b",
    documents=12,
    tokens=8192,
    new_tokens=64,
    chunk_tokens=8192,
    read_bytes_per_s=2 << 30,
    turns=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchCase:
    """Medians over the turns. Ratios are those with prefetch over those without."""

    case: str
    requests: int
    goodput_ratio: float
    """Of answered requests a second."""
    ttft_ratio: float
    noise: float
    """Of goodput: how far turns without prefetch are from each other (`bench.paired.noise_alike`)."""
    seconds: float
    """With prefetch, until the last answer was complete."""
    ttft_s: float
    """With prefetch, the mean over a turn's requests."""
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """What was measured."""

    model: str
    device: str
    tokens: int
    documents: int
    cases: tuple[PrefetchCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    name: str
    max_requests: int
    dram_documents: float
    times: int  # that each document is asked for


_CASES = (
    _Case(name="queue", max_requests=1, dram_documents=1.25, times=1),
    _Case(name="thrash", max_requests=4, dram_documents=0.25, times=2),
)


def plan_for(device: str, *, short: bool) -> PrefetchPlan:
    """The sizes that suit a device, as `--device` names it."""
    if resolve_device(device).startswith("cuda"):
        return CUDA
    return CPU_SHORT if short else CPU


def measure(
    plan: PrefetchPlan,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    parent: Path | None = None,
    worker: Mapping[str, str] | None = None,
    keep: Callable[[Mapping[str, object]], object] = lambda _: None,
) -> PrefetchResult:
    """Runs both cases. `keep` is given what is known after each. Raises what daemon and engine raise."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    cases: list[PrefetchCase] = []
    try:
        bench = _Bench(plan, resolve_device(device), folder, worker or {})
        say("computing the documents and writing them to disk")
        bench.fill()
        for case in _CASES:
            cases.append(bench.measure(case, say))
            keep({"cases": [asdict(found) for found in cases]})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return PrefetchResult(
        model=plan.model,
        device=resolve_device(device),
        tokens=plan.tokens,
        documents=plan.documents,
        cases=tuple(cases),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    together: Together
    counters: Mapping[str, int]

    @property
    def ttft_s(self) -> float:
        return sum(self.together.ttft_s) / len(self.together.ttft_s)


class _Bench:
    """Daemons and engines over one disk."""

    def __init__(self, plan: PrefetchPlan, device: str, folder: Path, extra: Mapping[str, str]) -> None:
        self._plan, self._device, self._folder, self._extra = plan, device, folder, extra
        itemsize = DTYPE_BYTES[compute_dtype(device)]
        self._slot_bytes = find_shape(plan.model).config.page_bytes(plan.block_tokens, itemsize)
        self._blocks = plan.tokens // plan.block_tokens

    def fill(self) -> None:
        """Every document is computed once, and all of them are on the disk then."""
        plan = self._plan
        with self._daemon(1.5, _OFF, 0) as service, self._engine(service, 1) as engine:
            for seed in range(plan.documents):
                engine.ask(tokens=plan.tokens, seed=seed, new_tokens=1)
            with kvstore.connect(service.socket) as client:
                pending = client.flush(plan.timeout_s).pending_blocks
        if pending:
            raise DeadlineExceeded(f"{pending} blocks did not reach the disk in {plan.timeout_s:g} s")

    def measure(self, case: _Case, say: Callable[[str], None]) -> PrefetchCase:
        """Turns with and without prefetch, one after the other."""
        turns: dict[int, list[_Turn]] = {_ON: [], _OFF: []}
        for number in range(self._plan.turns):
            for percent in in_turn((_OFF, _ON), number):
                kind = "with" if percent else "without"
                say(f"{case.name}: {kind} prefetch, turn {number + 1} of {self._plan.turns}")
                turns[percent].append(self._turn(case, percent))
        on, off = turns[_ON], turns[_OFF]
        with_s = [turn.together.seconds for turn in on]
        without_s = [turn.together.seconds for turn in off]
        return PrefetchCase(
            case=case.name,
            requests=case.times * self._plan.documents,
            goodput_ratio=ratio(without_s, with_s),
            ttft_ratio=ratio([turn.ttft_s for turn in on], [turn.ttft_s for turn in off]),
            noise=noise_alike(ratios(without_s[1:], without_s[:-1])),
            seconds=median(with_s),
            ttft_s=median([turn.ttft_s for turn in on]),
            useful_bytes=sum(turn.counters["prefetch_useful_bytes"] for turn in on),
            late_bytes=sum(turn.counters["prefetch_late_bytes"] for turn in on),
            wasted_bytes=sum(turn.counters["prefetch_wasted_bytes"] for turn in on),
        )

    def _turn(self, case: _Case, percent: int) -> _Turn:
        plan = self._plan
        rate = plan.read_bytes_per_s
        with (
            self._daemon(case.dram_documents, percent, rate) as service,
            self._engine(service, case.max_requests) as engine,
        ):
            seeds = [seed for _ in range(case.times) for seed in range(plan.documents)]
            together = engine.ask_together(tokens=plan.tokens, seeds=seeds, new_tokens=plan.new_tokens)
            return _Turn(together=together, counters=service.counters())

    @contextmanager
    def _daemon(self, dram_documents: float, percent: int, read_bytes_per_s: int) -> Iterator[Service]:
        extent = max(1 << 20, 16 * self._slot_bytes)
        documents_bytes = self._plan.documents * self._blocks * self._slot_bytes
        dram = max(2, round(dram_documents * documents_bytes / extent)) * extent
        settings = {
            "hbm": write_size(2 * self._hbm_bytes() + (64 << 20)),
            "min_slot": write_size(self._slot_bytes),
            "dram": write_size(dram),
            "dram_extent": write_size(extent),
            "nvme": "{folder}/nvme:" + write_size(max(2 * documents_bytes, 96 << 20) + 4 * (16 << 20)),
            "nvme_extent": write_size(max(16 << 20, 2 * extent)),
            "prefetch_percent": str(percent),
        }
        if read_bytes_per_s:
            settings["nvme_throttle"] = f"read={write_size(read_bytes_per_s)}"
        with serve_in(self._folder, settings) as service:
            yield service

    @contextmanager
    def _engine(self, service: Service, max_requests: int) -> Iterator[AskedWorker]:
        plan = self._plan
        flags = {
            "socket": str(service.socket),
            "worker.model": plan.model,
            "worker.load_format": "dummy",
            "worker.load": "always",
            "worker.device": self._device,
            "worker.hbm": write_size(self._hbm_bytes()),
            "worker.block_tokens": str(plan.block_tokens),
            "worker.chunk_tokens": str(plan.chunk_tokens),
            "worker.max_requests": str(max_requests),
            **self._extra,
        }
        with spawn_asked(flags, self._folder / "engine.log", plan.timeout_s) as engine:
            engine.ready()
            yield engine

    def _hbm_bytes(self) -> int:
        """For six requests at once."""
        tokens = self._plan.tokens + self._plan.new_tokens
        return 6 * (tokens // self._plan.block_tokens + 1) * self._slot_bytes


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """The lines of the table. The bound on goodput allows for the noise of this machine."""
    found = []
    for case in result["cases"]:
        name, noise = case["case"], case["noise"]
        found.append(
            Figure(
                name=f"{name}: goodput over that without prefetch (noise {noise:.2f})",
                value=case["goodput_ratio"],
                unit="",
                bound=_LEAST_GOODPUT - noise,
                larger_is_better=True,
            )
        )
        found.append(Figure(name=f"{name}: mean TTFT over that without", value=case["ttft_ratio"], unit=""))
        for what in ("useful", "late", "wasted"):
            mib = case[f"{what}_bytes"] / (1 << 20)
            found.append(Figure(name=f"{name}: {what}", value=mib, unit="MiB"))
    return found
