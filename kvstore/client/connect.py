"""Finding the daemon: the socket's path, and the client that sessions come from."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.cache_use import CacheUse
from kvstore.client.copied import Compares
from kvstore.client.device import DeviceSpec
from kvstore.client.group import Group
from kvstore.client.memory import DramListener
from kvstore.client.rpc import Rpc
from kvstore.client.session import Session
from kvstore.client.state import Targets
from kvstore.config import check_socket_path, default_socket
from kvstore.geometry import Geometry
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Client", "connect"]


class Client:
    """One daemon. Sessions and calls; safe to use from any thread."""

    def __init__(self, socket: str, timeout_s: float) -> None:
        self._rpc = Rpc(socket)
        self._timeout_s = timeout_s

    def attach(
        self,
        name: str,
        geometry: Geometry,
        device: DeviceSpec | None = None,
        *,
        targets: Targets | None = None,
        listener: DramListener | None = None,
        group: Group | None = None,
        use: CacheUse = CacheUse.ON,
        compares: Compares = Compares.NOTHING,
    ) -> Session:
        """Attaches an engine. `name` is shown to people; `device`: its owned HBM, None for none.

        `listener` is told of DRAM that is mapped. `group`: the other processes among which each block is shared; then
        `device` has a part of every block, and its budget holds for each of theirs too. `use`: what the session does
        with the cache, as far as the service allows it. `compares`: LOADS promises that nothing that was loaded is used
        where it is not what `Session.checksums_of` says. Raises: Unavailable, ResourceExhausted (sessions, slots),
        InvalidArgument, Unimplemented; where the device is a GPU, as `tiers.hbm.CudaDevice` too.
        """
        return Session(
            self._rpc, name, geometry, device, targets, self._timeout_s, listener, group, use, compares
        )

    def describe(self) -> pb.DescribeReply:
        """Version, boot epoch, process ids and configuration of the daemon."""
        reply: pb.DescribeReply = self.call("Describe", pb.DescribeRequest())
        return reply

    def stats(self) -> pb.StatsReply:
        """Gauges and counters."""
        reply: pb.StatsReply = self.call("Stats", pb.StatsRequest())
        return reply

    def flush(self, deadline_s: float = 30.0) -> pb.FlushReply:
        """Returns when every block that is in DRAM now is durable on disk, or at the deadline."""
        request = pb.FlushRequest(deadline_ms=int(deadline_s * 1000))
        reply: pb.FlushReply = self._rpc.call("Flush", request, deadline_s + self._timeout_s)
        return reply

    def call(
        self, method: str, request: Any, *, service: str = "kvstore", timeout_s: float | None = None
    ) -> Any:
        """Any unary call of the protocol; `service` is "kvstore" or "admin". Raises: the error of its status."""
        return self._rpc.call(method, request, timeout_s or self._timeout_s, service=service)

    def close(self) -> None:
        """Ends every call; sessions are closed before."""
        self._rpc.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(socket: str | Path | None = None, *, timeout_s: float = 5.0) -> Client:
    """The client of the daemon that listens on `socket` (None: where `kvstore serve` listens by default).

    Returns at once: the first call finds out whether anybody is there (Unavailable). `timeout_s` bounds unary calls.
    Raises: ConfigError for a path that is too long for a unix socket.
    """
    path = str(socket) if socket is not None else default_socket(os.environ, os.getuid())
    check_socket_path(path)
    return Client(path, timeout_s)
