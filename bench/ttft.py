"""`kvstore bench ttft`: time to the first token of a long prompt by where its KV is, and after `kill -9`.

A real daemon and an engine process of random weights. Each prompt is computed once (`recompute`) and asked again
(`hbm`). The HBM of the engine holds one prompt of the longest kind: two of those, asked in turns, put everything else
out of HBM, so what is asked then comes from DRAM (`dram`). For `disk` daemon and engine are started again over the
same files. A sample counts for the tier that at least half of its tokens came from.

What a load from DRAM may take is 1.12 × its bytes at the rate of a plain pinned copy in the same process, and one
decode step. Behind some prefixes from DRAM many new tokens are computed: by the first engine process, which loads in
groups of layers where that pays, and by the second one, which awaits a load as a whole. From `kill -9` of the engine
process to the first token of a new one over HBM that outlived it, each part of the start is listed, and what is left to
KV: the time to the first token less one decode step.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.shapes import default_model
from bench.ttft_behind import BehindRow, LoadWay
from bench.ttft_run import Kill, TtftPlan, TtftRow, TtftRun
from engine_adapter.engine.device import resolve_device
from kvstore.errors import KvstoreError

__all__ = ["CPU", "CUDA", "CUDA_SHORT", "Kill", "TtftPlan", "TtftResult", "TtftRow", "measure", "plan_for"]

CUDA = TtftPlan(
    lengths=(8192, 32768, 131072),
    new_tokens=16,
    samples=5,
    chunk_tokens=8192,
    raw_bytes=4 << 30,
    disk="48GiB",
    behind_lengths=(32768, 131072),
    behind_tokens=4096,
    behind_samples=3,
)
CUDA_SHORT = TtftPlan(
    lengths=(8192, 32768),
    new_tokens=16,
    samples=3,
    chunk_tokens=8192,
    raw_bytes=1 << 30,
    disk="12GiB",
    behind_lengths=(32768,),
    behind_tokens=4096,
    behind_samples=3,
)
CPU = TtftPlan(
    lengths=(256, 1024),
    new_tokens=4,
    samples=2,
    chunk_tokens=256,
    raw_bytes=16 << 20,
    disk="64MiB",
    behind_lengths=(1024,),
    behind_tokens=128,
)
"""Its model has blocks so small that loads are awaited as a whole either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftResult:
    """What was measured; rates in 10^9 bytes a second."""

    model: str
    device: str
    worker: Mapping[str, str]
    """What was set of the engine besides."""
    raw_gb_per_s: float
    rows: tuple[TtftRow, ...]
    behind: tuple[BehindRow, ...]
    kill: Kill
    disk_error: str
    """Why nothing, or not everything, was measured from disk; empty where it was."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is known so far; `TtftResult` when everything is."""

    run: TtftRun
    base: Mapping[str, object]
    raw_bytes_per_s: float = 0.0
    kill: Kill | None = None

    def so_far(self) -> dict[str, object]:
        """As `TtftResult`, without what is not there yet."""
        found = {
            **self.base,
            "raw_gb_per_s": self.raw_bytes_per_s / 1e9,
            "rows": [asdict(row) for row in self.run.rows(self.raw_bytes_per_s)],
            "behind": [asdict(row) for row in self.run.behind.rows()],
            "disk_error": "it was stopped before it had ended",
        }
        return found if self.kill is None else {**found, "kill": asdict(self.kill)}


def plan_for(device: str, *, short: bool) -> TtftPlan:
    """The sizes that suit a device, as `--device` names it."""
    if not resolve_device(device).startswith("cuda"):
        return CPU
    return CUDA_SHORT if short else CUDA


def measure(
    plan: TtftPlan,
    say: Callable[[str], None],
    *,
    device: str = "auto",
    model: str | None = None,
    parent: Path | None = None,
    worker: Mapping[str, str] | None = None,
    keep: Callable[[Mapping[str, object]], None] = lambda _: None,
) -> TtftResult:
    """Runs everything. `worker`: further settings of the engine, by key. `parent`: where files are made.

    `keep` is given what is known after each row, as far as it goes: for who may be stopped by a time limit.

    Raises: ConfigError where the daemon cannot run here, and what daemon and engine raise.
    """
    name, model = resolve_device(device), model or default_model(device)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    try:
        run = TtftRun(
            plan=plan,
            say=say,
            folder=folder,
            model=model,
            device=name,
            extra=dict(worker or {}),
            row_done=lambda: keep(known.so_far()),
        )
        known = _Known(run=run, base={"model": model, "device": name, "worker": dict(worker or {})})
        with run.service():
            with run.engine() as engine:
                known.raw_bytes_per_s = raw = engine.raw_bytes_per_s(plan.raw_bytes)
                run.cold_and_hbm(engine)
                run.dram(engine)
                run.loads_behind(engine, LoadWay.GROUPED)
                killed_at = engine.kill()
            known.kill = kill = run.after_kill(killed_at)
            keep(known.so_far())
            disk_error = ""
            try:
                run.flush()
            except KvstoreError as error:
                disk_error = str(error)
        if not disk_error:
            disk_error = _from_disk(run) or run.disk_shortage
        return TtftResult(
            model=model,
            device=name,
            worker=dict(worker or {}),
            raw_gb_per_s=raw / 1e9,
            rows=tuple(run.rows(raw)),
            behind=tuple(run.behind.rows()),
            kill=kill,
            disk_error=disk_error,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _from_disk(run: TtftRun) -> str:
    """Everything started again over the same files; why that failed. What is known by then is not lost with it."""
    try:
        with run.service(), run.engine() as engine:
            run.disk(engine)
    except KvstoreError as error:
        return str(error)
    return ""
