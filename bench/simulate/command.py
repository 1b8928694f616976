"""Replay a request trace on policies or on the whole store: hit rates, first-token times, bytes moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.output import JsonOption, progress
from bench.simulate.compare import compare
from bench.simulate.options import (
    BlockTokensOption,
    SeedOption,
    SplitOption,
    TraceArgument,
    UsersOption,
    load,
    names_of,
    percents_of,
)
from bench.simulate.plots import draw_curves
from bench.simulate.tables import policies_table

__all__ = ["simulate"]


def simulate(
    trace: TraceArgument,
    *,
    policy: Annotated[
        str, typer.Option("--policy", help="Names of policies, separated by commas.")
    ] = "auto,lru",
    capacity: Annotated[
        str, typer.Option("--capacity", help="Sizes of one cache, in % of the trace's unique blocks.")
    ] = "0.5%,1%,2%,5%,10%,25%",
    users: UsersOption = 64,
    look_ahead: Annotated[
        int, typer.Option("--look-ahead", min=0, help="Waiting requests that policies know.")
    ] = 0,
    block_tokens: BlockTokensOption = None,
    split: SplitOption = None,
    seed: SeedOption = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the curves into FILE.png and FILE.svg.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace on policies or on the whole store."""
    names, percents = names_of(policy, "--policy"), percents_of(capacity)
    with progress() as say:
        requests = load(trace, users=users, seed=seed, block_tokens=block_tokens, split=split, say=say)
        comparison = compare(requests, names, percents, look_ahead, say)
        drawn = draw_curves(comparison, plot) if plot else ()
    if as_json:
        print(json.dumps(comparison.to_json()))
    else:
        Console().print(policies_table(comparison))
    for file in drawn:
        Console(stderr=True).print(f"drawn: {file}")
