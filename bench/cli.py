"""Measure lookups and copies on this machine, beside what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from bench import lookup as lookup_bench
from bench import store as store_bench
from bench.copy_commands import copy
from bench.output import FolderOption, JsonOption, SaveOption, ShortOption, checked, finish, progress
from bench.report import Figure

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
app.command()(copy)


@app.command()
def lookup(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    folder: FolderOption = None,
) -> None:
    """How long finding and leasing a cached prompt takes, and how many a second, among a million blocks."""
    plan = lookup_bench.SHORT if short else lookup_bench.FULL
    with progress() as say:
        result = lookup_bench.measure(plan, say, checked(folder)).to_json()
    finish("lookup", result, _lookup_figures, as_json=as_json, save=save)


@app.command()
def store(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    folder: FolderOption = None,
) -> None:
    """How fast blocks move between HBM, DRAM and NVMe, beside plain copies of the same bytes."""
    plan = store_bench.SHORT if short else store_bench.FULL
    with progress() as say:
        legs = store_bench.measure(plan, say, checked(folder))
    result: Mapping[str, object] = {"legs": [asdict(leg) for leg in legs]}
    finish("store", result, _store_figures, as_json=as_json, save=save)


def _lookup_figures(result: Mapping[str, Any]) -> list[Figure]:
    """What must be reached is stated for a quiet machine with two cores."""
    bounds = {"match_ms": {"1024": 0.5, "4096": 1.0}, "call_ms": {"1024": 2.0, "4096": 4.0}}
    figures = [
        Figure(name=f"{key} {blocks}", value=value, unit="ms", bound=bounds[key][blocks])
        for key in bounds
        for blocks, value in result[key].items()
    ]
    figures += [
        Figure(name=f"{key} {blocks}, random keys", value=value, unit="ms")
        for key in bounds
        for blocks, value in result["random"][key].items()
    ]
    figures.append(Figure(name="call p99, storing too", value=result["storing"]["call_p99_ms"], unit="ms"))
    for key, unit, bound in (
        ("call_p99_ms_loaded", "ms", 10.0),
        ("scale_ratio_10k_to_10m", "", 2.0),
        ("index_bytes_per_block", "B", 128.0),
        ("calls_per_s_8_clients", "/s", None),
        ("matches_per_s_8_clients", "/s", None),
    ):
        figures.append(
            Figure(name=key, value=result[key], unit=unit, bound=bound, larger_is_better=unit == "/s")
        )
    return figures


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
