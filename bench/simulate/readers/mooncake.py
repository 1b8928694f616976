"""Mooncake's traces: one request a row, `hash_ids` of 512 tokens that name a block with its whole prefix.

The format has no sessions. A request goes on with the session whose last prompt it contains as far as that filled
blocks, if that is more than the first block, which half of all requests share; else it begins one.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.simulate.readers.base import Format, Row
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["MOONCAKE"]

_BLOCK_TOKENS = 512


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, sessions = TraceBuilder(), _Sessions()
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


class _Sessions:
    """Which session a request belongs to, by the block that the last request of each ended with."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._count = 0

    def of(self, ids: list[int], full: int) -> int:
        session = next((self._ends[end] for end in reversed(ids[1:]) if end in self._ends), None)
        if session is None:
            session = self._count
            self._count += 1
        if full > 1:
            self._ends[ids[full - 1]] = session
        return session


def _recognises(row: Row) -> bool:
    return "hash_ids" in row and "chat_id" not in row


MOONCAKE = Format(name="mooncake", recognises=_recognises, read=_read)
