"""Measure lookups and copies on this machine, beside what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import lookup as lookup_bench
from bench import store as store_bench
from bench.machine import document
from bench.report import Figure, comparison, read_baseline, write_result
from kvstore.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Short = Annotated[bool, typer.Option("--short", help="Small sizes, a few seconds: shows that it works.")]
_Save = Annotated[bool, typer.Option("--save", help="Store the result as the new baseline in bench/results.")]
_Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where files are made: a folder on the disk to be measured.")
]


@app.command()
def lookup(
    *, as_json: _Json = False, short: _Short = False, save: _Save = False, folder: _Folder = None
) -> None:
    """How long finding and leasing a cached prompt takes, and how many a second, among a million blocks."""
    plan = lookup_bench.SHORT if short else lookup_bench.FULL
    with _status() as say:
        result = lookup_bench.measure(plan, say, _checked(folder)).to_json()
    _finish("lookup", result, _lookup_figures, as_json=as_json, save=save)


@app.command()
def store(
    *, as_json: _Json = False, short: _Short = False, save: _Save = False, folder: _Folder = None
) -> None:
    """How fast blocks move between HBM, DRAM and NVMe, beside plain copies of the same bytes."""
    plan = store_bench.SHORT if short else store_bench.FULL
    with _status() as say:
        legs = store_bench.measure(plan, say, _checked(folder))
    result: Mapping[str, object] = {"legs": [asdict(leg) for leg in legs]}
    _finish("store", result, _store_figures, as_json=as_json, save=save)


def _checked(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is not a folder that exists")
    return folder


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done."""
    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)


def _finish(
    name: str,
    result: Mapping[str, object],
    figures_of: Callable[[Mapping[str, object]], Sequence[Figure]],
    *,
    as_json: bool,
    save: bool,
) -> None:
    """Prints, and stores where that is asked for."""
    stored = read_baseline(name).get("results", {})
    assert isinstance(stored, dict), f"{name}.json holds no results"
    if as_json:
        print(json.dumps(result))
    else:
        baseline = {figure.name: figure.value for figure in figures_of(stored)} if stored else {}
        Console().print(comparison(f"kvstore bench {name}", figures_of(result), baseline))
    if save:
        path = write_result(name, document(result))
        Console(stderr=True).print(f"stored in {path}")


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
