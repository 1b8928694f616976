"""`kvstore bench prefill`: tokens a second of a prompt from nothing, beside this device's rate of matrix products.

An engine of random weights takes in one prompt at a time; the time runs from the request to its first token. Operations
are counted in `bench.work`; the ceiling is the rate of large square products measured in the same run before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.prompts import random_prompt
from bench.rates import product_flops_per_s
from bench.shapes import BenchEngine, EnginePlan, default_model, open_bench_engine
from bench.timing import median
from bench.work import prefill_flops
from engine_adapter.engine.device import resolve_device

__all__ = ["CPU", "CUDA", "CUDA_SHORT", "PrefillPlan", "PrefillResult", "PrefillRow", "measure", "plan_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Sizes of one run."""

    lengths: tuple[int, ...]
    rounds: int
    chunk_tokens: int
    block_tokens: int = 32


CUDA = PrefillPlan(lengths=(2048, 8192, 32768, 131072), rounds=3, chunk_tokens=8192)
CUDA_SHORT = PrefillPlan(lengths=(2048, 8192), rounds=3, chunk_tokens=8192)
CPU = PrefillPlan(lengths=(128, 512), rounds=2, chunk_tokens=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """Prompts of one length; medians. `share` is of the ceiling, all operations counted."""

    prompt_tokens: int
    seconds: float
    tokens_per_s: float
    tflop_per_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What was measured; `product_tflop_per_s` is the ceiling in 10^12 operations a second."""

    model: str
    device: str
    attention: str
    chunk_tokens: int
    product_tflop_per_s: float
    rows: tuple[PrefillRow, ...]


def plan_for(device: str, *, short: bool) -> PrefillPlan:
    """The sizes that suit a device, as `--device` names it."""
    if not resolve_device(device).startswith("cuda"):
        return CPU
    return CUDA_SHORT if short else CUDA


def measure(
    plan: PrefillPlan,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    model: str | None = None,
    attention: str = "triton",
) -> PrefillResult:
    """Measures every length. Raises: what opening the engine raises."""
    import torch

    name, model = resolve_device(device), model or default_model(device)
    say("the rate of matrix products of this device")
    rate = product_flops_per_s(torch.device(name))
    setup = open_bench_engine(
        EnginePlan(
            model=model,
            device=name,
            block_tokens=plan.block_tokens,
            chunk_tokens=plan.chunk_tokens,
            max_running=1,
            cached_tokens=0,
            filled_tokens=max(plan.lengths) + plan.block_tokens,
            attention=attention,
        ),
        say,
    )
    rows = []
    for length in plan.lengths:
        say(f"{length:,} tokens")
        seconds = median([_prefill_s(setup, length, round_) for round_ in range(plan.rounds + 1)][1:])
        flops = prefill_flops(setup.config, length) / seconds
        rows.append(
            PrefillRow(
                prompt_tokens=length,
                seconds=seconds,
                tokens_per_s=length / seconds,
                tflop_per_s=flops / 1e12,
                share=flops / rate,
            )
        )
    return PrefillResult(
        model=model,
        device=name,
        attention=attention,
        chunk_tokens=plan.chunk_tokens,
        product_tflop_per_s=rate / 1e12,
        rows=tuple(rows),
    )


def _prefill_s(setup: BenchEngine, length: int, seed: int) -> float:
    """Seconds from a request to its first and only token."""
    from engine_adapter.engine.sampler import SamplingParams

    prompt = random_prompt(seed, length, setup.config.vocab_size)
    start = time.perf_counter()
    setup.engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
    for output in setup.engine.run():
        if output.token_ids:
            taken = time.perf_counter() - start
    return taken
