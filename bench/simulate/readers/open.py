"""Opens a trace of any format that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.simulate.readers.bailian import BAILIAN
from bench.simulate.readers.base import Format, Row, rows_of
from bench.simulate.readers.claude_code import CLAUDE_CODE
from bench.simulate.readers.lengths import LENGTHS
from bench.simulate.readers.mooncake import MOONCAKE
from bench.simulate.readers.recorded import RECORDED
from bench.simulate.readers.text import TEXT
from bench.simulate.trace import Trace
from kvstore.errors import InvalidArgument

__all__ = ["FORMATS", "open_trace"]

_WRONG = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""What a row that is not of its format ends in: KeyError, ValueError where the reader saw it, else what it led to."""
FORMATS: tuple[Format, ...] = (RECORDED, CLAUDE_CODE, BAILIAN, MOONCAKE, TEXT, LENGTHS)


def open_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Reads a whole trace. `block_tokens`: a multiple of the trace's own; None: what its format is read with.

    Raises: MissingExtra, InvalidArgument with the line that is wrong.
    """
    rows = _Rows(path)
    form = next((form for form in FORMATS if form.recognises(rows.first)), None)
    if form is None:
        known = ", ".join(form.name for form in FORMATS)
        raise InvalidArgument(f"{path}: the first row is of no format that is known ({known})")
    try:
        trace = form.read(iter(rows), path.name.partition(".")[0])
    except _WRONG as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise InvalidArgument(f"{path}:{rows.number}: is no row of a {form.name} trace: {what}") from None
    wanted = block_tokens or form.default_block_tokens
    return trace if wanted is None else trace.coarsened(wanted)


class _Rows:
    """Rows of a file, the first of which is known before; `number` is the line that was read last."""

    def __init__(self, path: Path) -> None:
        self._rest = rows_of(path)
        self.number, self.first = next(self._rest, (0, {}))
        if not self.first:
            raise InvalidArgument(f"{path}: holds no requests")

    def __iter__(self) -> Iterator[Row]:
        yield self.first
        for number, row in self._rest:
            self.number = number
            yield row
