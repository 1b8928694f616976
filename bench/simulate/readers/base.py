"""The contract of a trace format, and what readers have in common: rows of a file, and chains made of plain ids,
and sessions where a format names none."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.simulate.trace import Trace
from kvstore.errors import InvalidArgument, MissingExtra

__all__ = ["Chains", "Conversations", "Format", "Row", "rows_of"]

Row = Mapping[str, Any]

_BUFFER_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 31  # the traces are packed with windows that long


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format. `recognises` looks at the first row; `read` takes all rows and the name that the trace shall have.

    `read` raises KeyError or ValueError at a row that is not of the format, before it asks for the next one; the
    caller says which that is.
    """

    name: str
    recognises: Callable[[Row], bool]
    read: Callable[[Iterable[Row], str], Trace]
    default_block_tokens: int | None = None
    """What the trace is coarsened to where nothing else is asked for; None: its own blocks."""


def rows_of(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and object of each line of JSON Lines, plain or with zstd. Raises: InvalidArgument, MissingExtra."""
    if not path.is_file():
        raise InvalidArgument(f"{path} is not a file")
    with _lines_of(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"{path}:{number}: is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise InvalidArgument(f"{path}:{number}: a row is a JSON object, not {type(row).__name__}")
            yield number, row


@contextmanager
def _lines_of(path: Path) -> Iterator[Iterable[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        if path.suffix != ".zst":
            yield file
            return
        try:
            import zstandard
        except ImportError:
            raise MissingExtra(
                "zstandard is needed for .zst and not installed: pip install 'kvstore[sim]'"
            ) from None
        unpacked = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(file)
        try:
            yield io.BufferedReader(unpacked, _BUFFER_BYTES)
        except zstandard.ZstdError as error:
            raise InvalidArgument(f"{path}: is no zstd: {error}") from None


class Chains:
    """Chain ids of sequences whose ids name a block's content alone: the same id behind another prefix is another."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, int | str | bytes], int] = {}

    def ids(self, contents: Iterable[int | str | bytes]) -> list[int]:
        """Chain ids of a sequence of blocks."""
        chain, parent = [], -1
        for content in contents:
            parent = self._known.setdefault((parent, content), len(self._known))
            chain.append(parent)
        return chain


class Conversations:
    """Sessions of requests that name none.

    A request goes on with the session whose last prompt it contains as far as that filled blocks, if that is more than
    the first block, which all that have a system prompt in common share; else it begins one.
    """

    __slots__ = ("_count", "_ends")

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # last full block of a session's last prompt → the session
        self._count = 0

    def of(self, ids: Sequence[int], full: int) -> int:
        """The session of a prompt with these chain ids, the first `full` of which are of full blocks."""
        session = next((self._ends[end] for end in reversed(ids[1:]) if end in self._ends), None)
        if session is None:
            session = self._count
            self._count += 1
        if full > 1:
            self._ends[ids[full - 1]] = session
        return session
