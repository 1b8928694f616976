"""A daemon, a disk of a given speed and engines beside it, for the benchmarks of the planner and of the guard.

All prompts are of one length and asked in turns, and together they are larger than HBM and DRAM: each comes from
the disk, or is computed. The disk is the real one behind the throttle of the service (`nvme_throttle`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kvstore
from bench.asked import Answer, AskedWorker, options_of, spawn_asked
from bench.service import Service, serve_in
from engine_adapter.cli.assembly import model_source
from engine_adapter.engine.device import compute_dtype, resolve_device
from kvstore.geometry import DTYPE_BYTES
from kvstore.units import write_size

__all__ = ["ChoicePlan", "Household", "household"]

_LEAST_EXTENT, _MOST_EXTENT = 1 << 20, 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePlan:
    """Sizes. Those of tiers are in prompts."""

    model: str
    load_format: str
    tokens: int
    prompts: int
    new_tokens: int
    chunk_tokens: int
    samples: int
    """Prompts that are counted, for each engine."""
    hbm_prompts: float = 1.5
    dram_prompts: float = 3.0
    block_tokens: int = 32
    timeout_s: float = 180.0


class Household:
    """Sizes in bytes, the folder of the disk, and how daemons and engines are started over it."""

    def __init__(self, plan: ChoicePlan, folder: Path, device: str, extra: Mapping[str, str]) -> None:
        self.plan = plan
        self.folder = folder
        self._flags = {
            "worker.model": plan.model,
            "worker.load_format": plan.load_format,
            "worker.device": device,
            "worker.block_tokens": str(plan.block_tokens),
            "worker.chunk_tokens": str(plan.chunk_tokens),
            **extra,
        }
        config = model_source(options_of(self._flags).worker).config
        self.slot_bytes = config.page_bytes(plan.block_tokens, DTYPE_BYTES[compute_dtype(device)])
        self.prompt_bytes = plan.tokens // plan.block_tokens * self.slot_bytes
        half = self.prompt_bytes // 2 // _LEAST_EXTENT * _LEAST_EXTENT
        self._extent = min(max(half, _LEAST_EXTENT), _MOST_EXTENT)

    def _of(self, prompts: float) -> int:
        """Bytes of a tier, whole extents."""
        return max(1, -(-int(prompts * self.prompt_bytes) // self._extent)) * self._extent

    @contextmanager
    def daemon(self, *, read_bytes_per_s: int = 0, disk: bool = True) -> Iterator[Service]:
        """A service over the folder. `read_bytes_per_s`: 0, as fast as the disk is."""
        plan = self.plan
        settings = {
            "hbm": write_size(self._of(plan.hbm_prompts) * 2 + _MOST_EXTENT),
            "min_slot": write_size(self.slot_bytes),
            "dram": write_size(self._of(plan.dram_prompts)),
            "dram_extent": write_size(self._extent),
            "orphan_ttl": "1s",
        }
        if disk:
            capacity = self._of(plan.prompts * 5) + (1 << 30)
            settings["nvme"] = f"{self.folder / 'nvme'}:{write_size(capacity)}"
        if read_bytes_per_s:
            settings["nvme_throttle"] = f"read={read_bytes_per_s}"
        with serve_in(self.folder, settings) as service:
            yield service

    @contextmanager
    def engine(self, service: Service | None, name: str, **settings: str) -> Iterator[AskedWorker]:
        """A ready engine; without a service, one that has no cache."""
        flags = {**self._flags, **{f"worker.{key}": value for key, value in settings.items()}}
        flags["worker.hbm"] = write_size(self._of(self.plan.hbm_prompts))
        if service is not None:
            flags["socket"] = str(service.socket)
        with spawn_asked(flags, self.folder / f"{name}.log", self.plan.timeout_s) as engine:
            engine.ready()
            yield engine

    def ask(self, engine: AskedWorker, number: int) -> Answer:
        """The prompt of that number."""
        plan = self.plan
        return engine.ask(tokens=plan.tokens, seed=number, new_tokens=plan.new_tokens)

    def compute(self, count: int, say: Callable[[str], None]) -> list[float]:
        """Has the first `count` prompts computed and written to disk; seconds to the first token of each."""
        times = []
        with self.daemon() as service, self.engine(service, "first") as engine:
            for number in range(count):
                say(f"computing prompt {number + 1} of {count}")
                times.append(self.ask(engine, number).ttft_s)
            self._flush(service)
        return times

    def _flush(self, service: Service) -> None:
        """All that is in DRAM is on disk."""
        with kvstore.connect(service.socket, timeout_s=self.plan.timeout_s) as client:
            client.flush(self.plan.timeout_s)


@contextmanager
def household(
    plan: ChoicePlan, *, device: str, parent: Path | None, extra: Mapping[str, str] | None
) -> Iterator[Household]:
    """In a folder of its own, which is removed."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    try:
        yield Household(plan, folder, resolve_device(device), extra or {})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
