"""What a member is told of a step, as packed int32: which tokens of which requests, and their block tables.

A request is a number for as long as it is in consecutive launches. Of its block table only what is new is sent, and all
of it where it was preempted. An `UNKNOWN` token is the one that the member's own launch before chose.
"""

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import RequestId
from engine_adapter.engine.request import Chunk, Request

__all__ = ["PREPARE", "StepReader", "StepWriter", "Table", "receive", "same_numbers", "send"]

_HEADER_INTS = 3  # chunks, tokens, pages; no chunk: prepare
_CHUNK_INTS = 7  # number, preemptions, start, end, whether it samples, pages that the member has, pages
PREPARE = np.zeros(_HEADER_INTS, np.int32)
"""The message that asks to prepare."""


Table = NDArray[np.int32]


def same_numbers(table: Table) -> Table:
    """A block table of pages that have the same number in every process."""
    return table


@dataclass(slots=True)
class _Known:
    """What a member knows of a request that was in the launch before."""

    number: int
    preemptions: int
    pages: int


class StepWriter:
    """Of the process that schedules."""

    def __init__(self, numbers_of: Callable[[Table], Table] = same_numbers) -> None:
        """`numbers_of`: of pages of this process, what they are called in all of them."""
        self._numbers_of = numbers_of
        self._next = itertools.count()
        self._known: dict[Request, _Known] = {}

    def encode(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        """The message of one launch. One for each launch, in their order."""
        heads, parts, known = [], [], {}
        for c, table in zip(chunks, tables, strict=True):
            preemptions = c.request.num_preemptions
            before = self._known.get(c.request) or _Known(next(self._next), preemptions, 0)
            had = before.pages if before.preemptions == preemptions else 0
            heads.append((before.number, preemptions, c.start, c.end, int(c.samples), had, len(table)))
            parts.append(table[had:])
            known[c.request] = _Known(before.number, preemptions, len(table))
        self._known = known
        tokens = np.concatenate([np.array(c.request.tokens[c.start : c.end], np.int32) for c in chunks])
        pages = self._numbers_of(np.concatenate(parts))
        header = np.array([len(chunks), len(tokens), len(pages)], np.int32)
        return np.concatenate([header, np.array(heads, np.int32).ravel(), tokens, pages])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A launch as a member sees it."""

    chunks: list[Chunk]
    tables: list[Table]


class _TokensFrom(list[int]):
    """A request's tokens of which only those from `start` on are known; only they may be read."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        super().__init__(tokens)
        self._start = start

    def __len__(self) -> int:
        return self._start + super().__len__()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return super().__getitem__(slice(index.start - self._start, index.stop - self._start))
        return super().__getitem__(index - self._start)


class StepReader:
    """Of a member."""

    def __init__(self, pages_of: Callable[[Table], Table] = same_numbers) -> None:
        """`pages_of`: of what pages are called in all processes, those of this one."""
        self._pages_of = pages_of
        self._known: dict[int, tuple[Request, Table]] = {}  # of the launch before

    def decode(self, message: NDArray[np.int32]) -> Step:
        """The launch of one message."""
        num_chunks, num_tokens, _ = message[:_HEADER_INTS].tolist()
        body = message[_HEADER_INTS:]
        heads = body[: num_chunks * _CHUNK_INTS].reshape(num_chunks, _CHUNK_INTS).tolist()
        tokens = body[num_chunks * _CHUNK_INTS :][:num_tokens]
        pages = self._pages_of(body[num_chunks * _CHUNK_INTS + num_tokens :])
        chunks, known = [], {}
        for number, preemptions, start, end, samples, had, count in heads:
            request, table = self._known.get(number) or (_request(number), pages[:0])
            request.num_preemptions = preemptions
            mine, tokens = np.split(tokens, [end - start])
            request.tokens = _TokensFrom(start, mine.tolist() if samples else [*mine.tolist(), 0])
            chunks.append(Chunk(request=request, start=start, end=end))
            new, pages = np.split(pages, [count - had])
            known[number] = (request, np.concatenate([table[:had], new]) if len(new) else table)
        self._known = known
        return Step(chunks=chunks, tables=[table for _, table in known.values()])


def _request(number: int) -> Request:
    return Request(id=RequestId(str(number)), tokens=[], num_prompt=0)


def send(connection: socket.socket, message: NDArray[np.int32]) -> None:
    """Send a message. OSError when the other side has gone."""
    connection.sendall(message.tobytes())


def receive(connection: socket.socket) -> NDArray[np.int32] | None:
    """The next message; None when the other side has gone."""
    header = _receive_exactly(connection, _HEADER_INTS)
    if header is None:
        return None
    num_chunks, num_tokens, num_pages = header.tolist()
    body = _receive_exactly(connection, num_chunks * _CHUNK_INTS + num_tokens + num_pages)
    return None if body is None else np.concatenate([header, body])


def _receive_exactly(connection: socket.socket, count: int) -> NDArray[np.int32] | None:
    data = bytearray(4 * count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return np.frombuffer(data, np.int32)
