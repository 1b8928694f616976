"""Tunes the paged attention kernels on this GPU: `python -m bench.attention_tuning --out FILE`.

Sweeps launch settings over the shapes of Llama-3.1-8B within a time budget, prints the best of each case beside
gather + SDPA and FlashInfer (where it is installed), and the lines for `engine_adapter/engine/attention/tuning.py`.
Kernels are compiled ahead by several processes into Triton's cache, because compiling is most of the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from bench.attention_cases import CASES, Case, Rig, Shape, gather_sdpa, graph_seconds, relative_error
from bench.machine import document
from engine_adapter.engine.attention.flashinfer_paged import FlashInferAttention
from engine_adapter.engine.attention.triton_paged import decode_plan, prefill_plan
from engine_adapter.engine.attention.tuning import KernelConfig, decode_config, prefill_config
from engine_adapter.engine.attention.work_plan import WorkPlan
from kvstore.errors import ConfigError

__all__ = ["main"]

_SHAPE = Shape(heads=32, kv_heads=8, head_dim=128)
_DECODE_WAVES = (2, 4, 6, 8, 12, 16, 32)
_KEEP = 6  # settings of the first decode case that the others are measured with


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting of one case; seconds a layer."""

    case: str
    block_tokens: int
    config: KernelConfig
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The best of a case, the table's setting, and the others; None where one is not there or does not work."""

    case: str
    block_tokens: int
    best: KernelConfig
    best_s: float
    table_s: float
    sdpa_s: float | None
    flashinfer_s: float | None
    error: float | None
    gigabytes_per_s: float
    teraflops_per_s: float


def decode_configs() -> list[KernelConfig]:
    """Settings of decode that differ in what is compiled."""
    return [
        KernelConfig(tile_rows=16, tile_keys=keys, num_warps=warps, num_stages=stages, waves=8)
        for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5))
        if keys * stages <= 384
    ]


def prefill_configs() -> list[KernelConfig]:
    """Settings of chunks that differ in what is compiled."""
    return [
        KernelConfig(tile_rows=rows, tile_keys=keys, num_warps=warps, num_stages=stages, waves=2)
        for rows, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
        if rows * keys <= 64 * 64 * warps // 2 and keys * stages <= 384
    ]


def make_plan(rig: Rig, case: Case, config: KernelConfig | None) -> WorkPlan:
    """An updated plan of `case`; None is the table's setting."""
    if case.rows == 1:
        plan = decode_plan(rig.pool, rig.shape.heads, case.sequences, config)
    else:
        plan = prefill_plan(
            rig.pool, rig.shape.heads, case.sequences, case.sequences * case.rows, config=config
        )
    plan.update(rig.rows, rig.contexts)
    return plan


def _compile_some(block_tokens: int, decode: list[KernelConfig], prefill: list[KernelConfig]) -> None:
    """In a process of its own: run each setting once on a context of one page."""
    rig = Rig(_SHAPE, block_tokens, 256, torch.Generator("cuda").manual_seed(0))
    small = Case(name="", sequences=1, context=256)
    many = Case(name="", sequences=1, context=256, rows=256)
    for case, configs in ((small, decode), (many, prefill)):
        rig.set_case(case)
        for config in configs:
            try:
                rig.attend(make_plan(rig, case, config), 0)
            except OutOfResources:
                continue
    torch.cuda.synchronize()


def compile_ahead(sizes: Iterable[int], workers: int) -> float:
    """Fill Triton's cache; how long it took."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    parts = [
        (size, decode_configs()[part::workers], prefill_configs()[part::workers])
        for size in sizes
        for part in range(workers)
    ]
    with context.Pool(workers) as pool:
        pool.starmap(_compile_some, parts, chunksize=1)
    return time.perf_counter() - start


def sweep(rig: Rig, cases: Iterable[Case], deadline: float) -> list[Measured]:
    """Measure until `deadline` (of perf_counter): all decode settings on the first case, the best of them on others."""
    found: list[Measured] = []
    decode: list[KernelConfig] = []
    for case in cases:
        rig.set_case(case)
        if case.rows > 1:
            waves = (2, 4, 8) if case.rows < 256 else (2,)
            configs = [_with_waves(config, w) for config in prefill_configs() for w in waves]
        elif not decode:
            configs = [_with_waves(config, w) for config in decode_configs() for w in (4, 8, 16)]
        else:
            configs = [_with_waves(config, w) for config in decode for w in _DECODE_WAVES]
        done = [m for config in configs if time.perf_counter() < deadline and (m := _try(rig, case, config))]
        found += done
        if case.rows == 1 and not decode:
            ranked = sorted(done, key=lambda m: m.seconds)
            decode = list(dict.fromkeys(_with_waves(m.config, 0) for m in ranked))[:_KEEP]
    return found


def _with_waves(config: KernelConfig, waves: int) -> KernelConfig:
    return KernelConfig(**{**asdict(config), "waves": waves})


def _try(rig: Rig, case: Case, config: KernelConfig) -> Measured | None:
    try:
        plan = make_plan(rig, case, config)
        seconds = graph_seconds(rig.layer_numbers(), lambda layer: rig.attend(plan, layer))
    except OutOfResources:
        return None
    return Measured(case=case.name, block_tokens=rig.block_tokens, config=config, seconds=seconds)


def compare(rig: Rig, case: Case, found: list[Measured]) -> Compared:
    """The best setting of a case beside the table's and other implementations."""
    rig.set_case(case)
    mine = [m for m in found if m.case == case.name and m.block_tokens == rig.block_tokens]
    table = _try(rig, case, _table_config(rig, case))
    assert table is not None
    best = min([*mine, table], key=lambda m: m.seconds)
    rig.attend(make_plan(rig, case, best.config), 0)
    error = _or_none(lambda: relative_error(rig.out, gather_sdpa(rig, case, 0)))
    return Compared(
        case=case.name,
        block_tokens=rig.block_tokens,
        best=best.config,
        best_s=best.seconds,
        table_s=table.seconds,
        sdpa_s=_or_none(lambda: graph_seconds(rig.layer_numbers(), lambda n: gather_sdpa(rig, case, n))),
        flashinfer_s=_or_none(lambda: _flashinfer_seconds(rig, case)),
        error=error,
        gigabytes_per_s=case.kv_bytes(rig.shape) / best.seconds / 1e9,
        teraflops_per_s=case.flops(rig.shape) / best.seconds / 1e12,
    )


def _table_config(rig: Rig, case: Case) -> KernelConfig:
    shape = rig.shape
    if case.rows == 1:
        return decode_config(shape.head_dim, shape.group, rig.block_tokens, 2, case.sequences)
    return prefill_config(shape.head_dim, shape.group, rig.block_tokens, 2, case.rows)


def _or_none(measure: Callable[[], float]) -> float | None:
    """None, with a line of why, where another implementation is missing or fails: it is not what is measured here."""
    try:
        return measure()
    except (ConfigError, RuntimeError, ValueError) as error:
        print(f"  left out: {str(error).splitlines()[0][:150]}")
        return None


def _flashinfer_seconds(rig: Rig, case: Case) -> float:
    step = FlashInferAttention(rig.pool, rig.shape.heads).plan(rig.batch(case))
    return graph_seconds(rig.layer_numbers(), lambda layer: step.attend(layer, rig.query))


def _us(seconds: float | None) -> str:
    return "       -" if seconds is None else f"{seconds * 1e6:8.1f}"


def _print(compared: Compared) -> None:
    c = compared.best
    print(
        f"{compared.case:24} {compared.block_tokens:4} {_us(compared.best_s)} {_us(compared.table_s)}"
        f" {_us(compared.sdpa_s)} {_us(compared.flashinfer_s)} {compared.gigabytes_per_s:7.0f}"
        f" {compared.teraflops_per_s:6.0f} {compared.error or -1:.1e}  rows={c.tile_rows} keys={c.tile_keys}"
        f" warps={c.num_warps} stages={c.num_stages} waves={c.waves}",
        flush=True,
    )


def main() -> None:
    """Compile, sweep, print, store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    parser.add_argument(
        "--budget-s", type=float, default=90.0, help="seconds for the sweeps, compiling not counted"
    )
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--workers", type=int, default=max(1, min(12, len(os.sched_getaffinity(0)) - 2)))
    options = parser.parse_args()
    compiled_s = compile_ahead(options.block_tokens, options.workers)
    print(f"compiled in {compiled_s:.0f} s; times in µs a layer")
    print("case                     page     best    table gather+SDPA FlashInfer GB/s TFLOP/s error")
    generator = torch.Generator("cuda").manual_seed(1)
    tuned: list[Measured] = []
    results: list[Compared] = []
    for block_tokens in options.block_tokens:
        rig = Rig(_SHAPE, block_tokens, 64 * 4096, generator)
        left = options.budget_s / len(options.block_tokens)
        tuned += sweep(rig, CASES, time.perf_counter() + left)
        for case in CASES:
            results.append(compare(rig, case, tuned))
            _print(results[-1])
        del rig
        torch.cuda.empty_cache()
    if options.out is not None:
        found = {
            "device": torch.cuda.get_device_name(),
            "shape": asdict(_SHAPE),
            "compared": [asdict(c) for c in results],
            "measured": [asdict(m) for m in tuned],
        }
        options.out.write_text(json.dumps(document(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
