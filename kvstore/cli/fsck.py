"""Verify every block of an NVMe path while no service uses it, and mend what can be mended.

Exit codes: 0 nothing is wrong (any more); 1 something is; 2 it could not run, for example because a service has the
path.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.cli.progress import showing
from kvstore.cli.settings import load_settings
from kvstore.config import NvmePath
from kvstore.errors import AlreadyExists, ConfigError, InvalidArgument, KvstoreError
from kvstore.units import format_count, format_duration, format_size, parse_size
from tiers.nvme.directory import lock_existing
from tiers.nvme.fsck import Finding
from tiers.nvme.verify import Examination, examine, mend

__all__ = ["fsck"]

_THREADS = 8
_FOUND, _COULD_NOT = 1, 2
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """One path."""

    found: Examination
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def left(self) -> int:
        """Findings that are not mended."""
        return sum(not finding.mended for finding in self.findings)


def fsck(
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Folders, or folder:size; none: those of the configuration.", show_default=False),
    ] = None,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    threads: Annotated[int, typer.Option(help="Reads at one time.", min=1, max=64)] = _THREADS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify every block of NVMe paths that no service uses."""
    try:
        reports = [_run(path, repairs=repair, threads=threads) for path in _wanted(paths or [])]
    except KvstoreError as error:
        if error.exit_code == _COULD_NOT:
            raise
        print(f"kvstore: {error}", file=sys.stderr)
        raise typer.Exit(_COULD_NOT) from None
    if as_json:
        print(json.dumps({"paths": [_as_dict(report) for report in reports]}, indent=2))
    else:
        for report in reports:
            _show(report)
    if any(report.left for report in reports):
        raise typer.Exit(_FOUND)


@dataclass(frozen=True, slots=True)
class _Wanted:
    folder: Path
    capacity_bytes: int | None


def _wanted(given: Sequence[str]) -> list[_Wanted]:
    """Folders with the size that they may have, as far as it is known."""
    configured: dict[str, NvmePath] = {}
    try:
        configured = {path.path: path for path in load_settings().config.serve.nvme}
    except ConfigError:
        if not given:
            raise
    if not given:
        if not configured:
            raise InvalidArgument("no path is given, and none is configured: kvstore fsck /var/lib/kvstore")
        return [_Wanted(Path(path.path), path.capacity_bytes) for path in configured.values()]
    found = []
    for text in given:
        folder, _, size = text.rpartition(":")
        if folder and not Path(text).exists():
            found.append(_Wanted(Path(folder).absolute(), parse_size(size)))
        else:
            known = configured.get(str(Path(text).absolute()))
            found.append(_Wanted(Path(text).absolute(), known.capacity_bytes if known else None))
    return found


def _run(wanted: _Wanted, *, repairs: bool, threads: int) -> _Report:
    """Raises KvstoreError where the path cannot be looked at."""
    began_s = time.monotonic()
    try:
        lock = lock_existing(wanted.folder)
    except AlreadyExists as error:
        raise ConfigError(f"{error.message}: stop that service first") from None
    try:
        with _progress(wanted.folder) as progress:
            found = examine(
                wanted.folder, capacity_bytes=wanted.capacity_bytes, threads=threads, progress=progress
            )
        findings = mend(found) if repairs and found.findings else found.findings
    except OSError as error:
        raise ConfigError(f"nvme: cannot read {wanted.folder}: {error.strerror}") from error
    finally:
        os.close(lock)
    return _Report(found=found, findings=findings, seconds=time.monotonic() - began_s)


@contextmanager
def _progress(folder: Path) -> Iterator[Callable[[int, int], None]]:
    """A bar for a person, a line now and then for a log."""
    if sys.stderr.isatty():
        with showing(f"verifying {folder}") as progress:
            yield progress
        return
    said_s = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _LINE_EVERY_S:
            said_s = time.monotonic()
            line = f"{folder}: {format_count(done)} of {format_count(total)} blocks"
            print(line, file=sys.stderr, flush=True)

    yield say


def _as_dict(report: _Report) -> dict[str, object]:
    return {
        "path": str(report.found.directory),
        "blocks": len(report.found.records),
        "sound_blocks": report.found.sound_blocks,
        "verified_bytes": report.found.verified_bytes,
        "seconds": round(report.seconds, 3),
        "clean": not report.findings,
        "left": report.left,
        "findings": [
            {
                "trouble": finding.trouble.name.lower(),
                "count": finding.count,
                "places": list(finding.places),
                "text": finding.text,
                "repair": finding.mend,
                "mended": finding.mended,
            }
            for finding in report.findings
        ],
    }


def _show(report: _Report) -> None:
    found = report.found
    rate = format_size(round(found.verified_bytes / max(report.seconds, 1e-9)))
    took = (
        f"{format_size(found.verified_bytes)} read in {format_duration(round(report.seconds, 1))}, {rate}/s"
    )
    print(
        f"{found.directory}: {format_count(found.sound_blocks)} of {format_count(len(found.records))} blocks are "
        f"what was written; {took}"
    )
    if not report.findings:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("what", "where", "count", "repair"):
        table.add_column(header, justify="right" if header == "count" else "left", overflow="fold")
    for finding in report.findings:
        more = ", …" if finding.count > len(finding.places) else ""
        repair = "mended" if finding.mended else finding.mend or "a person has to"
        table.add_row(finding.text, ", ".join(finding.places) + more, format_count(finding.count), repair)
    Console().print(table)
    if report.left:
        hint = (
            ""
            if all(finding.mended or not finding.mend for finding in report.findings)
            else "; --repair mends"
        )
        what = "1 finding is" if report.left == 1 else f"{format_count(report.left)} findings are"
        print(f"{what} left{hint}")
