"""Prompts as text (LMCache's agent traces, or any rows with `input`, `session_id` and `timestamp`).

Text is not tokenised: 4 bytes of UTF-8 count as a token, what English has on the average with vocabularies of 100,000
and more. A block is so many bytes from the start of the prompt, so prompts share blocks exactly as far as they share
text; with a tokeniser the end of that may move by a block. No model file is needed, and a megabyte takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.simulate.readers.base import Chains, Format, Row
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["TEXT"]

_BLOCK_TOKENS = 32
_COARSE_TOKENS = 512
_TOKEN_BYTES = 4
_BLOCK_BYTES = _BLOCK_TOKENS * _TOKEN_BYTES


def _read(rows: Iterable[Row], name: str) -> Trace:
    ordered = sorted(rows, key=lambda row: int(row["timestamp"]))
    builder, chains = TraceBuilder(), Chains()
    sessions: dict[str, int] = {}
    start_us = int(ordered[0]["timestamp"]) if ordered else 0
    for row in ordered:
        prompt = row["input"].encode()
        full = len(prompt) // _BLOCK_BYTES * _BLOCK_BYTES
        builder.add(
            Turn(
                time_ms=(int(row["timestamp"]) - start_us) // 1000,
                ids=chains.ids(prompt[at : at + _BLOCK_BYTES] for at in range(0, full, _BLOCK_BYTES)),
                prompt_tokens=-(-len(prompt) // _TOKEN_BYTES),
                output_tokens=-(-len(str(row.get("output", "")).encode()) // _TOKEN_BYTES),
                session=sessions.setdefault(f"{row.get('agent', '')}/{row['session_id']}", len(sessions)),
            )
        )
    return builder.build(name, _BLOCK_TOKENS, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return isinstance(row.get("input"), str) and "session_id" in row


TEXT = Format(name="text", recognises=_recognises, read=_read, default_block_tokens=_COARSE_TOKENS)
