"""Measure lookups and copies on this machine, beside what is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from bench import engine_commands
from bench import index as index_bench
from bench import lookup as lookup_bench
from bench import nvme as nvme_bench
from bench import store as store_bench
from bench.copy_commands import copy, interference
from bench.output import (
    FolderOption,
    JsonOption,
    OutOption,
    SaveOption,
    ShortOption,
    checked,
    finish,
    progress,
)
from bench.pressure_command import pressure
from bench.report import Figure

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
app.command()(copy)
app.command()(interference)
app.command()(engine_commands.prefetch)
app.command()(engine_commands.ttft)
app.command()(engine_commands.decode)
app.command()(engine_commands.prefill)
app.command()(pressure)
app.command()(engine_commands.planner)
app.command()(engine_commands.guard)
app.command("all")(engine_commands.every)
app.command()(engine_commands.plot)


@app.command()
def lookup(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
) -> None:
    """How long finding and leasing a cached prompt takes, and how many a second, among a million blocks."""
    plan = lookup_bench.SHORT if short else lookup_bench.FULL
    with progress() as say:
        result = lookup_bench.measure(plan, say, checked(folder)).to_json()
    finish("lookup", result, _lookup_figures, as_json=as_json, save=save, out=out)


@app.command()
def store(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
) -> None:
    """How fast blocks move between HBM, DRAM and NVMe, beside plain copies of the same bytes."""
    plan = store_bench.SHORT if short else store_bench.FULL
    with progress() as say:
        legs = store_bench.measure(plan, say, checked(folder))
    result: Mapping[str, object] = {"legs": [asdict(leg) for leg in legs]}
    finish("store", result, _store_figures, as_json=as_json, save=save, out=out)


@app.command()
def nvme(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
) -> None:
    """How fast, and for how much processor time, blocks move between DRAM and NVMe, beside a plain O_DIRECT loop."""
    plan = nvme_bench.SHORT if short else nvme_bench.FULL
    with progress() as say:
        found = nvme_bench.measure(plan, say, checked(folder))
    finish("nvme", asdict(found), nvme_bench.figures, as_json=as_json, save=save, out=out)


@app.command()
def index(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
) -> None:
    """How much memory and disk the index of NVMe blocks takes, and how soon a start knows up to ten million of them."""
    plan = index_bench.SHORT if short else index_bench.FULL
    with progress() as say:
        found = index_bench.measure(plan, say, checked(folder))
    result: Mapping[str, object] = {"sizes": [asdict(size) for size in found]}
    finish("index", result, index_bench.figures, as_json=as_json, save=save, out=out)


_TWO_CORES = {"match_ms 1024": 0.5, "match_ms 4096": 1.0, "call_ms 1024": 2.0, "call_ms 4096": 4.0}
_MANY_CORES = {
    "match_ms 1024": 0.4,
    "call_ms 1024": 1.0,
    "matches_per_s_8_clients": 10_000.0,
    "control plane, ms": 5.0,
}
_MANY = 16
"""From so many cores on, what is stated for the GPU's machine must be reached; else for a quiet one of two."""


def _lookup_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Those that a result has: older ones lack some."""
    bounds = _MANY_CORES if len(os.sched_getaffinity(0)) >= _MANY else _TWO_CORES
    bounds = bounds | {
        "call_p99_ms_loaded": 10.0,
        "scale_ratio_10k_to_10m": 2.0,
        "index_bytes_per_block": 128.0,
    }
    values = {
        f"{key} {blocks}{suffix}": value
        for suffix, found in (("", result), (", random keys", result["random"]))
        for key in ("match_ms", "call_ms")
        for blocks, value in found[key].items()
    }
    values["call p99, storing too"] = result["storing"]["call_p99_ms"]
    values |= {key: value for key, value in result.items() if isinstance(value, float)}
    if control := result.get("control_plane"):
        values |= {
            "control plane, ms": control["total_ms"],
            "hash, ms": control["hash_ms"],
            "hash in Python, ms": control["hash_python_ms"],
        }
    return [_lookup_figure(name, value, bounds.get(name)) for name, value in values.items()]


def _lookup_figure(name: str, value: float, bound: float | None) -> Figure:
    if "_per_s" in name:
        return Figure(name=name, value=value, unit="/s", bound=bound, larger_is_better=True)
    unit = "ms" if "ms" in name or "p99" in name else "B" if "bytes" in name else ""
    return Figure(name=name, value=value, unit=unit, bound=bound)


def _store_figures(result: Mapping[str, Any]) -> list[Figure]:
    figures = []
    for leg in result["legs"]:
        figures += [
            Figure(name=leg["leg"], value=leg["gb_per_s"], unit="GB/s", larger_is_better=True),
            Figure(
                name=f"{leg['leg']} / plain", value=leg["ratio"], unit="", bound=0.9, larger_is_better=True
            ),
        ]
    return figures
