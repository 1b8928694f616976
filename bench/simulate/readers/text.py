"""Prompts as text (LMCache's agent traces, or any rows with `input`, `session_id` and `timestamp`).

Text is not tokenised: 4 bytes of UTF-8 count as a token, what English has on the average with vocabularies of 100,000
and more. A block is so many bytes from the start of the prompt, so prompts share blocks exactly as far as they share
text; with a tokeniser the end of that may move by a block. No model file is needed, and a megabyte takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.simulate.readers.base import Chains, Format, Row
from bench.simulate.readers.fields import number_of, text_of
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["TEXT"]

_BLOCK_TOKENS = 32
_COARSE_TOKENS = 512
_TOKEN_BYTES = 4
_BLOCK_BYTES = _BLOCK_TOKENS * _TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    time_us: int
    prompt: bytes
    output_tokens: int
    session: str


def _read_row(row: Row) -> _Request:
    return _Request(
        time_us=int(number_of(row, "timestamp")),
        prompt=text_of(row, "input").encode(),
        output_tokens=-(-len(str(row.get("output", "")).encode()) // _TOKEN_BYTES),
        session=f"{row.get('agent', '')}/{row['session_id']}",
    )


def _read(rows: Iterable[Row], name: str) -> Trace:
    ordered = sorted((_read_row(row) for row in rows), key=lambda request: request.time_us)
    builder, chains = TraceBuilder(), Chains()
    sessions: dict[str, int] = {}
    start_us = ordered[0].time_us if ordered else 0
    for request in ordered:
        prompt = request.prompt
        full = len(prompt) // _BLOCK_BYTES * _BLOCK_BYTES
        builder.add(
            Turn(
                time_ms=(request.time_us - start_us) // 1000,
                ids=chains.ids(prompt[at : at + _BLOCK_BYTES] for at in range(0, full, _BLOCK_BYTES)),
                prompt_tokens=-(-len(prompt) // _TOKEN_BYTES),
                output_tokens=request.output_tokens,
                session=sessions.setdefault(request.session, len(sessions)),
            )
        )
    return builder.build(name, _BLOCK_TOKENS, Pacing.TRACE)


def _recognises(row: Row) -> bool:
    return isinstance(row.get("input"), str) and "session_id" in row


TEXT = Format(name="text", recognises=_recognises, read=_read, default_block_tokens=_COARSE_TOKENS)
