"""What the commands of `kvstore bench` have in common: their options, a line of progress, and what comes out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.machine import document
from bench.report import Figure, comparison, read_baseline, write_result
from kvstore.errors import ConfigError

__all__ = [
    "DeviceOption",
    "FolderOption",
    "JsonOption",
    "ModelOption",
    "OutOption",
    "SaveOption",
    "ShortOption",
    "WorkerOption",
    "checked",
    "finish",
    "progress",
    "worker_settings",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ShortOption = Annotated[bool, typer.Option("--short", help="Small sizes: shows that it works, soon.")]
SaveOption = Annotated[
    bool, typer.Option("--save", help="Store the result as the new baseline in bench/results.")
]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="Where files are made: a folder on the disk to be measured.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="`cpu`, `cuda:N`, or `auto`: a GPU where there is one.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Shape of the random weights, like llama-3.1-8b.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="File for the machine and the result, as JSON, beside the table.")
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option("--worker", help="A setting of the engine, KEY=VALUE as under [worker]; more than one."),
]


@contextmanager
def progress(*, every_s: float = 0.0) -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error: a line that changes, or in a log one behind the other.

    In a log those are left out that come sooner than `every_s` after one that was not.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        said_s = float("-inf")

        def say(text: str) -> None:
            nonlocal said_s
            if (now_s := time.monotonic()) - said_s >= every_s:
                said_s = now_s
                print(text, file=sys.stderr, flush=True)

        yield say
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def checked(folder: Path | None) -> Path | None:
    """`folder`. Raises: ConfigError where it is not there."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is not a folder that exists")
    return folder


def worker_settings(given: Sequence[str] | None) -> dict[str, str]:
    """Values of `--worker` by key. Raises: ConfigError for one without `=`."""
    settings = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--worker: {text!r} is not KEY=VALUE")
        settings[f"worker.{key}"] = value
    return settings


def finish(
    name: str,
    result: Mapping[str, object],
    figures_of: Callable[[Mapping[str, object]], Sequence[Figure]],
    *,
    as_json: bool,
    save: bool,
    out: Path | None = None,
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
    if out is not None:
        write_result(out.stem, document(result), out.parent)
