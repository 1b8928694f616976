"""`kvstore bench guard`: tiers that harm, and whether the service gets out of the way by itself.

Two cases. `dram`: DRAM holds a quarter of the prompts that are asked in turns, and there is no disk: what is copied
there is gone before it is asked for again. `disk`: all prompts are on a disk that takes five times as long to give
one as it takes to compute it. In each an engine over the service and two without are asked the same prompts by turns,
in another order each time (`bench.paired`). The engine over the service is compared with the mean of the other two
within a round; how far those two are apart is the noise. Counted is what comes after the first rounds, in which the
guard learns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.asked import Answer, AskedWorker
from bench.choices import ChoicePlan, Household, household
from bench.paired import in_turn, noise_alike, ratio, ratios
from bench.report import Figure
from bench.service import Service
from bench.timing import median
from engine_adapter.engine.device import resolve_device

__all__ = ["CPU", "CPU_SHORT", "CUDA", "GuardCase", "GuardResult", "figures", "measure", "plan_for"]

_BOUND = 1.03
_SLOW = 5.0
_LEARN_ROUNDS = 2
CPU_SHORT = ChoicePlan(
    model="llama-tiny",
    load_format="dummy",
    tokens=2048,
    prompts=8,
    new_tokens=48,
    chunk_tokens=256,
    samples=18,
    dram_prompts=2.0,
)
CPU = ChoicePlan(
    model="smollm2",
    load_format="auto",
    tokens=1024,
    prompts=12,
    new_tokens=48,
    chunk_tokens=512,
    samples=36,
    dram_prompts=3.0,
)
CUDA = ChoicePlan(
    model="llama-3.1-8b",
    load_format="dummy",
    tokens=8192,
    prompts=12,
    new_tokens=64,
    chunk_tokens=8192,
    samples=36,
    dram_prompts=3.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCase:
    """Ratios: medians over the counted rounds, of the engine over the service to those without. `noise`: of those to
    each other (`bench.paired.noise_alike`). Seconds are medians without a service."""

    case: str
    ttft_ratio: float
    ttft_noise: float
    step_ratio: float
    step_noise: float
    ttft_s: float
    step_s: float
    tiers_out: int
    """How often the service has taken a tier out of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardResult:
    """What was measured."""

    model: str
    device: str
    tokens: int
    cases: tuple[GuardCase, ...]


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
) -> GuardResult:
    """Runs both cases. `keep` is given what is known after each. Raises what daemon and engine raise."""
    cases: list[GuardCase] = []
    for case in ("dram", "disk"):
        with household(plan, device=device, parent=parent, extra=worker) as home:
            cases.append(_small_dram(home, say) if case == "dram" else _slow_disk(home, say))
        keep({"tokens": plan.tokens, "cases": [asdict(found) for found in cases]})
    return GuardResult(
        model=plan.model, device=resolve_device(device), tokens=plan.tokens, cases=tuple(cases)
    )


def _small_dram(home: Household, say: Callable[[str], None]) -> GuardCase:
    with home.daemon(disk=False) as service:
        return _compare(home, service, "dram", say)


def _slow_disk(home: Household, say: Callable[[str], None]) -> GuardCase:
    times = home.compute(home.plan.prompts, say)
    rate = int(home.prompt_bytes / median(times) / _SLOW)
    with home.daemon(read_bytes_per_s=rate) as service:
        return _compare(home, service, "disk", say)


def _compare(home: Household, service: Service, case: str, say: Callable[[str], None]) -> GuardCase:
    plan = home.plan
    before = service.counters()["guard_tiers_out_total"]
    with ExitStack() as stack:
        names = ("off", "on", "again")
        engines: dict[str, AskedWorker] = {
            name: stack.enter_context(home.engine(service if name == "on" else None, f"{case}-{name}"))
            for name in names
        }
        learn = _LEARN_ROUNDS * plan.prompts
        for number in range(learn):
            say(f"{case}: prompt {number + 1} of {learn + plan.samples}")
            home.ask(engines["on"], number % plan.prompts)
        answers: dict[str, list[Answer]] = {name: [] for name in names}
        for number in range(learn, learn + plan.samples):
            say(f"{case}: prompt {number + 1} of {learn + plan.samples}")
            for name in in_turn(names, number):
                answers[name].append(home.ask(engines[name], number % plan.prompts))
        counters = service.counters()
    ttft = _Sides({name: [answer.ttft_s for answer in found] for name, found in answers.items()})
    step = _Sides({name: [answer.step_s for answer in found] for name, found in answers.items()})
    return GuardCase(
        case=case,
        ttft_ratio=ttft.ratio,
        ttft_noise=ttft.noise,
        step_ratio=step.ratio,
        step_noise=step.noise,
        ttft_s=ttft.seconds,
        step_s=step.seconds,
        tiers_out=counters["guard_tiers_out_total"] - before,
    )


class _Sides:
    """One figure of all rounds, by engine."""

    def __init__(self, found: Mapping[str, list[float]]) -> None:
        without = [(one + other) / 2 for one, other in zip(found["off"], found["again"], strict=True)]
        self.ratio = ratio(found["on"], without)
        self.noise = noise_alike(ratios(found["again"], found["off"]))
        self.seconds = median(without)


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """The lines of the table. The bound allows for the noise of this machine."""
    found = []
    for case in result["cases"]:
        for what in ("ttft", "step"):
            noise = case[f"{what}_noise"]
            name = f"{case['case']}: {what} over that without a service (noise {noise:.2f})"
            found.append(Figure(name=name, value=case[f"{what}_ratio"], unit="", bound=_BOUND + noise))
    return found
