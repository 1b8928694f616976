"""Traces for tests of the simulator: excerpts beside this file, whole ones where a checkout has them, random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

DATA = Path(__file__).parent / "data"
WHOLE = Path(__file__).parents[4] / "shared" / "data" / "traces"


def whole(name: str) -> Path:
    """A whole trace, which is too large to be committed."""
    path = WHOLE / f"{name}.jsonl.zst"
    if not path.is_file():
        pytest.skip(f"{name} is not beside this checkout (../shared/data/traces)")
    return path


def trace_of(chains: Sequence[Sequence[int]], times_ms: Sequence[int] | None = None) -> Trace:
    """A trace of these chains of ids, each a session of its own."""
    builder = TraceBuilder()
    for number, chain in enumerate(chains):
        builder.add(
            Turn(
                time_ms=times_ms[number] if times_ms else 1000 * number,
                ids=chain,
                prompt_tokens=16 * len(chain),
                output_tokens=4,
                session=number,
            )
        )
    return builder.build("made", 16, Pacing.TRACE)


def random_chains(requests: int, seed: int, *, most: int = 6, width: int = 3) -> list[list[int]]:
    """Chains in a random tree: an id names its prefix, as in every trace."""
    rng = random.Random(seed)
    known: dict[tuple[int, ...], int] = {}
    chains = []
    for _ in range(requests):
        path: tuple[int, ...] = ()
        chain = []
        for _ in range(rng.randint(1, most)):
            path = (*path, rng.randrange(width))
            chain.append(known.setdefault(path, len(known)))
        chains.append(chain)
    return chains
