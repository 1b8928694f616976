"""The channel to the daemon: options, unary calls with a deadline, and status codes turned back into errors.

The only module of the client that calls gRPC. Safe to use from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import grpc

from kvstore.client.framed import FramedStream
from kvstore.errors import KvstoreError, from_grpc_code
from kvstore.wire.frames import stream_path
from kvstore.wire.v1 import kvstore_pb2_grpc

if TYPE_CHECKING:
    from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["TOKEN_METADATA", "Rpc", "StreamCall", "error_of"]

TOKEN_METADATA = "kvstore-token-bin"  # noqa: S105 (the name of a header)
_RETRY_AFTER_METADATA = "kvstore-retry-after-ms"
_MAX_MESSAGE_BYTES = 16 << 20
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    (
        "grpc.min_reconnect_backoff_ms",
        2000,
    ),  # also the deadline of one attempt: a busy daemon must get to answer
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)


@runtime_checkable
class _Call(Protocol):
    """What gRPC's errors of calls can also do; its stubs say that no class is both."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class StreamCall(Protocol):
    """An open session stream."""

    def __iter__(self) -> Iterator[pb.ServerMessage]:
        """Messages in order, until the stream ends. Raises: why it did."""
        ...

    def cancel(self) -> None:
        """Ends it, from any thread."""
        ...

    def close(self) -> None:
        """After the last read, once its requests end: gives back what it took."""
        ...


class _RpcStream:
    """StreamCall of the RPC."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[pb.ServerMessage]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise error_of(error) from None

    def cancel(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        self._call.cancel()


class Rpc:
    """One channel."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._channel = grpc.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)
        self._stubs: dict[str, Any] = {
            "kvstore": kvstore_pb2_grpc.KvstoreStub(self._channel),
            "admin": kvstore_pb2_grpc.AdminStub(self._channel),
        }

    def call(self, method: str, request: Any, timeout_s: float, *, service: str = "kvstore") -> Any:
        """One unary call. Raises: the error of its status code."""
        try:
            return getattr(self._stubs[service], method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def stream(self, requests: Iterator[pb.ClientMessage], token: bytes) -> StreamCall:
        """Opens the session stream: framed, or as an RPC where the daemon has no socket for frames.

        Raises: Unavailable.
        """
        path = stream_path(self.socket_path)
        if os.path.exists(path):
            return FramedStream(path, token, requests)
        return _RpcStream(self._stubs["kvstore"].Session(requests, metadata=((TOKEN_METADATA, token),)))

    def close(self) -> None:
        """Ends every call."""
        self._channel.close()


def error_of(error: Exception) -> KvstoreError:
    """The error of the tree that a failed call stands for."""
    if not isinstance(error, _Call):
        return from_grpc_code("UNKNOWN", str(error))
    retry_after_s = None
    for key, value in error.trailing_metadata() or ():
        if key == _RETRY_AFTER_METADATA and isinstance(value, str) and value.isdigit():
            retry_after_s = int(value) / 1000
    return from_grpc_code(error.code().name, error.details() or "", retry_after_s=retry_after_s)
