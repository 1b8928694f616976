"""Bailian's format: one request a row, `hash_ids` of 16 tokens, `chat_id` and `parent_chat_id`, `turn`, `type`.

An id names the content of a block alone, so chains are made here. A session is a chat with all that go on from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.simulate.readers.base import Chains, Format, Row
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["BAILIAN"]

_BLOCK_TOKENS = 16


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, chains = TraceBuilder(), Chains()
    sessions: dict[int, int] = {}
    count = 0
    for row in rows:
        chat, parent = int(row["chat_id"]), int(row.get("parent_chat_id", -1))
        session = sessions.get(parent if parent >= 0 else chat)
        if session is None:
            session = count
            count += 1
        sessions[chat] = session
        builder.add(
            Turn(
                time_ms=round(float(row["timestamp"]) * 1000),
                ids=chains.ids(row["hash_ids"]),
                prompt_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                session=session,
            )
        )
    return builder.build(name, _BLOCK_TOKENS, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return "hash_ids" in row and "chat_id" in row


BAILIAN = Format(name="bailian", recognises=_recognises, read=_read)
