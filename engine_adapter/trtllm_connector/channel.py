"""From the ranks to the leader, where TensorRT-LLM carries nothing: who a rank is, and which jobs it has ended.

    rank → leader     Hello {rank, world, listener, order, payload_bytes, why_not}, once      Done [job, failed] …

The leader listens on a name in the abstract namespace, which leaves no file behind and which it tells the ranks with
each step's plan. AF_UNIX SOCK_SEQPACKET, one packet a message: a Hello is JSON, a Done packed little-endian. Both ends
look at the other's uid. The end of a connection is the end of its rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from engine_adapter.external.accepting import accepted
from engine_adapter.external.jobs import StepReport
from kvstore.wire.peer import check_peer

__all__ = ["Hello", "LeaderChannel", "RankChannel", "RankNews"]

_LOG = logging.getLogger("kvstore.trtllm")
_HELLO, _DONE = b"H", b"D"
_JOB = struct.Struct("<q?")
_MAX_JOBS = 4096  # in one packet
_MAX_PACKET_BYTES = 1 + _JOB.size * _MAX_JOBS
_BACKLOG = 64
_SEND_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank, once it has its KV. `why_not`: why it cannot keep any; the rest may then be empty."""

    rank: int
    world: int
    listener: str = ""
    order: str = ""
    payload_bytes: int = 0
    why_not: str = ""


class RankNews(Protocol):
    """Called on the channel's threads, one for each rank."""

    def hello(self, said: Hello) -> None:
        """A rank is here."""
        ...

    def done(self, report: StepReport) -> None:
        """A rank has ended jobs."""
        ...


class LeaderChannel:
    """The leader's end. `name` is what ranks connect to."""

    def __init__(self, news: RankNews) -> None:
        self._news = news
        self.name = f"kvstore-leader-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)
        self._lock = threading.Lock()
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start(self._accept)

    def close(self, timeout_s: float) -> None:
        """Listens no more. Not called from `news`."""
        with self._lock:
            self._closed = True
            sockets, threads = [self._socket, *self._peers], list(self._threads)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in threads:
            thread.join(timeout_s)

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="kvstore-leader", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        for peer in accepted(self._socket):
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                self._peers.append(peer)
                self._start(self._read, peer)

    def _read(self, peer: socket.socket) -> None:
        while True:
            try:
                packet = peer.recv(_MAX_PACKET_BYTES)
            except OSError:
                return
            if not packet:
                return
            try:
                self._take(packet)
            except Exception:  # noqa: BLE001 (a thread's boundary: one bad message does not end the others)
                _LOG.exception("a rank's message could not be taken")

    def _take(self, packet: bytes) -> None:
        kind, body = packet[:1], packet[1:]
        if kind == _HELLO:
            self._news.hello(Hello(**json.loads(body)))
        elif kind == _DONE:
            report = StepReport()
            for number, failed in _JOB.iter_unpack(body):
                report.end(number, failed=failed)
            self._news.done(report)


class RankChannel:
    """A rank's end. One thread sends."""

    def __init__(self, name: str, said: Hello) -> None:
        """Connects. Raises OSError where nobody listens, PermissionDenied where somebody else does."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_SEND_S)
            self._socket.connect(f"\0{name}")
            check_peer(self._socket)
            self._socket.sendall(_HELLO + json.dumps(asdict(said)).encode())
        except BaseException:
            self._socket.close()
            raise

    def done(self, report: StepReport) -> None:
        """Raises OSError where the leader has gone."""
        jobs = [_JOB.pack(number, number in report.failed) for number in report.done]
        for begin in range(0, len(jobs), _MAX_JOBS):
            self._socket.sendall(_DONE + b"".join(_part(jobs, begin)))

    def close(self) -> None:
        """This rank has ended."""
        self._socket.close()


def _part(jobs: Sequence[bytes], begin: int) -> Sequence[bytes]:
    return jobs[begin : begin + _MAX_JOBS]
