"""Write a namespace's blocks into one file, for another machine; the service goes on meanwhile."""

from __future__ import annotations

import asyncio
import functools
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.admin import call_admin, open_client
from kvstore.cli.namespaces import ask, choose
from kvstore.cli.progress import showing
from kvstore.cli.settings import load_settings
from kvstore.errors import AlreadyExists, InvalidArgument, KvstoreError
from kvstore.transfer.export import Exported, export_namespace
from kvstore.transfer.offline import opened_folders
from kvstore.units import format_count, format_duration, format_size

__all__ = ["export"]


def export(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    namespace: Annotated[
        str,
        typer.Option(help="Model, or the first digits of a namespace, as `kvstore namespaces` shows them."),
    ],
    tenant: Annotated[str | None, typer.Option(help="Only namespaces of this tenant.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Read the disks of a service that does not run.")
    ] = False,
    nvme: Annotated[
        list[str] | None, typer.Option(help="Its folders; none: those of the configuration. With --offline.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export a namespace into a file. Exits with 1 where blocks, or a slab, could not be read."""
    if file.exists() and not force:
        raise AlreadyExists(f"{file} exists: choose another name, or overwrite it with --force")
    if nvme and not offline:
        raise InvalidArgument("--nvme names folders of a service that does not run: add --offline")
    with ExitStack() as stack:
        folders = nvme or _configured() if offline else []
        found = stack.enter_context(opened_folders(folders)) if offline else None
        info = choose(ask(socket) if found is None else found.namespaces(), namespace, tenant)
        progress = stack.enter_context(showing("exporting"))
        if found is not None:
            work = found.export(info, file, progress)
        else:
            client = stack.enter_context(open_client(socket))
            admin = functools.partial(call_admin, socket)
            work = export_namespace(client, admin, info, file, progress=progress)
        try:
            done = asyncio.run(work)
        except OSError as error:
            raise KvstoreError(f"cannot write {file}: {error.strerror}") from error
    if as_json:
        print(json.dumps({"file": str(file), "namespace": info.digest.hex(), **asdict(done)}))
    else:
        _show(file, done)
    if done.unread or done.unopened:
        raise typer.Exit(1)


def _configured() -> list[str]:
    return [path.path for path in load_settings().config.serve.nvme]


def _show(file: Path, done: Exported) -> None:
    print(
        f"{format_count(done.blocks)} blocks of {format_size(done.slot_bytes)} in {file}, "
        f"{format_size(done.file_bytes)}, in {format_duration(round(done.seconds))}"
    )
    for count, what in (
        (done.unread, "are there and could not be read, so the file lacks them: `kvstore fsck` finds damage"),
        (done.gone, "left the service before they were read"),
        (done.hbm_only, "are in HBM alone, where only their engine can read them"),
        (done.other_size, "have another size, and were left out"),
    ):
        if count:
            print(f"{format_count(count)} blocks {what}")
    for slab in done.unopened:
        print(f"no block of {slab}")
