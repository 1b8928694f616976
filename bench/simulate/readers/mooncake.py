"""Mooncake's traces: one request a row, `hash_ids` of 512 tokens that name a block with its whole prefix.

The format has no sessions; they are inferred.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.simulate.readers.base import Conversations, Format, Row
from bench.simulate.readers.fields import ids_of, number_of, once, tokens_of
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["MOONCAKE"]

_BLOCK_TOKENS = 512


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, sessions = TraceBuilder(), Conversations()
    for row in rows:
        ids, tokens = once(ids_of(row, "hash_ids"), "hash_ids"), tokens_of(row, "input_length")
        full = tokens // _BLOCK_TOKENS
        if full > len(ids):
            raise ValueError(
                f"input_length is {tokens:,}, and hash_ids has {len(ids):,} blocks of {_BLOCK_TOKENS}"
            )
        builder.add(
            Turn(
                time_ms=int(number_of(row, "timestamp")),
                ids=ids,
                prompt_tokens=tokens,
                output_tokens=tokens_of(row, "output_length"),
                session=sessions.of(ids, full),
            )
        )
    return builder.build(name, _BLOCK_TOKENS, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return "hash_ids" in row and "chat_id" not in row


MOONCAKE = Format(name="mooncake", recognises=_recognises, read=_read)
