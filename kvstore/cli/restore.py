"""Import a namespace that `kvstore export` wrote into a file.

Its module is not named after it: `import` is a word of the language.
"""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.admin import call_admin, open_client
from kvstore.cli.progress import showing
from kvstore.errors import KvstoreError
from kvstore.transfer.archive import Header
from kvstore.transfer.restore import Imported, check_file, import_file
from kvstore.units import format_count, format_duration, format_size

__all__ = ["restore"]


def restore(
    file: Annotated[Path, typer.Argument(help="File that `kvstore export` wrote.")],
    *,
    replace_key: Annotated[
        bool,
        typer.Option(
            "--replace-key",
            help="Also where this machine has blocks of the namespace under a key of its own: they are given up.",
        ),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only verify the file; needs no service.")] = False,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Import an exported namespace. Exits with 1 where not all of it could be stored."""
    try:
        header, found = _run(file, socket, replace_key=replace_key, check=check)
    except OSError as error:
        raise KvstoreError(f"cannot read {file}: {error.strerror}") from error
    if as_json:
        model = header.parts["model"].decode(errors="replace")
        print(json.dumps({"file": str(file), "model": model, **asdict(found)}))
    else:
        _show(header, found, "whole" if check else "stored")
    if not found.complete or found.damaged or found.no_room:
        raise typer.Exit(1)


def _run(file: Path, socket: str | None, *, replace_key: bool, check: bool) -> tuple[Header, Imported]:
    if check:
        with showing("checking") as progress:
            return asyncio.run(check_file(file, progress=progress))
    admin = functools.partial(call_admin, socket)
    with open_client(socket) as client, showing("importing") as progress:
        return asyncio.run(import_file(client, admin, file, replace_key=replace_key, progress=progress))


def _show(header: Header, found: Imported, what: str) -> None:
    print(
        f"{format_count(found.stored)} blocks of {format_size(header.slot_bytes)} {what}, of model "
        f"{header.parts['model'].decode(errors='replace')}, in {format_duration(round(found.seconds))}"
    )
    for count, words in (
        (found.known, "were there already"),
        (found.damaged, "are damaged and were left out"),
        (found.no_room, "have no room: the tier that would keep them is full of those before"),
        (found.put_out, "were put out again by other blocks"),
        (found.not_durable, "are stored in memory and not on disk"),
    ):
        if count:
            print(f"{format_count(count)} blocks {words}")
    if found.why_not:
        print(found.why_not)
