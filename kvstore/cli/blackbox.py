"""Show what the service decided last: also after a crash, or when it does not answer.

Reads the recording out of the memory of a living keeper or daemon; where neither lives, the file that the last keeper
left. Asks nobody, so it works while the daemon hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.settings import load_settings
from kvstore.daemon.blackbox import memory_name, saved_paths
from kvstore.errors import InvalidArgument, NotFound
from kvstore.recorder import Record, describe, read_ring
from kvstore.units import parse_duration

__all__ = ["blackbox"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    """What was found, and where."""

    source: str
    records: list[Record]


def blackbox(
    file: Annotated[Path | None, typer.Argument(help="A recording that a keeper has left.")] = None,
    *,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    last: Annotated[int, typer.Option(help="Show at most so many, the newest.", min=1)] = 10_000,
    since: Annotated[str | None, typer.Option(help="Only what is not older, like 30s or 5m.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the last decisions of the service."""
    path = load_settings({"socket": socket}).config.serve.socket
    found = _read(file) if file is not None else _find(path)
    records = found.records
    if since is not None:
        oldest_us = time.time_ns() // 1000 - round(parse_duration(since) * 1_000_000)
        records = [record for record in records if record.time_us >= oldest_us]
    records = records[-last:]
    if as_json:
        print(json.dumps({"source": found.source, "records": [_as_dict(record) for record in records]}))
        return
    print(f"{len(records)} of {len(found.records)} records from {found.source}")
    for record in records:
        print(_line(record))


def _find(socket_path: str) -> _Recording:
    """The recording of the service on a socket. Raises NotFound."""
    for memory in _memories(memory_name(socket_path)):
        with contextlib.suppress(OSError):  # its process has just ended: there may be another
            return _Recording(source=f"memory ({memory})", records=read_ring(memory.read_bytes()))
    saved = [Path(name) for name in saved_paths(socket_path) if os.path.exists(name)]
    if not saved:
        raise NotFound(f"no service that runs, or has ended, on {socket_path} has left a recording")
    return _read(max(saved, key=lambda path: path.stat().st_mtime_ns))


def _memories(name: str) -> Iterator[Path]:
    """Open descriptors of processes of this user that are the memfd `name`."""
    for process in sorted(_PROC.iterdir()):
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # another user's, or gone
            if b"kvstore" not in (process / "cmdline").read_bytes():
                continue
            for link in (process / "fd").iterdir():
                if os.readlink(link) == f"/memfd:{name} (deleted)":
                    yield link
                    break


def _read(path: Path) -> _Recording:
    try:
        return _Recording(source=str(path), records=read_ring(path.read_bytes()))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def _as_dict(record: Record) -> dict[str, object]:
    event = record.event.name.lower()
    return {
        "number": record.number,
        "time_us": record.time_us,
        "event": event,
        **describe(record),
    }


def _line(record: Record) -> str:
    stamp = datetime.fromtimestamp(record.time_us / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
    fields = " ".join(f"{name}={value}" for name, value in describe(record).items())
    return f"{stamp}Z {record.event.name.lower().replace('_', ' '):<15} {fields}"
