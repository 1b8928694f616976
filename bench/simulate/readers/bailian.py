"""Bailian's format: one request a row, `hash_ids` of 16 tokens, `chat_id` and `parent_chat_id`, `turn`, `type`.

An id names the content of a block alone, so chains are made here. A session is a chat with all that go on from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.simulate.readers.base import Chains, Format, Row
from bench.simulate.readers.fields import ids_of, number_of, tokens_of, whole
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["BAILIAN"]

_BLOCK_TOKENS = 16
_MOST_CHATS = 1 << 62


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, chains = TraceBuilder(), Chains()
    sessions: dict[int, int] = {}
    count = 0
    for row in rows:
        chat, parent = whole(row, "chat_id", 0, _MOST_CHATS), -1
        if "parent_chat_id" in row:
            parent = whole(row, "parent_chat_id", -1, _MOST_CHATS)
        session = sessions.get(parent if parent >= 0 else chat)
        if session is None:
            session = count
            count += 1
        sessions[chat] = session
        builder.add(
            Turn(
                time_ms=round(number_of(row, "timestamp") * 1000),
                ids=chains.ids(ids_of(row, "hash_ids")),
                prompt_tokens=tokens_of(row, "input_length"),
                output_tokens=tokens_of(row, "output_length"),
                session=session,
            )
        )
    return builder.build(name, _BLOCK_TOKENS, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return "hash_ids" in row and "chat_id" in row


BAILIAN = Format(name="bailian", recognises=_recognises, read=_read)
