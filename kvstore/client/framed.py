"""The session stream of a client over frames (`kvstore.wire.frames`): the socket, and the thread that sends.

Iterating reads answers, on the caller's thread. Sending has a thread of its own, since a daemon that is stopped takes
nothing once the socket's buffer is full, and nobody else may wait for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from kvstore.client.decode import refusal_of
from kvstore.errors import Unavailable
from kvstore.wire.frames import FrameReader, frame, pack_hello
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["FramedStream"]

_RECEIVE_BYTES = 1 << 18
_MAX_MESSAGE_BYTES = 16 << 20
_CONNECT_S = 2.0


class FramedStream:
    """One connection: an iterator over the daemon's messages until the stream ends."""

    def __init__(self, path: str, token: bytes, requests: Iterator[pb.ClientMessage]) -> None:
        """Connects and starts to send what `requests` gives. Raises: Unavailable."""
        self._path = path
        self._requests = requests
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_CONNECT_S)
            self._socket.connect(path)
            self._socket.sendall(pack_hello(token))
            self._socket.settimeout(None)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"cannot open the session stream {path}: {error}") from None
        self._sender = threading.Thread(target=self._send, name="kvstore-sender", daemon=True)
        self._sender.start()

    def __iter__(self) -> Iterator[pb.ServerMessage]:
        """Messages in order. Raises: what the daemon ended the stream with; Unavailable where it just went."""
        reader = FrameReader(_MAX_MESSAGE_BYTES)
        while data := self._receive():
            for packed in reader.feed(data):
                message = pb.ServerMessage.FromString(packed)
                if message.WhichOneof("body") == "error" and not message.error.id:
                    raise refusal_of(message.error)
                yield message
        raise Unavailable("the daemon closed the session stream")

    def cancel(self) -> None:
        """Ends the stream, from any thread: reading and sending return."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the last read, and once `requests` ends: gives the socket back."""
        self.cancel()
        self._sender.join()
        self._socket.close()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise Unavailable(f"the session stream broke: {error}") from None

    def _send(self) -> None:
        try:
            for message in self._requests:
                self._socket.sendall(frame(message.SerializeToString()))
        except OSError:
            self.cancel()  # whoever reads learns of it
