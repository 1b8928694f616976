"""`kvstore bench planner`: load or recompute over disks of several speeds, with the real engine.

The disk is throttled to a third, to once and to three times the rate at which loading a prompt takes as long as
computing it. At each rate three engines are asked by turns, each for prompts of its own: one that loads all that is
cached (`worker.load` always), one that computes all (never), and one that chooses (auto). `ratio` is the time to
the first token of the last over that of the better of the other two, which is the one with the lower median, within a
round; `noise` is how far the median of these ratios may be from where it belongs (`bench.paired.noise_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.asked import Answer
from bench.choices import ChoicePlan, Household, household
from bench.paired import in_turn, noise_of, ratios
from bench.report import Figure
from bench.timing import median
from engine_adapter.engine.device import resolve_device
from engine_adapter.loading.choice import LoadMode

__all__ = ["CPU", "CPU_SHORT", "CUDA", "PlannerResult", "PlannerRow", "figures", "measure", "plan_for"]

_WARM = 6
"""Prompts of each engine that are not counted: the promise begins with the seventh (docs/planner.md)."""
_PROMISE_SHARE, _PROMISE_S = 1.05, 0.002
CPU_SHORT = ChoicePlan(
    model="llama-tiny",
    load_format="dummy",
    tokens=2048,
    prompts=5,
    new_tokens=1,
    chunk_tokens=256,
    samples=12,
)
CPU = ChoicePlan(
    model="smollm2", load_format="auto", tokens=2048, prompts=5, new_tokens=1, chunk_tokens=512, samples=8
)
CUDA = ChoicePlan(
    model="llama-3.1-8b",
    load_format="dummy",
    tokens=8192,
    prompts=5,
    new_tokens=1,
    chunk_tokens=8192,
    samples=8,
)
_RATES = (1 / 3, 1.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRow:
    """One rate. Medians in seconds; `ratio`: of the rounds', as `noise`; `loaded_share`: of the tokens that the chooser
    did not compute."""

    read_mb_per_s: float
    always_s: float
    never_s: float
    auto_s: float
    ratio: float
    excess_s: float
    """Above 5 % + 2 ms over the better; below 0: the promise is kept."""
    loaded_share: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """What was measured."""

    model: str
    device: str
    tokens: int
    compute_s: float
    rows: tuple[PlannerRow, ...]


def plan_for(device: str, *, short: bool) -> ChoicePlan:
    """The sizes that suit a device, as `--device` names it."""
    if resolve_device(device).startswith("cuda"):
        return CUDA
    return CPU_SHORT if short else CPU


def measure(
    plan: ChoicePlan,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    parent: Path | None = None,
    worker: Mapping[str, str] | None = None,
    keep: Callable[[Mapping[str, object]], None] = lambda _: None,
    rates: Sequence[float] = _RATES,
) -> PlannerResult:
    """Runs everything. `keep` is given what is known after each rate. Raises what daemon and engine raise."""
    rows: list[PlannerRow] = []
    with household(plan, device=device, parent=parent, extra=worker) as home:
        times = home.compute(plan.prompts * len(LoadMode), say)
        compute_s = median(times[1:] or times)
        for rate in rates:
            bytes_per_s = int(rate * home.prompt_bytes / compute_s)
            rows.append(_row(home, bytes_per_s, say))
            keep({"tokens": plan.tokens, "compute_s": compute_s, "rows": [asdict(row) for row in rows]})
    return PlannerResult(
        model=plan.model,
        device=resolve_device(device),
        tokens=plan.tokens,
        compute_s=compute_s,
        rows=tuple(rows),
    )


def _row(home: Household, bytes_per_s: int, say: Callable[[str], None]) -> PlannerRow:
    """All three by turns, each with prompts of its own, so that what else the machine does strikes them alike."""
    plan, modes = home.plan, list(LoadMode)
    answers: dict[str, list[Answer]] = {mode: [] for mode in modes}
    with home.daemon(read_bytes_per_s=bytes_per_s) as service, ExitStack() as stack:
        engines = {mode: stack.enter_context(home.engine(service, mode, load=mode.value)) for mode in modes}
        for sample in range(_WARM + plan.samples):
            say(f"disk of {bytes_per_s / 1e6:.1f} MB/s: {sample + 1} of {_WARM + plan.samples}")
            for mode in in_turn(modes, sample):
                number = modes.index(mode) * plan.prompts + sample % plan.prompts
                answers[mode].append(home.ask(engines[mode], number))
    times = {mode: [answer.ttft_s for answer in found[_WARM:]] for mode, found in answers.items()}
    middle = {mode: median(found) for mode, found in times.items()}
    best = min("always", "never", key=middle.__getitem__)
    chosen = ratios(times["auto"], times[best])
    shares = [answer.cached_tokens / answer.prompt_tokens for answer in answers["auto"][_WARM:]]
    return PlannerRow(
        read_mb_per_s=bytes_per_s / 1e6,
        always_s=middle["always"],
        never_s=middle["never"],
        auto_s=middle["auto"],
        ratio=median(chosen),
        excess_s=middle["auto"] - _PROMISE_SHARE * middle[best] - _PROMISE_S,
        loaded_share=median(shares),
        noise=noise_of(chosen),
    )


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """The lines of the table. The promise allows for the noise of this machine."""
    found = []
    for row in result["rows"]:
        name = f"disk of {row['read_mb_per_s']:.0f} MB/s"
        bound = _PROMISE_SHARE + _PROMISE_S / min(row["always_s"], row["never_s"]) + row["noise"]
        found += [
            Figure(name=f"{name}, all loaded", value=row["always_s"], unit="s"),
            Figure(name=f"{name}, all computed", value=row["never_s"], unit="s"),
            Figure(name=f"{name}, chosen", value=row["auto_s"], unit="s"),
            Figure(
                name=f"{name}, chosen over the better (noise {row['noise']:.2f})",
                value=row["ratio"],
                unit="",
                bound=bound,
            ),
        ]
    return found
