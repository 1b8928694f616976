"""A client of a running worker: one connection, one request at a time, every wait with a deadline. Imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from engine_adapter.serving.jsonl import MAX_LINE_BYTES, GenerateRequest, Result, decode_event, encode_request
from kvstore.errors import DeadlineExceeded, Unavailable

__all__ = ["WorkerConnection"]


class WorkerConnection:
    """A connection to the worker at `path`. Raises Unavailable where none listens."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        """`timeout_s`: the longest silence while an answer is awaited."""
        self._path = path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Unavailable(
                f"no worker listens on {path} ({error.strerror or error}): start one with `kvstore worker`"
            ) from error
        self._lines = self._socket.makefile("rb")

    def ask(self, request: GenerateRequest) -> Iterator[str | Result]:
        """Pieces of text as they come (with `stream`), and last the result.

        Raises what the worker answers, Unavailable when it goes away, DeadlineExceeded when it is silent too long.
        """
        try:
            self._socket.sendall(encode_request(request))
            while True:
                line = self._lines.readline(MAX_LINE_BYTES)
                if not line.endswith(b"\n"):
                    raise Unavailable(f"the worker on {self._path} went away before its answer was complete")
                event = decode_event(line)
                yield event
                if isinstance(event, Result):
                    return
        except TimeoutError:
            raise DeadlineExceeded(
                f"the worker on {self._path} has been silent for {self._timeout_s:g} s"
            ) from None
        except OSError as error:
            raise Unavailable(f"lost the worker on {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Ends the connection; a request under way is aborted."""
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
