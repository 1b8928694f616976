"""What a member is told of a step, as packed int32: which tokens of which requests, and their block tables.

A request is a number for as long as it is in consecutive launches. Then a message is all that a member's runner needs:
an `UNKNOWN` token is the one that its own launch before chose.
"""

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.base import RequestId
from engine_adapter.engine.request import Chunk, Request

__all__ = ["PREPARE", "StepReader", "StepWriter", "receive", "send"]

_HEADER_INTS = 3  # chunks, tokens, pages; no chunk: prepare
_CHUNK_INTS = 6  # number, preemptions, start, end, whether it samples, pages
PREPARE = np.zeros(_HEADER_INTS, np.int32)
"""The message that asks to prepare."""


class StepWriter:
    """Of the process that schedules."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._numbers: dict[Request, int] = {}  # of the launch before

    def encode(self, chunks: Sequence[Chunk], tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        """The message of one launch. One for each launch, in their order."""
        requests = [chunk.request for chunk in chunks]
        self._numbers = {
            request: self._numbers[request] if request in self._numbers else next(self._next)
            for request in requests
        }
        heads = [
            (
                self._numbers[c.request],
                c.request.num_preemptions,
                c.start,
                c.end,
                int(c.samples),
                len(table),
            )
            for c, table in zip(chunks, tables, strict=True)
        ]
        tokens = np.concatenate([np.array(c.request.tokens[c.start : c.end], np.int32) for c in chunks])
        pages = np.concatenate([np.asarray(table, np.int32) for table in tables])
        header = np.array([len(chunks), len(tokens), len(pages)], np.int32)
        return np.concatenate([header, np.array(heads, np.int32).ravel(), tokens, pages])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A launch as a member sees it."""

    chunks: list[Chunk]
    tables: list[NDArray[np.int32]]


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

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # of the launch before

    def decode(self, message: NDArray[np.int32]) -> Step:
        """The launch of one message."""
        num_chunks, num_tokens, _ = message[:_HEADER_INTS].tolist()
        body = message[_HEADER_INTS:]
        heads = body[: num_chunks * _CHUNK_INTS].reshape(num_chunks, _CHUNK_INTS).tolist()
        tokens = body[num_chunks * _CHUNK_INTS :][:num_tokens]
        pages = body[num_chunks * _CHUNK_INTS + num_tokens :]
        chunks, tables, requests = [], [], {}
        taken = table_start = 0
        for number, preemptions, start, end, samples, num_pages in heads:
            request = self._requests.get(number) or Request(
                id=RequestId(str(number)), tokens=[], num_prompt=0
            )
            request.num_preemptions = preemptions
            known = tokens[taken : taken + end - start].tolist()
            request.tokens = _TokensFrom(start, known if samples else [*known, 0])
            requests[number] = request
            chunks.append(Chunk(request=request, start=start, end=end))
            tables.append(pages[table_start : table_start + num_pages])
            taken += end - start
            table_start += num_pages
        self._requests = requests
        return Step(chunks=chunks, tables=tables)


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
