"""The commands that run an engine (`ttft`, `decode`, `prefill`, `planner`, …), and those over all benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import decode as decode_bench
from bench import guard as guard_bench
from bench import planner as planner_bench
from bench import prefetch as prefetch_bench
from bench import prefill as prefill_bench
from bench import ttft as ttft_bench
from bench.engine_figures import decode_figures, prefill_figures, ttft_figures
from bench.machine import document
from bench.output import (
    DeviceOption,
    FolderOption,
    JsonOption,
    ModelOption,
    OutOption,
    SaveOption,
    ShortOption,
    WorkerOption,
    checked,
    finish,
    progress,
    worker_settings,
)
from bench.plots import draw_folder
from bench.report import write_result
from bench.short import run_all, summary_table
from kvstore.errors import KvstoreError

__all__ = ["decode", "every", "guard", "planner", "plot", "prefetch", "prefill", "ttft"]


def ttft(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
    device: DeviceOption = "auto",
    model: ModelOption = None,
    worker: WorkerOption = None,
) -> None:
    """Time to the first token of long prompts by tier, and from `kill -9` of the engine to its next one.

    With --out what is known is written after each length and tier, and again when all of it is.
    """
    plan = ttft_bench.plan_for(device, short=short)
    with progress() as say:
        found = ttft_bench.measure(
            plan,
            say,
            device=device,
            model=model,
            parent=checked(folder),
            worker=worker_settings(worker),
            keep=_keeping(out),
        )
    finish("ttft", asdict(found), ttft_figures, as_json=as_json, save=save, out=out)


def decode(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    device: DeviceOption = "auto",
    model: ModelOption = None,
    attention: Annotated[
        str, typer.Option("--attention", help="flashinfer: each cell by it too, beside our own kernels.")
    ] = "triton",
) -> None:
    """Tokens a second of decoding, beside the roofline of this device's reads."""
    plan = decode_bench.plan_for(device, short=short)
    with progress() as say:
        found = decode_bench.measure(plan, say, device=device, model=model, attention=attention)
    finish("decode", asdict(found), decode_figures, as_json=as_json, save=save, out=out)


def prefill(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    device: DeviceOption = "auto",
    model: ModelOption = None,
    attention: Annotated[
        str, typer.Option("--attention", help="Who computes it on a GPU: triton or flashinfer.")
    ] = "triton",
) -> None:
    """Tokens a second of prefill, beside this device's rate of matrix products."""
    plan = prefill_bench.plan_for(device, short=short)
    with progress() as say:
        found = prefill_bench.measure(plan, say, device=device, model=model, attention=attention)
    finish("prefill", asdict(found), prefill_figures, as_json=as_json, save=save, out=out)


def planner(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
    device: DeviceOption = "auto",
    worker: WorkerOption = None,
) -> None:
    """Load or recompute: what is chosen, beside all loaded and all computed, over disks of three speeds."""
    with progress() as say:
        found = planner_bench.measure(
            planner_bench.plan_for(device, short=short),
            say,
            device=device,
            parent=checked(folder),
            worker=worker_settings(worker),
            keep=_keeping(out),
        )
    finish("planner", asdict(found), planner_bench.figures, as_json=as_json, save=save, out=out)


def guard(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
    device: DeviceOption = "auto",
    worker: WorkerOption = None,
) -> None:
    """Tiers that harm: DRAM far too small, a disk far too slow, beside an engine without a service."""
    with progress() as say:
        found = guard_bench.measure(
            guard_bench.plan_for(device, short=short),
            say,
            device=device,
            parent=checked(folder),
            worker=worker_settings(worker),
            keep=_keeping(out),
        )
    finish("guard", asdict(found), guard_bench.figures, as_json=as_json, save=save, out=out)


def prefetch(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
    device: DeviceOption = "auto",
    worker: WorkerOption = None,
) -> None:
    """Requests that wait, with their prompts on a slow disk alone: with prefetch and without, by turns."""
    with progress() as say:
        found = prefetch_bench.measure(
            prefetch_bench.plan_for(device, short=short),
            say,
            device=device,
            parent=checked(folder),
            worker=worker_settings(worker),
            keep=_keeping(out),
        )
    finish("prefetch", asdict(found), prefetch_bench.figures, as_json=as_json, save=save, out=out)


def _keeping(out: Path | None) -> Callable[[Mapping[str, object]], None]:
    """Writes what is known so far to `--out`, where there is one."""
    return lambda known: None if out is None else _write(out, known)


def _write(out: Path, result: Mapping[str, object]) -> None:
    write_result(out.stem, document(result), out.parent)


def every(
    *,
    short: ShortOption = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for results, logs and plots.")] = Path(
        "bench-results"
    ),
    folder: FolderOption = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this benchmark; more than one.")
    ] = None,
) -> None:
    """Every benchmark, each in a process of its own with a time limit; the short form takes ten minutes."""
    with progress() as say:
        runs = run_all(out, say, short=short, parent=checked(folder), only=only)
    Console().print(summary_table(runs))
    plot(out)
    if not any(run.succeeded for run in runs):
        raise KvstoreError(f"no benchmark succeeded: {out} has their logs")


def plot(folder: Annotated[Path, typer.Argument(help="Folder that `kvstore bench all` wrote.")]) -> None:
    """Draw the results in a folder; needs matplotlib (the extra `bench`)."""
    drawn = draw_folder(folder)
    if drawn is None:
        print("matplotlib is not installed (pip install 'kvstore[bench]'): results without plots")
    else:
        print(f"drew {', '.join(path.name for path in drawn) or 'nothing'} in {folder}")
