"""Replay a request trace on policies or on the whole store: hit rates, first-token times, bytes moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.output import JsonOption, progress
from bench.simulate.advice import NO_IDS
from bench.simulate.compare import Comparison, compare
from bench.simulate.hardware import Hardware, Model, model_of
from bench.simulate.options import (
    BlockTokensOption,
    SeedOption,
    SplitOption,
    TraceArgument,
    UsersOption,
    load,
    names_of,
    percents_of,
    rate_of,
)
from bench.simulate.outcome import StoreOutcome, TierBytes, serve
from bench.simulate.plots import check_plot, draw_curves
from bench.simulate.progress import Progress
from bench.simulate.tables import policies_table, store_table
from bench.simulate.trace import Trace
from eviction.factory import policy_factory
from kvstore.units import parse_size

__all__ = ["simulate"]

_CAPACITIES = "0.5%,1%,2%,5%,10%,25%"
_RATES = "One cache alone: "
_STORE = "The whole store: "


def simulate(
    trace: TraceArgument,
    *,
    policy: Annotated[
        str, typer.Option("--policy", help="Names of eviction policies, separated by commas.")
    ] = "auto,lru",
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity", help=f"{_RATES}its sizes, in % of the trace's unique blocks [{_CAPACITIES}]."
        ),
    ] = None,
    look_ahead: Annotated[
        int, typer.Option("--look-ahead", min=0, help=f"{_RATES}waiting requests that policies know.")
    ] = 0,
    dram: Annotated[str | None, typer.Option("--dram", help=f"{_STORE}DRAM, like 64GiB.")] = None,
    nvme: Annotated[str | None, typer.Option("--nvme", help=f"{_STORE}disk, like 2TiB.")] = None,
    hbm: Annotated[str, typer.Option("--hbm", help=f"{_STORE}HBM for KV.")] = "64GiB",
    model: Annotated[
        str, typer.Option("--model", help="Shape whose KV and prefill are simulated.")
    ] = "llama-3.1-8b",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help=f"{_STORE}H200s, as one.")] = 1,
    speed: Annotated[
        float,
        typer.Option("--speed", min=1e-6, help=f"{_STORE}requests come so many times as fast as recorded."),
    ] = 1.0,
    disk_read: Annotated[str, typer.Option("--disk-read", help=f"{_STORE}bytes a second.")] = "6GB",
    disk_write: Annotated[str, typer.Option("--disk-write", help=f"{_STORE}bytes a second.")] = "3GB",
    users: UsersOption = 64,
    block_tokens: BlockTokensOption = None,
    split: SplitOption = None,
    seed: SeedOption = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help=f"{_RATES}draw the curves into FILE.png and FILE.svg.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace on policies or on the whole store."""
    tiers = _tiers(hbm, dram, nvme)
    names = names_of(policy, "--policy")
    for name in names:
        policy_factory(name)  # one that is not there is said before hours of work
    percents = percents_of(capacity or _CAPACITIES) if capacity or tiers is None else None
    hardware = Hardware(
        gpus=gpus,
        disk_read_bytes_per_s=rate_of(disk_read, "--disk-read"),
        disk_write_bytes_per_s=rate_of(disk_write, "--disk-write"),
    )
    shape = model_of(model, hardware)
    check_plot(plot)
    with progress() as say:
        requests = load(trace, users=users, seed=seed, block_tokens=block_tokens, split=split, say=say)
        comparison = compare(requests, names, percents, look_ahead, say) if percents else None
        outcomes = _serve(requests, shape, tiers, names, speed, say) if tiers else []
        drawn = draw_curves(comparison, plot, token_bytes=shape.token_bytes) if plot and comparison else ()
    if not requests.ids_known:
        Console(stderr=True).print(NO_IDS)
    _print(comparison, outcomes, as_json=as_json)
    for file in drawn:
        Console(stderr=True).print(f"drawn: {file}")


def _tiers(hbm: str, dram: str | None, nvme: str | None) -> TierBytes | None:
    """None where the store is not asked for."""
    if dram is None and nvme is None:
        return None
    return TierBytes(hbm=parse_size(hbm), dram=parse_size(dram or "0"), nvme=parse_size(nvme or "0"))


def _serve(
    trace: Trace, model: Model, tiers: TierBytes, names: list[str], speed: float, say: Callable[[str], None]
) -> list[StoreOutcome]:
    return [
        serve(trace, model, tiers, name, speed, Progress(f"{trace.name}: the store with {name}", say).done)
        for name in names
    ]


def _print(comparison: Comparison | None, outcomes: list[StoreOutcome], *, as_json: bool) -> None:
    if as_json:
        found = comparison.to_json() if comparison else {}
        stores = {"store": [outcome.to_json() for outcome in outcomes]} if outcomes else {}
        print(json.dumps(found | stores))
        return
    if comparison and comparison.trace.ids_known:
        Console().print(policies_table(comparison))
    if outcomes:
        Console().print(store_table(outcomes))
