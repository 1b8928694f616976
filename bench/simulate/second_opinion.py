"""The plain policies beside those of libCacheSim, which knows objects alone: `python -m bench.simulate.second_opinion`.

libCacheSim (PyPI `libcachesim`; `pip install --no-deps libcachesim`, since what it depends on is for traces in S3) is
given each prompt's blocks one after the other, the tail first, but to FIFO, where the head goes first here too. Two
differences are left on purpose: there a prompt's own first blocks may be evicted for its last ones, and a block that is
cached behind a gap counts as a hit. So figures are alike, not equal.
"""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.simulate.readers.open import open_trace
from bench.simulate.replay import replay
from bench.simulate.trace import Pacing, Trace
from bench.simulate.users import play
from eviction.factory import policy_factory

__all__ = ["main"]

_THEIRS = {
    "arc": "ARC",
    "fifo": "FIFO",
    "lru": "LRU",
    "s3fifo": "S3FIFO",
    "sieve": "Sieve",
    "wtinylfu": "WTinyLFU",
}


def main(
    trace: Annotated[Path, typer.Argument(help="As `kvstore simulate` takes it.")],
    capacity: Annotated[str, typer.Option(help="Percent of the unique blocks, comma-separated.")] = "1,5",
    users: Annotated[int, typer.Option(help="Where the trace has sessions.")] = 64,
    requests: Annotated[int, typer.Option(help="The first of the trace alone.")] = 1 << 31,
) -> None:
    """Prints the hit rate of each policy here and there."""
    load = open_trace(trace)
    load = play(load, users) if load.pacing is Pacing.SESSION else load
    load = load.taken(np.arange(min(requests, len(load))))
    print(f"{load.name}: {len(load):,} requests, {len(load.blocks):,} accesses")
    print("| policy | capacity | here | libCacheSim | difference, points |\n|---|--:|--:|--:|--:|")
    for name in _THEIRS:
        for percent in map(float, capacity.split(",")):
            blocks = max(1, int(load.unique_blocks * percent / 100))
            made = policy_factory(name)(rows=load.unique_blocks, capacity_blocks=blocks)
            ours, theirs = replay(load, made, blocks), _theirs(load, name, blocks)
            print(f"| `{name}` | {percent:g} % | {ours:.4f} | {theirs:.4f} | {100 * (ours - theirs):+.2f} |")


def _theirs(trace: Trace, name: str, blocks: int) -> float:
    """Hits in all accesses."""
    try:
        library = importlib.import_module("libcachesim")
    except ImportError:
        sys.exit("libcachesim is not installed: pip install --no-deps libcachesim")
    cache, request, hits = getattr(library, _THEIRS[name])(cache_size=blocks), library.Request(), 0
    request.obj_size = 1
    step = 1 if name == "fifo" else -1
    for low, high in pairwise(trace.offsets.tolist()):
        for block in trace.blocks[low:high][::step].tolist():
            request.obj_id = block
            hits += cache.get(request)
    return hits / max(len(trace.blocks), 1)


if __name__ == "__main__":
    typer.run(main)
