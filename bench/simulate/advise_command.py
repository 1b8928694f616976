"""Say how much DRAM and NVMe is worth buying for the load in a request trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.output import JsonOption, progress
from bench.simulate.advice import Prices
from bench.simulate.advice import advise as advise_on
from bench.simulate.compare import compare
from bench.simulate.hardware import Hardware, model_of
from bench.simulate.options import (
    BlockTokensOption,
    SeedOption,
    TraceArgument,
    UsersOption,
    load,
    percents_of,
    rate_of,
)
from bench.simulate.plots import check_plot, draw_curves
from bench.simulate.tables import advice_table

__all__ = ["advise"]


def advise(
    trace: TraceArgument,
    *,
    model: Annotated[
        str, typer.Option("--model", help="Shape whose KV and prefill are meant.")
    ] = "llama-3.1-8b",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="H200s that compute a prompt together.")] = 1,
    disk_read: Annotated[
        str, typer.Option("--disk-read", help="What the disk reads, bytes a second.")
    ] = "6GB",
    gpu_price: Annotated[float, typer.Option("--gpu-price", min=0.0, help="Of a GPU for an hour.")] = 2.5,
    dram_price: Annotated[float, typer.Option("--dram-price", min=0.0, help="Of a GiB.")] = 5.0,
    nvme_price: Annotated[float, typer.Option("--nvme-price", min=0.0, help="Of a GiB.")] = 0.1,
    years: Annotated[float, typer.Option("--years", min=0.1, help="Over which memory is paid.")] = 4.0,
    users: UsersOption = 64,
    block_tokens: BlockTokensOption = None,
    seed: SeedOption = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the curve into FILE.png and FILE.svg.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much DRAM and NVMe is worth buying for the load in a request trace."""
    shape = model_of(model, Hardware(gpus=gpus, disk_read_bytes_per_s=rate_of(disk_read, "--disk-read")))
    prices = Prices(gpu_hour=gpu_price, dram_gib=dram_price, nvme_gib=nvme_price, years=years)
    check_plot(plot)
    with progress() as say:
        requests = load(trace, users=users, seed=seed, block_tokens=block_tokens, split=None, say=say)
        say(f"{requests.name}: LRU at all sizes")
        advice = advise_on(requests, shape, prices)
        drawn: tuple[Path, ...] = ()
        if plot:
            comparison = compare(requests, [], percents_of("0.5,1,2,5,10,25,50"), 0, say)
            drawn = draw_curves(comparison, plot, token_bytes=shape.token_bytes)
    if as_json:
        print(json.dumps(advice.to_json()))
    else:
        console = Console()
        if requests.ids_known:
            console.print(advice_table(advice))
        for line in advice.words:
            console.print(line, highlight=False)
    for file in drawn:
        Console(stderr=True).print(f"drawn: {file}")
