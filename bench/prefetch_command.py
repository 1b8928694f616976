"""The command `kvstore bench prefetch`."""

from __future__ import annotations

from dataclasses import asdict

from bench import prefetch as prefetch_bench
from bench.machine import document
from bench.output import (
    DeviceOption,
    FolderOption,
    JsonOption,
    OutOption,
    SaveOption,
    ShortOption,
    WorkerOption,
    checked,
    finish,
    progress,
    worker_settings,
)
from bench.report import write_result

__all__ = ["prefetch"]


def prefetch(
    *,
    as_json: JsonOption = False,
    short: ShortOption = False,
    save: SaveOption = False,
    out: OutOption = None,
    folder: FolderOption = None,
    device: DeviceOption = "auto",
    worker: WorkerOption = None,
) -> None:
    """Requests that wait, with their prompts on a slow disk alone: with prefetch and without, by turns."""
    with progress() as say:
        found = prefetch_bench.measure(
            prefetch_bench.plan_for(device, short=short),
            say,
            device=device,
            parent=checked(folder),
            worker=worker_settings(worker),
            keep=lambda known: None if out is None else write_result(out.stem, document(known), out.parent),
        )
    finish("prefetch", asdict(found), prefetch_bench.figures, as_json=as_json, save=save, out=out)
