"""Arrival and lengths alone (Azure's traces of 2023): no block is known to be equal to another, so each is new.

What such a trace can say: the load, first-token times without any hit, bytes that would be written. Not: hit rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bench.simulate.readers.base import Format, Row
from bench.simulate.readers.fields import number_of, tokens_of
from bench.simulate.trace import Pacing, Trace, TraceBuilder, Turn

__all__ = ["LENGTHS"]

_BLOCK_TOKENS = 512


def _read(rows: Iterable[Row], name: str) -> Trace:
    builder, base = TraceBuilder(), 0
    for number, row in enumerate(rows):
        tokens = tokens_of(row, "input_length")
        blocks = tokens // _BLOCK_TOKENS
        builder.add(
            Turn(
                time_ms=int(number_of(row, "timestamp")),
                ids=range(base, base + blocks),
                prompt_tokens=tokens,
                output_tokens=tokens_of(row, "output_length"),
                session=number,
            )
        )
        base += blocks
    return replace(builder.build(name, _BLOCK_TOKENS, Pacing.TRACE), ids_known=False)


def _recognises(row: Row) -> bool:
    return "input_length" in row and "hash_ids" not in row


LENGTHS = Format(name="lengths", recognises=_recognises, read=_read)
