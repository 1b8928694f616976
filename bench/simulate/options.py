"""What the commands on traces have in common: their options, and the trace that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bench.simulate.readers.open import open_trace
from bench.simulate.trace import Pacing, Trace
from bench.simulate.users import play
from kvstore.errors import ConfigError
from kvstore.units import parse_size

__all__ = [
    "BlockTokensOption",
    "SeedOption",
    "SplitOption",
    "TraceArgument",
    "UsersOption",
    "load",
    "names_of",
    "percents_of",
    "rate_of",
]

TraceArgument = Annotated[
    Path, typer.Argument(help="A trace: JSON Lines of any format that is known, plain or .zst.")
]
UsersOption = Annotated[
    int, typer.Option("--users", help="Users who play the sessions of a trace that has such.")
]
BlockTokensOption = Annotated[
    int | None, typer.Option("--block-tokens", help="Tokens a block: a multiple of the trace's own.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the users' order and first moments.")]
SplitOption = Annotated[
    str | None, typer.Option("--split", help="`half:0` or `half:1`: the sessions of one half alone.")
]

_SPLITS = {"half:0": 0, "half:1": 1}


def load(
    path: Path,
    *,
    users: int,
    seed: int,
    block_tokens: int | None,
    split: str | None,
    say: Callable[[str], None],
) -> Trace:
    """The requests of a trace in the order in which they come. Raises: ConfigError, InvalidArgument, MissingExtra."""
    if split is not None and split not in _SPLITS:
        raise ConfigError(f"--split: {split!r} is none of {', '.join(_SPLITS)}")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"--block-tokens: {block_tokens} is no number of tokens")
    say(f"reading {path.name}")
    trace = open_trace(path, block_tokens)
    if split is not None:
        trace = trace.part(_SPLITS[split], 2)
    return play(trace, users, seed=seed) if trace.pacing is Pacing.SESSION else trace


def percents_of(text: str) -> list[float]:
    """`0.5%,1%,5` as numbers. Raises: ConfigError."""
    try:
        percents = [float(part.strip().removesuffix("%")) for part in text.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 < percent <= 100 for percent in percents):
        raise ConfigError(f"--capacity: {text!r} is no list like 0.5%,1%,5% of the trace's unique blocks")
    return percents


def rate_of(text: str, option: str) -> float:
    """`6GB` or `6GB/s` as bytes a second. Raises: ConfigError, InvalidArgument."""
    rate = parse_size(text.removesuffix("/s"))
    if not rate:
        raise ConfigError(f"{option}: {text!r} is no rate")
    return float(rate)


def names_of(text: str, option: str) -> list[str]:
    """`auto,lru` as names, each once. Raises: ConfigError."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(names):
        raise ConfigError(f"{option}: {text!r} is no list like auto,lru")
    return names
