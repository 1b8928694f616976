"""The command `kvstore bench pressure`: which cells of the grid are measured now, and where they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import pressure as pressure_bench
from bench.engine_figures import pressure_figures
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
from bench.pressure_cells import PressureCells
from bench.pressure_plan import Cell, PressurePlan, parse_cell, plan_for
from engine_adapter.engine.device import resolve_device
from kvstore.errors import KvstoreError

__all__ = ["pressure"]

_Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        help="Only this cell, like 8/round_robin/dram, or 8/round_robin/dram/auto by that policy; more than one. "
        "Else all that --out does not have.",
    ),
]
_Within = Annotated[
    float | None,
    typer.Option("--within", help="Begin no cell after so many seconds; ask again for the rest."),
]


def pressure(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
    device: DeviceOption = "auto",
    model: ModelOption = None,
    worker: WorkerOption = None,
    cell: _Cells = None,
    within: _Within = None,
) -> None:
    """Long documents whose KV is 2, 4 and 8 times the HBM, visited again: times and hits by tiers.

    With --out each cell is written as soon as it is there, beside those that the file already has: the grid can be made
    in pieces, and by several processes at once, one a GPU.
    """
    began = time.monotonic()
    plan = plan_for(device, short=short)
    if model is not None:
        plan = replace(plan, model=model)
    settings = worker_settings(worker)
    cells = PressureCells(out, resolve_device(device), _sizes(plan), settings)
    wanted = [parse_cell(text) for text in cell] if cell else _missing(plan, cells)
    with progress() as say:
        measure = partial(
            pressure_bench.measure_cell,
            plan,
            say=say,
            device=device,
            parent=checked(folder),
            worker=settings,
        )
        failures = [
            _measured(cells, chosen, measure)
            for chosen in wanted
            if within is None or time.monotonic() - began < within
        ]
    finish("pressure", cells.result(), pressure_figures, as_json=as_json, save=save)
    if failures and all(failures):
        raise KvstoreError(f"no cell could be measured: {failures[0]}")
    left = len(wanted) - len(failures)
    if left:
        Console(stderr=True).print(f"{left} of {len(wanted)} cells are left: ask again for them")


def _missing(plan: PressurePlan, cells: PressureCells) -> list[Cell]:
    there = cells.measured()
    return [cell for cell in plan.cells if str(cell) not in there]


def _measured(cells: PressureCells, cell: Cell, measure: Callable[[Cell], pressure_bench.CellResult]) -> str:
    """Keeps one cell, or why it could not be measured, which is what it returns: no other is lost by it."""
    found: Mapping[str, Any]
    try:
        found = asdict(measure(cell))
    except KvstoreError as error:
        found = {"cell": str(cell), "error": str(error)}
        Console(stderr=True).print(f"{cell}: {error}", markup=False)
    cells.add(found)
    return str(found.get("error", ""))


def _sizes(plan: PressurePlan) -> dict[str, object]:
    return {name: value for name, value in asdict(plan).items() if name != "cells"}
