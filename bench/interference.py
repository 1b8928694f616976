"""`kvstore bench interference`: how much continuous offload to DRAM slows decode, by size of slot.

Decode is the bundled engine over pages of random numbers (`engine`), or what such a step reads and multiplies without
the engine around it (`graph`: a CUDA graph of products and reductions in the shape of an 8B model). Phases with and
without stores take turns, and which goes first changes; the slowdown is the median over the rounds of 1 - tokens/s with
stores / tokens/s without. Two rates of stores: `sealed`, what this decode fills itself, as a worker that writes through
stores it, and `saturating`, whatever the copier reaches without a pause; what was reached is stated. `loading` is loads
without a pause instead, as of prompts that come while others decode. The copier hears of steps as a worker's does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bench.copy_sides import CopyBed, open_bed
from bench.offload import Offload, SealedOffload, Stores
from bench.prompts import random_prompt
from bench.report import Figure
from bench.shapes import EnginePlan, default_model, open_bench_engine
from bench.timing import median
from engine_adapter.copying.copier import Copier, Direction
from engine_adapter.engine.device import resolve_device
from kvstore.errors import ConfigError, KvstoreError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_SHORT",
    "Decode",
    "InterferenceCell",
    "InterferencePlan",
    "InterferenceResult",
    "Rate",
    "figures",
    "measure",
    "plan_for",
]

_KIB, _MIB = 1 << 10, 1 << 20


class Rate(StrEnum):
    """How fast blocks are stored beside decode."""

    SEALED = "sealed"
    """As decode fills them."""
    SATURATING = "saturating"
    """Without a pause."""
    LOADING = "loading"
    """Loads instead, without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferencePlan:
    """Sizes of one run."""

    slot_bytes: tuple[int, ...] = (64 * _KIB, 256 * _KIB, 4 * _MIB)
    batch: int = 32
    context_tokens: int = 4096
    steps: int = 48
    rounds: int = 5
    area_bytes: int = 1024 * _MIB
    batch_bytes: int = 64 * _MIB


CUDA = InterferencePlan()
CUDA_SHORT = InterferencePlan(steps=24, rounds=3)
CPU = InterferencePlan(
    slot_bytes=(64 * _KIB, 1024 * _KIB),
    batch=2,
    context_tokens=128,
    steps=4,
    rounds=2,
    area_bytes=16 * _MIB,
    batch_bytes=4 * _MIB,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Something that decodes: `run(steps, stepped)` gives tokens a second, and calls `stepped(tokens)` after a step."""

    name: str
    token_bytes: int
    """Keys and values of one token."""
    run: Callable[[int, Callable[[int], None]], float]
    beside: Callable[[Copier], None]
    """From now on this copier hears of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceCell:
    """One size of slot and rate of copies."""

    slot_bytes: int
    rate: Rate
    quiet_tokens_per_s: float
    storing_tokens_per_s: float
    slowdown: float
    stored_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceResult:
    """What was measured."""

    device: str
    decode: str
    batch: int
    context_tokens: int
    cells: tuple[InterferenceCell, ...]


def plan_for(device: str, *, short: bool) -> InterferencePlan:
    """The sizes that suit a device, as `--device` names it."""
    if not resolve_device(device).startswith("cuda"):
        return CPU
    return CUDA_SHORT if short else CUDA


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """Of `asdict(InterferenceResult)`. The bounds are stated for one H200, at either rate of stores."""
    found = []
    for cell in result["cells"]:
        name = f"{cell['slot_bytes'] // _KIB:,} KiB, {cell['rate']}"
        found += [
            Figure(
                name=f"{name}: slower by",
                value=cell["slowdown"],
                unit="",
                bound=_bound(cell) if result["device"] != "cpu" else None,
            ),
            Figure(name=f"{name}: copied", value=cell["stored_gb_per_s"], unit="GB/s", larger_is_better=True),
        ]
    return found


def _bound(cell: Mapping[str, Any]) -> float | None:
    if cell["rate"] == Rate.LOADING:
        return None
    return 0.03 if cell["slot_bytes"] >= 256 * _KIB else 0.06


def measure(
    plan: InterferencePlan,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    model: str | None = None,
    decode: str = "engine",
) -> InterferenceResult:
    """Measures every cell. Raises: ConfigError for another `decode` than engine and graph; what opening one raises."""
    openers = {"engine": _engine, "graph": _graph}
    if decode not in openers:
        raise ConfigError(f"--decode: {decode!r} is neither engine nor graph")
    name = resolve_device(device)
    # Memory of the copies first: an engine takes what is free.
    with (
        open_bed(plan.area_bytes, device_index=_index(name)) as bed,
        openers[decode](plan, name, model, say) as made,
    ):
        cells = [
            _cell(bed, plan, made, slot_bytes, rate, say) for slot_bytes in plan.slot_bytes for rate in Rate
        ]
    return InterferenceResult(
        device=name,
        decode=made.name,
        batch=plan.batch,
        context_tokens=plan.context_tokens,
        cells=tuple(cells),
    )


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _cell(
    bed: CopyBed,
    plan: InterferencePlan,
    decode: Decode,
    slot_bytes: int,
    rate: Rate,
    say: Callable[[str], None],
) -> InterferenceCell:
    say(f"{decode.name}, slots of {slot_bytes:,} bytes, {rate}")
    copier = bed.copier()
    decode.beside(copier)
    way = Direction.LOAD if rate is Rate.LOADING else Direction.STORE
    offload: Stores = (
        SealedOffload(bed, copier, slot_bytes, decode.token_bytes)
        if rate is Rate.SEALED
        else Offload(bed, copier, slot_bytes, plan.batch_bytes, way)
    )
    rates: list[float] = []

    def storing() -> float:
        offload.start()
        try:
            return decode.run(plan.steps, offload.stepped)
        finally:
            rates.append(offload.stop())

    def quiet() -> float:
        return decode.run(plan.steps, lambda _: None)

    quiets: list[float] = []
    storings: list[float] = []
    # Not counted: all of the host's memory is pinned, by stores of all of it.
    warm_up = Offload(bed, copier, slot_bytes, plan.batch_bytes, way)
    warm_up.start()
    decode.run(plan.steps // 2, warm_up.stepped)
    warm_up.stop()
    for i in range(plan.rounds):
        for side, times in ((quiet, quiets), (storing, storings))[:: 1 if i % 2 else -1]:
            times.append(side())
    copier.close(30.0)
    return InterferenceCell(
        slot_bytes=slot_bytes,
        rate=rate,
        quiet_tokens_per_s=median(quiets),
        storing_tokens_per_s=median(storings),
        slowdown=median([1 - loaded / free for free, loaded in zip(quiets, storings, strict=True)]),
        stored_gb_per_s=median(rates) / 1e9,
    )


def _phases(plan: InterferencePlan) -> int:
    """Steps that all cells take together."""
    cells = len(plan.slot_bytes) * len(Rate)
    return cells * (plan.steps // 2 + 2 * plan.rounds * plan.steps)


@contextmanager
def _engine(
    plan: InterferencePlan, device: str, model: str | None, say: Callable[[str], None]
) -> Iterator[Decode]:
    """The bundled engine with `batch` requests that decode until the end."""
    from engine_adapter.engine.sampler import SamplingParams

    model = model or default_model(device)
    steps = _phases(plan) + 16
    setup = open_bench_engine(
        EnginePlan(
            model=model,
            device=device,
            block_tokens=32,
            chunk_tokens=max(512, 2 * plan.batch),
            max_running=plan.batch,
            cached_tokens=plan.batch * plan.context_tokens,
            filled_tokens=plan.batch * (steps + 64),
        ),
        say,
    )
    engine = setup.engine
    prompt = random_prompt(plan.context_tokens, plan.context_tokens + 1, setup.config.vocab_size)
    params = SamplingParams(max_new_tokens=steps + 32, ignore_eos=True)
    for _ in range(plan.batch):
        engine.add_request(prompt, params)
    for _ in range(8):
        engine.step()

    def run(steps: int, stepped: Callable[[int], None]) -> float:
        start = time.perf_counter()
        count = 0
        for _ in range(steps):
            tokens = sum(len(output.token_ids) for output in engine.step())
            stepped(tokens)
            count += tokens
        taken = time.perf_counter() - start
        if count != plan.batch * steps:
            raise KvstoreError(f"{plan.batch} requests gave {count} tokens in {steps} steps: not all decoded")
        return count / taken

    def hear(copier: Copier) -> None:
        setup.blocks.computed_beside = copier.computing

    yield Decode(
        name=f"engine {model}",
        token_bytes=setup.config.kv_token_bytes(setup.itemsize),
        run=run,
        beside=hear,
    )


@contextmanager
def _graph(
    plan: InterferencePlan,
    device: str,
    model: str | None,  # noqa: ARG001 (its shape is one)
    say: Callable[[str], None],
) -> Iterator[Decode]:
    """Products and reductions that read what a step of an 8B model reads."""
    import torch

    say("drawing what a step reads")
    step, token_bytes = _reading_step(torch.device(device), plan.batch, plan.context_tokens)
    replay = step if device == "cpu" else _captured(step, torch.device(device))

    def run(steps: int, stepped: Callable[[int], None]) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            replay()
            stepped(plan.batch)
        return plan.batch * steps / (time.perf_counter() - start)

    yield Decode(name="graph", token_bytes=token_bytes, run=run, beside=lambda copier: copier.computing(1))


def _captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`step` as a CUDA graph; each replay is waited for, as sampling waits."""
    import torch

    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return replay


def _reading_step(device: torch.device, batch: int, context_tokens: int) -> tuple[Callable[[], None], int]:
    """A step, and the bytes that it reads of one token of context."""
    import torch

    cpu = device.type == "cpu"
    layers, hidden, ffn = (2, 64, 128) if cpu else (32, 4096, 14336)
    dtype = torch.float32 if cpu else torch.bfloat16
    shapes = ((hidden, 3 * hidden // 2), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden))
    weights = [[torch.randn(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(layers)]
    keys = [
        torch.randn(batch * context_tokens, hidden // 2, dtype=dtype, device=device) for _ in range(layers)
    ]
    inputs = [torch.randn(batch, shape[0], dtype=dtype, device=device) for shape in shapes]

    def step() -> None:
        for layer in range(layers):
            keys[layer].amax(dim=0)
            for left, right in zip(inputs, weights[layer], strict=True):
                torch.mm(left, right)

    return step, layers * (hidden // 2) * dtype.itemsize
