"""The commands that measure copies between HBM and DRAM: alone, every way of small blocks, and beside decode."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console

from bench import copy as copy_bench
from bench import copy_tune
from bench import interference as interference_bench
from bench.machine import document
from bench.output import (
    DeviceOption,
    JsonOption,
    ModelOption,
    OutOption,
    SaveOption,
    ShortOption,
    finish,
    progress,
)
from bench.report import write_result
from kvstore.errors import ConfigError

__all__ = ["copy", "interference"]


def copy(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Try every way of copying small blocks instead, on a CUDA device.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="With --tune: this way alone; more than one.")
    ] = None,
) -> None:
    """How fast the copier moves blocks between HBM and DRAM, beside raw copies of the same bytes."""
    if only and not tune:
        raise ConfigError("--only names what --tune tries: give both")
    if not tune:
        with progress() as say:
            result = asdict(copy_bench.measure(copy_bench.default_plan(short=short), say))
        finish("copy", result, copy_bench.figures, as_json=as_json, save=save, out=out)
        return
    with progress() as say:
        plan = replace(copy_tune.SHORT if short else copy_tune.FULL, names=tuple(only or ()))
        cells = copy_tune.tune(plan, say)
    tried = {"cells": [asdict(cell) for cell in cells]}
    if as_json:
        print(json.dumps(tried))
    else:
        for way in copy_bench.WAYS:
            Console(width=140).print(copy_tune.table(cells, way))
    if out is not None:
        write_result(out.stem, document(tried), out.parent)


def interference(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    device: DeviceOption = "auto",
    model: ModelOption = None,
    decode: Annotated[
        str, typer.Option("--decode", help="`engine`, or `graph`: what a step reads, without the engine.")
    ] = "engine",
) -> None:
    """How much decode slows down while blocks are copied to DRAM: as decode fills them, and without a pause."""
    plan = interference_bench.plan_for(device, short=short)
    with progress() as say:
        result = asdict(interference_bench.measure(plan, say, device=device, model=model, decode=decode))
    finish("interference", result, interference_bench.figures, as_json=as_json, save=save, out=out)
