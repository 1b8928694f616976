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
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn
from eviction.base import Stop

__all__ = ["CLAUDE_CODE"]

_BLOCK_TOKENS = 64
_COARSE_TOKENS = (
    512  # as the reference figures have it: an eighth of the work, and blocks as engines move them
)
_STOPS = {"tool_use": Stop.TOOL_USE, "end_turn": Stop.END_TURN}

I32 = NDArray[np.int32]


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, base = TraceBuilder(), 0
    for session, row in enumerate(rows):
        if int(row["block_size"]) != _BLOCK_TOKENS:
            raise ValueError(f"block_size is {row['block_size']}, not {_BLOCK_TOKENS}")
        most = 0
        for time_s, request, ids in sorted(_walk(row["requests"], 0.0), key=lambda each: each[0]):
            most = max(most, int(ids.max(initial=0)) + 1)
            builder.add(
                Turn(
                    time_ms=round(time_s * 1000),
                    ids=ids + np.int32(base),
                    prompt_tokens=int(request["in"]),
                    output_tokens=int(request["out"]),
                    session=session,
                    stop=_STOPS.get(request["stop"], Stop.UNKNOWN),
                )
            )
        base += most
    return builder.build(name, _BLOCK_TOKENS, Pacing.SESSION)


def _walk(requests: Iterable[Row], start_s: float) -> Iterator[tuple[float, Row, I32]]:
    """Time from the session's start, row and ids of each request, sub-agents' where their entries stand."""
    prompt = np.empty(0, dtype=np.int32)
    for request in requests:
        if request["type"] == "subagent":
            yield from _walk(request["requests"], start_s + request["t"])
            continue
        runs = [np.arange(first, first + count, dtype=np.int32) for first, count in request["add"]]
        prompt = np.concatenate((prompt[: request["keep"]], *runs))
        yield start_s + request["t"], request, prompt


def _recognises(row: Row) -> bool:
    return "requests" in row and "hash_id_scope" in row


CLAUDE_CODE = Format(
    name="claude-code", recognises=_recognises, read=_read, default_block_tokens=_COARSE_TOKENS
)
