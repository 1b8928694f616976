"""Sessions of Claude Code: one session a row, ids of 64 tokens that compare within the row, packed as differences.

A sub-agent's requests count from the time of its entry and share the ids of their session. A prompt repeats the first
`keep` ids of the one before in its list, then has the runs `add`. Ids name a block with its prefix; only full blocks
have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from bench.simulate.readers.base import Format, Row
from bench.simulate.readers.fields import (
    MOST_TOKENS,
    list_of,
    number_of,
    text_of,
    tokens_of,
    whole,
    whole_number,
)
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn
from eviction.base import Stop

__all__ = ["CLAUDE_CODE"]

_BLOCK_TOKENS = 64
_COARSE_TOKENS = (
    512  # as the reference figures have it: an eighth of the work, and blocks as engines move them
)
_STOPS = {"tool_use": Stop.TOOL_USE, "end_turn": Stop.END_TURN}

_MOST_IDS = (1 << 31) - 1

I32 = NDArray[np.int32]


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, base = TraceBuilder(), 0
    for session, row in enumerate(rows):
        if whole(row, "block_size", 1, MOST_TOKENS) != _BLOCK_TOKENS:
            raise ValueError(f"block_size is {row['block_size']}, not {_BLOCK_TOKENS}")
        most = 0
        for time_s, request, ids in sorted(_walk(list_of(row, "requests"), 0.0), key=lambda each: each[0]):
            most = max(most, int(ids.max(initial=0)) + 1)
            if base + most > _MOST_IDS:
                raise ValueError(f"its ids and those of the sessions before it are more than {_MOST_IDS:,}")
            builder.add(
                Turn(
                    time_ms=round(time_s * 1000),
                    ids=ids + np.int32(base),
                    prompt_tokens=tokens_of(request, "in"),
                    output_tokens=tokens_of(request, "out"),
                    session=session,
                    stop=_stop_of(request),
                )
            )
        base += most
    return builder.build(name, _BLOCK_TOKENS, Pacing.SESSION)


def _walk(requests: Iterable[Row], start_s: float) -> Iterator[tuple[float, Row, I32]]:
    """Time from the session's start, row and ids of each request, sub-agents' where their entries stand."""
    prompt = np.empty(0, dtype=np.int32)
    for request in requests:
        if request["type"] == "subagent":
            yield from _walk(list_of(request, "requests"), start_s + number_of(request, "t"))
            continue
        prompt = np.concatenate((prompt[: whole(request, "keep", 0, len(prompt))], *_runs(request)))
        if (np.diff(prompt) <= 0).any() and len(np.unique(prompt)) < len(prompt):
            raise ValueError("a prompt has a block twice")
        yield start_s + number_of(request, "t"), request, prompt


def _runs(request: Row) -> Iterator[I32]:
    """The ids that a prompt has anew. Looked at before they are made: a count that is wrong fills the memory."""
    most = tokens_of(request, "in") // _BLOCK_TOKENS + 1
    for run in list_of(request, "add"):
        if not isinstance(run, list) or len(run) != 2:
            raise ValueError(f"add has {run!r:.40}, not a first id and a count")
        first, count = (whole_number(value, "add", 0, _MOST_IDS) for value in run)
        if count > most or first + count > _MOST_IDS:
            raise ValueError(
                f"add has {count:,} ids from {first:,} on, in a prompt of {request['in']:,} tokens"
            )
        yield np.arange(first, first + count, dtype=np.int32)


def _stop_of(request: Row) -> Stop:
    return Stop.UNKNOWN if request["stop"] is None else _STOPS.get(text_of(request, "stop"), Stop.UNKNOWN)


def _recognises(row: Row) -> bool:
    return "requests" in row and "hash_id_scope" in row


CLAUDE_CODE = Format(
    name="claude-code", recognises=_recognises, read=_read, default_block_tokens=_COARSE_TOKENS
)
