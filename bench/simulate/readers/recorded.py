"""What `kvstore record` writes: a first row that says so, then one request a row with salted hashes of its blocks.

The daemon knows engines, not conversations: sessions are inferred, as in Mooncake's traces.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np

from bench.simulate.readers.base import Conversations, Format, Row
from bench.simulate.readers.fields import MOST_TOKENS, number_of, once, text_of, tokens_of, whole
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn
from eviction.base import Stop

__all__ = ["RECORDED", "VERSION", "header", "row_of"]

VERSION = 1
_STOPS = {stop.name.lower(): stop for stop in Stop}


def header(*, block_tokens: int) -> dict[str, object]:
    """The first row of a recording."""
    return {"kvstore_trace": VERSION, "block_tokens": block_tokens}


def row_of(turn: Turn) -> dict[str, object]:
    """A row of a recording; `ids` are salted hashes, 64 bits each, of blocks with their prefixes."""
    packed = np.asarray(turn.ids, dtype="<i8").tobytes()
    return {
        "time_ms": turn.time_ms,
        "prompt_tokens": turn.prompt_tokens,
        "output_tokens": turn.output_tokens,
        "stop": turn.stop.name.lower(),
        "blocks": base64.b64encode(packed).decode(),
    }


def _read(rows: Iterable[Row], name: str) -> Trace:
    all_rows = iter(rows)
    first = next(all_rows)
    if first["kvstore_trace"] != VERSION:
        raise ValueError(f"a recording of version {first['kvstore_trace']}, not {VERSION}")
    block_tokens = whole(first, "block_tokens", 1, MOST_TOKENS)
    builder, conversations = TraceBuilder(), Conversations()
    for row in all_rows:
        ids = np.frombuffer(base64.b64decode(text_of(row, "blocks"), validate=True), dtype="<i8")
        stop = text_of(row, "stop")
        if stop not in _STOPS:
            raise ValueError(f"stop is {stop!r}, none of {', '.join(_STOPS)}")
        builder.add(
            Turn(
                time_ms=int(number_of(row, "time_ms")),
                ids=ids,
                prompt_tokens=tokens_of(row, "prompt_tokens"),
                output_tokens=tokens_of(row, "output_tokens"),
                session=conversations.of(once(ids.tolist(), "blocks"), len(ids)),
                stop=_STOPS[stop],
            )
        )
    return builder.build(name, block_tokens, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return "kvstore_trace" in row


RECORDED = Format(name="recorded", recognises=_recognises, read=_read)
