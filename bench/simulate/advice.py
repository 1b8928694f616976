"""How much DRAM and NVMe is worth buying for a trace: what each size hits and saves, beside what it costs.

A tier that holds the last so many blocks hits what their stack distances say (tail-first LRU). Every block is written
through, so each tier has what those above it have: sizes do not add up, and a disk's hits are those of its own size. A
hit saves what computing its tokens takes, less what copying their KV takes. Time in queues is left out, so under load
more is saved; `kvstore simulate --dram … --nvme …` says how much.

Worth buying is what saves the most: GPU time at its price, less memory at its price spread over some years.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from bench.simulate.hardware import Model
from bench.simulate.optimum import infinite_hit_rate
from bench.simulate.stack import request_hits
from bench.simulate.trace import Trace
from kvstore.units import GIB, format_duration, format_size

__all__ = ["NO_IDS", "Advice", "Prices", "SizeRow", "advise"]

I64 = NDArray[np.int64]

NO_IDS = (
    "The trace has lengths and no ids of blocks: no hit rate can be known from it, nor what DRAM or NVMe would save. "
    "`kvstore record` makes one that has them."
)
_FEWEST_BLOCKS = 8
_YEAR_H = 8766.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In any one currency."""

    gpu_hour: float
    dram_gib: float
    nvme_gib: float
    years: float
    """Over which memory is paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """A cache of one size. Seconds are of a mean request, whose hits all come from the one tier."""

    size_bytes: int
    hit_rate: float
    points_by_doubling: float
    """Hit points more than half of the size has."""
    points_per_gib: float
    """The same, for each GiB that the doubling adds."""
    saved_s_from_dram: float
    saved_s_from_disk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to buy; a size of 0: nothing of that tier."""

    model: str
    dram_bytes: int
    nvme_bytes: int
    saved_s: float
    """Of a mean request with both."""
    infinite_hit_rate: float
    working_set_bytes: int
    """KV of all blocks of the trace."""
    prefill_s: float
    """Of a mean request without hits."""
    rows: Sequence[SizeRow]
    words: Sequence[str]

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """What a mean request is spared and loads with a cache of one size."""

    size_bytes: int
    hit_rate: float
    computing_s: float
    loaded_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    dram: _Size
    disk: _Size
    saved_s: float
    gain_an_hour: float


_NOTHING = _Size(size_bytes=0, hit_rate=0.0, computing_s=0.0, loaded_bytes=0.0)


def advise(trace: Trace, model: Model, prices: Prices) -> Advice:
    """What sizes bring, and which are worth buying. O(requests × sizes + accesses)."""
    block_bytes = model.token_bytes * trace.block_tokens
    working_set = trace.unique_blocks * block_bytes
    computed_s = [model.prefill_s(0, count) for count in trace.prompt_tokens.tolist()]
    bounds = _sizes(block_bytes, working_set)
    hits = request_hits(trace, [size // block_bytes for size in bounds])
    sizes = [_size(trace, model, size, found, computed_s) for size, found in zip(bounds, hits, strict=True)]
    best = max(
        (
            _choice(trace, model, prices, dram, disk)
            for dram in [_NOTHING, *sizes]
            for disk in [_NOTHING, *sizes]
        ),
        key=lambda choice: choice.gain_an_hour,
    )
    return Advice(
        model=model.name,
        dram_bytes=best.dram.size_bytes,
        nvme_bytes=best.disk.size_bytes,
        saved_s=best.saved_s,
        infinite_hit_rate=infinite_hit_rate(trace),
        working_set_bytes=working_set,
        prefill_s=float(np.mean(computed_s)),
        rows=_rows(model, sizes),
        words=_words(trace, model, sizes, best, float(np.mean(computed_s))),
    )


def _sizes(block_bytes: int, working_set: int) -> list[int]:
    """Powers of two, from a few blocks to all."""
    sizes = [1 << (_FEWEST_BLOCKS * block_bytes - 1).bit_length()]
    while sizes[-1] < working_set:
        sizes.append(2 * sizes[-1])
    return sizes


def _size(trace: Trace, model: Model, size: int, found: I64, computed_s: Sequence[float]) -> _Size:
    saved = loaded = 0.0
    tokens = trace.prompt_tokens.tolist()
    for hits, prompt, seconds in zip(found.tolist(), tokens, computed_s, strict=True):
        cached = min(hits * trace.block_tokens, prompt - 1)  # one token is always computed
        if cached > 0:
            saved += seconds - model.prefill_s(cached, prompt)
            loaded += cached * model.token_bytes
    return _Size(
        size_bytes=size,
        hit_rate=float(found.sum()) / max(len(trace.blocks), 1),
        computing_s=saved / len(tokens),
        loaded_bytes=loaded / len(tokens),
    )


def _choice(trace: Trace, model: Model, prices: Prices, dram: _Size, disk: _Size) -> _Choice:
    """What DRAM and a disk of these sizes gain. A disk needs DRAM before it, and gives what the DRAM does not have."""
    hardware = model.hardware
    saved_s = dram.computing_s - dram.loaded_bytes / hardware.copy_bytes_per_s
    if disk.size_bytes > dram.size_bytes:
        saved_s += disk.computing_s - dram.computing_s
        saved_s -= (disk.loaded_bytes - dram.loaded_bytes) / hardware.disk_read_bytes_per_s
    hours = max(float(trace.time_ms[-1] - trace.time_ms[0]) / 3_600_000, 1e-3)
    gpu_hours_an_hour = len(trace) / hours * saved_s * hardware.gpus / 3600
    cost = dram.size_bytes / GIB * prices.dram_gib + disk.size_bytes / GIB * prices.nvme_gib
    gain = gpu_hours_an_hour * prices.gpu_hour - cost / (prices.years * _YEAR_H)
    possible = dram.size_bytes > 0 or disk.size_bytes == 0
    return _Choice(dram=dram, disk=disk, saved_s=saved_s, gain_an_hour=gain if possible else -np.inf)


def _rows(model: Model, sizes: Sequence[_Size]) -> list[SizeRow]:
    rows = []
    for before, size in zip([_NOTHING, *sizes], sizes, strict=False):
        points = 100 * (size.hit_rate - before.hit_rate)
        rows.append(
            SizeRow(
                size_bytes=size.size_bytes,
                hit_rate=size.hit_rate,
                points_by_doubling=points,
                points_per_gib=points / ((size.size_bytes - before.size_bytes) / GIB),
                saved_s_from_dram=size.computing_s - size.loaded_bytes / model.hardware.copy_bytes_per_s,
                saved_s_from_disk=size.computing_s - size.loaded_bytes / model.hardware.disk_read_bytes_per_s,
            )
        )
    return rows


def _words(trace: Trace, model: Model, sizes: Sequence[_Size], best: _Choice, prefill_s: float) -> list[str]:
    dram, disk = best.dram, best.disk
    if not trace.ids_known:
        tokens = f"{trace.prompt_tokens.mean():,.0f}"
        return [
            f"{len(trace):,} prompts of {tokens} tokens. Computed in full, one takes {_time(prefill_s)}.",
            NO_IDS,
        ]
    first = (
        f"{len(trace):,} prompts of {trace.prompt_tokens.mean():,.0f} tokens; {infinite_hit_rate(trace):.1%} of their "
        f"blocks have been there before: more no cache can hit. Computed in full, a prompt takes {_time(prefill_s)}."
    )
    if not dram.size_bytes:
        return [
            first,
            "DRAM: none; what it would save costs less than it does. NVMe: none, it needs DRAM before it.",
        ]
    words = [
        first,
        f"DRAM: {format_size(dram.size_bytes)}. It hits {dram.hit_rate:.1%}; {_doubled(sizes, dram)}.",
    ]
    if disk.size_bytes:
        more = 100 * (disk.hit_rate - dram.hit_rate)
        words.append(
            f"NVMe: {format_size(disk.size_bytes)}, which hits {more:.1f} points more; {_doubled(sizes, disk)}."
        )
    else:
        token_s = model.token_bytes / model.hardware.disk_read_bytes_per_s
        words.append(
            f"NVMe: none for speed; a token's KV takes {_time(token_s)} from a disk, and what DRAM does not have comes "
            "too seldom or is computed as soon. It still brings blocks back after a restart."
        )
    words.append(
        f"Together they save {_time(best.saved_s)} of a mean prompt's {_time(prefill_s)}, queues aside."
    )
    return words


def _doubled(sizes: Sequence[_Size], size: _Size) -> str:
    after = next((other for other in sizes if other.size_bytes == 2 * size.size_bytes), None)
    if after is None:
        return "all blocks fit"
    return f"twice as much would add {100 * (after.hit_rate - size.hit_rate):.1f} points"


def _time(seconds: float) -> str:
    return format_duration(float(f"{seconds:.3g}"))
