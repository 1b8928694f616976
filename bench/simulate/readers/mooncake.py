"""Mooncake's traces: one request a row, `hash_ids` of 512 tokens that name a block with its whole prefix.

The format has no sessions; they are inferred.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.simulate.readers.base import Conversations, Format, Row
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["MOONCAKE"]

_BLOCK_TOKENS = 512


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, sessions = TraceBuilder(), Conversations()
    for row in rows:
        ids, tokens = row["hash_ids"], int(row["input_length"])
        builder.add(
            Turn(
                time_ms=int(row["timestamp"]),
                ids=ids,
                prompt_tokens=tokens,
                output_tokens=int(row["output_length"]),
                session=sessions.of(ids, tokens // _BLOCK_TOKENS),
            )
        )
    return builder.build(name, _BLOCK_TOKENS, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return "hash_ids" in row and "chat_id" not in row


MOONCAKE = Format(name="mooncake", recognises=_recognises, read=_read)
