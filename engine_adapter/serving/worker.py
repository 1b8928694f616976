"""A worker: one engine behind a unix socket that takes JSON lines (`engine_adapter.serving.jsonl`).

The main thread runs an asyncio loop that owns all connections; one thread owns the engine. Everything is bounded:
connections, live requests, the length of a line, and what may wait to be sent to a client that does not read (it is
disconnected). A connection that ends aborts its requests. SIGTERM finishes what is live, up to a deadline; a second
signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_adapter.base import RequestId
from engine_adapter.engine.engine import Engine, Output
from engine_adapter.serving.engine_thread import EngineThread, Job
from engine_adapter.serving.jsonl import (
    MAX_LINE_BYTES,
    Cancel,
    GenerateRequest,
    decode_line,
    encode_done,
    encode_error,
    encode_tokens,
    peek_id,
)
from engine_adapter.serving.requests import Answer, sampling_params, tokenize
from kvstore.errors import (
    InvalidArgument,
    KvstoreError,
    ResourceExhausted,
    Unavailable,
)

__all__ = ["WorkerLimits", "serve"]

_LAST_STEP_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Bounds of one worker."""

    connections: int = 64
    requests: int = 1024
    send_buffer_bytes: int = 8 << 20
    drain_s: float = 30.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """A request under way."""

    connection: _Connection
    name: str
    stream: bool
    answer: Answer


def serve(
    engine: Engine, listener: socket.socket, *, limits: WorkerLimits, ready: Callable[[], None]
) -> None:
    """Serves until SIGTERM or SIGINT. `ready` is called once requests are taken. Main thread only.

    Raises Unavailable when the engine broke.
    """
    asyncio.run(_Server(engine, limits).run(listener, ready))


class _Server:
    """All connections and live requests; everything here runs on the loop."""

    def __init__(self, engine: Engine, limits: WorkerLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._live: dict[RequestId, _Live] = {}
        self._connections: set[_Connection] = set()
        self._numbers = 0
        self._broken: BaseException | None = None

    async def run(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._thread = EngineThread(
            self._engine,
            deliver=lambda outputs: _post(loop, self._outputs, outputs),
            refuse=lambda request_id, error: _post(loop, self._refused, request_id, error),
            ended=lambda error: _post(loop, self._ended, error),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._thread.start()
        server = await asyncio.start_unix_server(self._connected, sock=listener, limit=MAX_LINE_BYTES)
        ready()
        await self._stop.wait()
        server.close()
        await self._drain()
        for connection in list(self._connections):
            await connection.close()
        if self._broken is not None:
            raise Unavailable(f"the engine failed: {self._broken}") from self._broken

    def accept(self, connection: _Connection, request: GenerateRequest) -> None:
        """Takes a request. Raises KvstoreError when it cannot run."""
        accepted_at = time.perf_counter()
        request_id = connection.request_id(request.id)
        if request_id in self._live:
            raise InvalidArgument(f"the request {request.id!r} is running already")
        if self._stop.is_set():
            raise Unavailable("the worker is stopping")
        params = sampling_params(request)
        tokens = tokenize(request, self._engine.loaded.tokenizer)
        job = Job(id=request_id, token_ids=tokens, params=params)
        if len(self._live) >= self._limits.requests or not self._thread.submit(job):
            raise ResourceExhausted("too many requests are waiting", retry_after_s=1.0)
        self._live[request_id] = _Live(
            connection=connection,
            name=request.id,
            stream=request.stream,
            answer=Answer(accepted_at=accepted_at, prompt_tokens=len(tokens)),
        )

    def cancel(self, connection: _Connection, name: str) -> None:
        """Ends a request early; unknown ones are ignored."""
        request_id = connection.request_id(name)
        if request_id in self._live:
            self._thread.cancel(request_id)

    def disconnected(self, connection: _Connection) -> None:
        """Nobody reads the answers of this connection any more."""
        self._connections.discard(connection)
        for request_id, live in list(self._live.items()):
            if live.connection is connection:
                del self._live[request_id]
                self._thread.cancel(request_id)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._numbers += 1
        connection = _Connection(self, self._numbers, reader, writer, self._limits.send_buffer_bytes)
        if len(self._connections) >= self._limits.connections:
            connection.send(encode_error("", ResourceExhausted("too many connections", retry_after_s=1.0)))
            await connection.close()
            return
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self.disconnected(connection)
            await connection.close()

    def _outputs(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue  # its connection has gone
            if live.stream and output.token_ids:
                live.connection.send(encode_tokens(live.name, output.text, output.token_ids))
            try:
                result = live.answer.add(output, now)
            except KvstoreError as error:
                self._refused(output.request_id, error)
                continue
            if result is not None:
                del self._live[output.request_id]
                live.connection.send(encode_done(live.name, result))

    def _refused(self, request_id: RequestId, error: KvstoreError) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.connection.send(encode_error(live.name, error))

    def _ended(self, error: BaseException | None) -> None:
        self._broken = error
        for request_id in list(self._live):
            self._refused(
                request_id, Unavailable("the worker has stopped" if error is None else f"failed: {error}")
            )
        self._stop.set()
        self._idle.set()

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._thread.stop(abort=True)
        self._stop.set()

    async def _drain(self) -> None:
        """Live requests finish, until the deadline or a second signal; then they are aborted."""
        self._thread.stop()
        try:
            await asyncio.wait_for(self._idle.wait(), self._limits.drain_s)
        except TimeoutError:
            self._thread.stop(abort=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _LAST_STEP_S)


class _Connection:
    """One client."""

    def __init__(
        self,
        server: _Server,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send_buffer_bytes: int,
    ) -> None:
        self._server = server
        self._number = number
        self._reader = reader
        self._writer = writer
        self._send_buffer_bytes = send_buffer_bytes

    def request_id(self, name: str) -> RequestId:
        """The engine's name of this client's request."""
        return RequestId(f"{self._number}/{name}")

    async def run(self) -> None:
        """Reads lines until the client has gone."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:  # longer than the limit; what follows cannot be told apart
                self.send(encode_error("", InvalidArgument(f"a line is longer than {MAX_LINE_BYTES} bytes")))
                return
            except ConnectionError:
                return
            if not line:
                return
            if line.strip():
                self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            message = decode_line(line)
            if isinstance(message, Cancel):
                self._server.cancel(self, message.id)
            else:
                self._server.accept(self, message)
        except KvstoreError as error:
            self.send(encode_error(peek_id(line), error))

    def send(self, line: bytes) -> None:
        """Queues a line; a client that does not read is cut off."""
        if self._writer.transport.is_closing():
            return
        self._writer.write(line)
        if self._writer.transport.get_write_buffer_size() > self._send_buffer_bytes:
            _log.warning("connection %d does not read: disconnected", self._number)
            self._writer.transport.abort()

    async def close(self) -> None:
        """Sends what is queued, for a moment, and closes."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Calls on the loop from the engine's thread; a loop that has ended needs nothing any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
