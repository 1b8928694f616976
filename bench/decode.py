"""`kvstore bench decode`: tokens a second at several batches and contexts, beside the roofline of this device.

An engine of random weights decodes over pages of random numbers: no prompt is prefilled, and nothing of what a step
reads, computes, writes, schedules or samples is left out. With FlashInfer's attention a second engine over the same
weights and pages runs beside it, cell by cell in turns. The roofline is what must be read once a step (`bench.work`),
at the rate of reads measured in the same run before; share 1 would be a step that does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.prompts import random_prompt
from bench.rates import read_bytes_per_s
from bench.shapes import BenchEngine, EnginePlan, attending_by, default_model, open_bench_engine
from bench.work import decode_step_bytes
from engine_adapter.engine.device import resolve_device
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    from engine_adapter.base import RequestId

__all__ = ["CPU", "CUDA", "CUDA_SHORT", "DecodeCell", "DecodePlan", "DecodeResult", "measure", "plan_for"]

_WARM_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Sizes of one run. Every batch is measured at every context."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    block_tokens: int = 32


CUDA = DecodePlan(batches=(1, 8, 32, 64), contexts=(4096, 32768), steps=64)
CUDA_SHORT = DecodePlan(batches=(1, 32), contexts=(4096,), steps=32)
CPU = DecodePlan(batches=(1, 4), contexts=(128, 512), steps=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    """One batch at one context. `requests_a_page`: by how many requests a page was read, where memory was short."""

    attention: str
    """Who computed it: `triton`, our own kernels, or `flashinfer`."""
    batch: int
    context_tokens: int
    tokens_per_s: float
    step_ms: float
    roofline_ms: float
    share: float
    requests_a_page: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """What was measured; `read_gb_per_s` is the ceiling in 10^9 bytes a second."""

    model: str
    device: str
    read_gb_per_s: float
    cells: tuple[DecodeCell, ...]


def plan_for(device: str, *, short: bool) -> DecodePlan:
    """The sizes that suit a device, as `--device` names it."""
    if not resolve_device(device).startswith("cuda"):
        return CPU
    return CUDA_SHORT if short else CUDA


def measure(
    plan: DecodePlan,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    model: str | None = None,
    attention: str = "triton",
) -> DecodeResult:
    """Measures every cell by our own kernels, and beside it by `attention` where that is another.

    Raises: what opening the engine raises; KvstoreError when a step decodes too little.
    """
    import torch

    name, model = resolve_device(device), model or default_model(device)
    say("the rate of reads of this device")
    rate = read_bytes_per_s(torch.device(name))
    largest = max(plan.batches)
    room = (_WARM_STEPS + plan.steps + 2) + 2 * plan.block_tokens
    setup = open_bench_engine(
        EnginePlan(
            model=model,
            device=name,
            block_tokens=plan.block_tokens,
            chunk_tokens=max(512, 2 * largest),
            max_running=largest,
            cached_tokens=largest * max(plan.contexts),
            filled_tokens=largest * room,
        ),
        say,
    )
    setups = [setup]
    if attention != "triton":
        say(f"preparing {attention}, which may compile for minutes")
        setups.append(attending_by(setup, attention))
    cells = []
    for context in plan.contexts:
        for batch in plan.batches:
            for one in setups:
                say(f"batch {batch} at {context:,} tokens, {one.settings.attention}")
                cells.append(_cell(one, plan, batch, context, rate))
    return DecodeResult(model=model, device=name, read_gb_per_s=rate / 1e9, cells=tuple(cells))


def _cell(setup: BenchEngine, plan: DecodePlan, batch: int, context: int, rate: float) -> DecodeCell:
    step_s = _step_s(setup, plan.steps, batch, context)
    mean_context = context + _WARM_STEPS + plan.steps // 2
    nbytes = decode_step_bytes(
        setup.config, batch=batch, context_tokens=mean_context, itemsize=setup.itemsize
    )
    named = batch * (context // plan.block_tokens)
    return DecodeCell(
        attention=setup.settings.attention,
        batch=batch,
        context_tokens=context,
        tokens_per_s=batch / step_s,
        step_ms=step_s * 1e3,
        roofline_ms=nbytes / rate * 1e3,
        share=nbytes / rate / step_s,
        requests_a_page=max(1.0, named / max(1, setup.cached_pages)),
    )


def _step_s(setup: BenchEngine, steps: int, batch: int, context: int) -> float:
    """Seconds a step of `batch` requests that all decode, over `steps` of them, the engine's own time included."""
    from engine_adapter.engine.sampler import SamplingParams

    engine = setup.engine
    # One token more than is cached: it decodes from its first step on.
    prompt = random_prompt(context, context + 1, setup.config.vocab_size)
    params = SamplingParams(max_new_tokens=_WARM_STEPS + steps + 8, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for _ in range(batch)]
    try:
        for _ in range(_WARM_STEPS):
            engine.step()
        start = time.perf_counter()
        count = sum(len(output.token_ids) for _ in range(steps) for output in engine.step())
        taken = time.perf_counter() - start
    finally:
        _end(setup, requests)
    if count != batch * steps:
        raise KvstoreError(f"{batch} requests gave {count} tokens in {steps} steps: they did not all decode")
    return taken / steps


def _end(setup: BenchEngine, requests: list[RequestId]) -> None:
    for request in requests:
        setup.engine.abort(request)
    while setup.engine.has_work:
        setup.engine.step()
