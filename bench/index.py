"""`kvstore bench index`: what the durable index costs in memory and on disk, and how soon a start knows its blocks.

For each number of blocks a folder is made as a daemon would leave it: an index that names them all, in chains of 1,024
blocks of 4 KiB, and slabs of the right length that take no room (a start reads none of them). Then the real daemon is
started over it, and a client of its own, which needs a moment for its 4 prompts in HBM, acquires one after the other
until all blocks are known, and for a while after that: the same calls on the same tables, so that the two p99s compare.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvstore
from bench.blocks import ANSWER_S, SMALL, chains, fill, parts
from bench.calls import Caller
from bench.report import Figure
from bench.service import disk_room, serve_in
from kvstore.client import Client, DeviceSpec, Targets
from kvstore.config import Durability
from kvstore.errors import DeadlineExceeded
from kvstore.layout import Columns, ExtentState, Tier, touch_key
from kvstore.units import MIB, write_size
from tiers.nvme.index import RECORD, SLOT_REF, DurableIndex
from tiers.nvme.slab import SlabFile, stride_bytes

__all__ = ["FULL", "SHORT", "IndexPlan", "IndexResult", "figures", "measure"]

_SLOT_BYTES = 4096
_SLAB_BYTES = 256 * MIB
_CHAIN = 1024
_PROMPTS = 4
_HBM_BYTES = 64 * MIB
_TURN_CALLS = 10
_LEAST_CALLS = 1000
"""Fewer say nothing about a p99."""
_KNOWN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """Sizes of one run."""

    blocks: tuple[int, ...]
    usual_s: float
    """How long calls are timed once all blocks are known."""


FULL = IndexPlan(blocks=(100_000, 1_000_000, 10_000_000), usual_s=5.0)
SHORT = IndexPlan(blocks=(20_000,), usual_s=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexResult:
    """Of one number of blocks."""

    blocks: int
    max_rows: int
    table_bytes: int
    """Shared memory of rows, NVMe slots and the index over them."""
    index_file_bytes: int
    ready_empty_s: float
    """From the start of the process to its first answer that says ready, over an empty folder."""
    ready_s: float
    """The same over all blocks."""
    known_s: float
    """From the start of the process until every block is known."""
    call_p99_ms: float
    """An acquire of 1,024 blocks that HBM has, when all is known."""
    call_p99_ms_meanwhile: float | None
    """The same until then; None where that took too few calls to say."""
    calls_meanwhile: int


def measure(plan: IndexPlan, say: Callable[[str], None], parent: Path | None = None) -> list[IndexResult]:
    """Runs everything. `say` is told what is being done; `parent` is where the folders are made.

    Raises: Unavailable when the daemon does not start, DeadlineExceeded when it does not find its blocks.
    """
    results = []
    for blocks in plan.blocks:
        folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
        try:
            results.append(_measure(folder, blocks, plan.usual_s, say))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return results


def _measure(folder: Path, blocks: int, usual_s: float, say: Callable[[str], None]) -> IndexResult:
    max_rows = blocks + blocks // 8 + 65_536
    slabs = -(-blocks // (_SLAB_BYTES // stride_bytes(_SLOT_BYTES)))
    capacity_bytes = (slabs + 2) * _SLAB_BYTES * 51 // 50 + 64 * MIB
    settings = {
        "max_rows": str(max_rows),
        "hbm": write_size(2 * _HBM_BYTES),
        "min_slot": "4KiB",
        "dram": "64MiB",
        "nvme": "{folder}/nvme:" + write_size(capacity_bytes),
        "nvme_extent": write_size(_SLAB_BYTES),
    }
    say(f"{blocks:,} blocks: an empty start")
    began_s = time.monotonic()
    # It would refuse to promise what the disk has no room for; slabs that are there take none, and are not counted so.
    empty = settings | {"nvme": "{folder}/nvme:" + disk_room(folder, write_size(capacity_bytes))}
    with serve_in(folder, empty):
        ready_empty_s = time.monotonic() - began_s
    say(f"{blocks:,} blocks: writing the index")
    _write(folder / "nvme", blocks)
    say(f"{blocks:,} blocks: starting over it")
    began_s = time.monotonic()
    with serve_in(folder, settings) as service, kvstore.connect(service.socket, timeout_s=ANSWER_S) as client:
        ready_s = time.monotonic() - began_s
        targets = Targets(credit=0, room=0, breaker_s=ANSWER_S)
        with client.attach(
            "bench-index", SMALL, DeviceSpec(hbm_bytes=_HBM_BYTES), targets=targets
        ) as session:
            namespace = session.open_namespace(parts(SMALL, "bench"))
            prompts = chains(namespace.key, _PROMPTS * _CHAIN, _CHAIN, seed=2)
            fill(session, namespace, prompts)
            caller = Caller(session=session, namespace=namespace)
            columns = session.tables.tables.columns
            meanwhile = _calls(caller, prompts, lambda: _entered(columns) >= slabs, _KNOWN_S)
            known_s = time.monotonic() - began_s
            if (known := _known(client, blocks)) < blocks:
                raise DeadlineExceeded(f"only {known:,} of {blocks:,} blocks are known after {known_s:.0f} s")
            usual = _calls(caller, prompts, lambda: False, usual_s)
            return IndexResult(
                blocks=blocks,
                max_rows=max_rows,
                table_bytes=_table_bytes(columns),
                index_file_bytes=(folder / "nvme" / "index" / "data.mdb").stat().st_blocks * 512,
                ready_empty_s=ready_empty_s,
                ready_s=ready_s,
                known_s=known_s,
                call_p99_ms=float(np.percentile(usual, 99)),
                call_p99_ms_meanwhile=(
                    float(np.percentile(meanwhile, 99)) if len(meanwhile) >= _LEAST_CALLS else None
                ),
                calls_meanwhile=len(meanwhile),
            )


def _entered(columns: Columns) -> int:
    """Slabs whose blocks are known, as the shared tables show: a call for it would be felt by the others."""
    of_disk = columns.extent_tier == Tier.NVME
    return int(np.count_nonzero(of_disk & (columns.extent_state == ExtentState.READY)))


def _known(client: Client, wanted: int) -> int:
    """How many are counted: as many as are wanted, or what there are some seconds later."""
    until_s = time.monotonic() + ANSWER_S
    while True:
        known = int(dict(client.stats().counters).get("loaded_blocks", 0))
        if known >= wanted or time.monotonic() >= until_s:
            return known
        time.sleep(0.1)


def _table_bytes(columns: Columns) -> int:
    """What rows, NVMe slots and the index over the rows take of the tables."""
    shared = ("state", "hash", "namespace", "parent", "depth", "touch", "priority", "hbm", "dram", "nvme")
    own = ("tags", "rows", "nvme_changed")
    slots = columns.pool(Tier.NVME)
    total = sum(getattr(columns, name).nbytes for name in shared + own)
    return int(total + slots.state.nbytes + slots.row.nbytes + slots.extent.nbytes)


def _calls(
    caller: Caller, prompts: Sequence[NDArray[np.uint64]], done: Callable[[], bool], limit_s: float
) -> list[float]:
    """Milliseconds of acquires, ten at a time until it is done; at least ten unless it is done before."""
    turn, lengths = cycle(prompts), cycle([_CHAIN])
    times: list[float] = []
    gc.collect()
    gc.disable()
    until_s = time.monotonic() + limit_s  # only now: to collect takes as long as a short limit
    try:
        while not done() and (not times or time.monotonic() < until_s):
            times += caller.call_ms(turn, lengths, _TURN_CALLS)
    finally:
        gc.enable()
    return times


def _write(folder: Path, blocks: int) -> None:
    """Slabs without bytes and the index of what would be in them."""
    per_slab = _SLAB_BYTES // stride_bytes(_SLOT_BYTES)
    index = DurableIndex(folder, map_bytes=max(64 * MIB, blocks * 160), durability=Durability.PROCESS)
    rng = np.random.default_rng(1)
    none = np.empty(0, dtype=SLOT_REF)
    for number, first in enumerate(range(0, blocks, per_slab), start=1):
        count = min(per_slab, blocks - first)
        slab = SlabFile(number=number, slot_bytes=_SLOT_BYTES, nbytes=_SLAB_BYTES)
        with (folder / slab.name).open("wb") as file:
            file.truncate(_SLAB_BYTES)
        index.commit(_records(number, first, count, rng), none)
    index.close()


def _records(slab: int, first: int, count: int, rng: np.random.Generator) -> NDArray[np.void]:
    """RECORD[] of chains, each used once and a second after the one before it."""
    at = np.arange(first, first + count)
    records = np.zeros(count, dtype=RECORD)
    records["slab"], records["slot"], records["length"] = slab, at - first, _SLOT_BYTES
    records["generation"], records["depth"] = 1, at % _CHAIN
    now_ms = time.time_ns() // 1_000_000 - 1_000 * 86_400
    records["touch"] = touch_key(now_ms, records["depth"]) + (
        (at // _CHAIN).astype(np.uint64) << np.uint64(20)
    )
    records["hash"] = rng.integers(1, 1 << 64, size=(count, 2), dtype=np.uint64)
    records["parent"][1:] = records["hash"][:-1]
    records["parent"][records["depth"] == 0] = 0
    records["ns_digest"] = (5, 6)
    return records


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """What is shown, with what a start must reach on two cores."""
    found = []
    for size in result["sizes"]:
        name = f"{size['blocks']:,} blocks"
        found += [
            Figure(name=f"{name}: tables", value=size["table_bytes"] / 1e6, unit="MB"),
            Figure(name=f"{name}: index on disk", value=size["index_file_bytes"] / 1e6, unit="MB"),
            Figure(name=f"{name}: ready", value=size["ready_s"], unit="s"),
            Figure(name=f"{name}: ready, empty", value=size["ready_empty_s"], unit="s"),
            Figure(name=f"{name}: all known", value=size["known_s"], unit="s"),
            Figure(name=f"{name}: since ready", value=size["known_s"] - size["ready_s"], unit="s", bound=5.0),
            Figure(name=f"{name}: acquire p99", value=size["call_p99_ms"], unit="ms"),
        ]
        if size["call_p99_ms_meanwhile"] is not None:
            found.append(
                Figure(
                    name=f"{name}: acquire p99 meanwhile",
                    value=size["call_p99_ms_meanwhile"],
                    unit="ms",
                    bound=2 * size["call_p99_ms"],
                )
            )
    return found
