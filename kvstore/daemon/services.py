"""The gRPC servers: which service is offered on which socket, and the deadline of every unary call.

The main socket offers Kvstore and Health. Admin is there too while only the daemon's own user can reach it (0600 and no
TCP); where a group or TCP is asked for it stands on a socket of its own, `<socket>.admin`, 0600.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvstore.daemon.admin import Admin
from kvstore.daemon.handlers import service_handlers
from kvstore.daemon.owner import Owner
from kvstore.daemon.rpc import Context, answer
from kvstore.daemon.sockets import admin_path
from kvstore.daemon.stream import SessionStreams
from kvstore.daemon.transfers import Transfers
from kvstore.daemon.unary import Unary
from kvstore.errors import ConfigError
from kvstore.wire.v1 import health_pb2
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Services"]

_MAX_CALLS = 1024
_HEALTH_POLL_S = 0.5
_KVSTORE_CALLS = {
    "Attach": "attach",
    "Detach": "detach",
    "OpenNamespace": "open_namespace",
    "Explain": "explain",
    "Stats": "stats",
    "Describe": "describe",
    "ReportWrong": "report_wrong",
}
_ADMIN_CALLS = {
    "Pin": "pin",
    "Unpin": "unpin",
    "Clear": "clear",
    "Leases": "leases",
    "CheckIntegrity": "check_integrity",
    "ReleaseDevice": "release_device",
    "Forget": "forget",
    "Pause": "pause",
    "Resize": "resize",
    "Record": "record",
}

_TRANSFER_CALLS = {"AdoptKey": "adopt_key", "Namespaces": "namespaces", "Slabs": "slabs"}

_SERVICES = pb.DESCRIPTOR.services_by_name
_Health = health_pb2.HealthCheckResponse
_SERVICE_NAMES = ("", "kvstore.v1.Kvstore")
_BLOCKS_SERVICE = "blocks"
_CACHE_SERVICE = "cache"
_DISK_SERVICE = "nvme:"
_Handler = Callable[[Any, Context], Awaitable[Any]]


class Services:
    """The servers of one daemon."""

    def __init__(
        self,
        *,
        owner: Owner,
        unary: Unary,
        admin: Admin,
        transfers: Transfers,
        streams: SessionStreams,
        disk_serves: Callable[[str], bool | None],
        cache_serves: Callable[[], bool],
    ) -> None:
        """`disk_serves`: whether the path with a folder does all that is asked of it; None: there is no such path.

        `cache_serves`: whether hits are served and blocks stored.
        """
        self._owner = owner
        self._cache_serves = cache_serves
        self._disk_serves = disk_serves
        self._config = owner.config
        limits = self._config.limits
        handlers: dict[str, Any] = {
            name: self._unary(getattr(unary, method), limits.call_deadline_s)
            for name, method in _KVSTORE_CALLS.items()
        }
        handlers["Flush"] = self._unary(unary.flush, limits.flush_deadline_s + limits.call_deadline_s)
        handlers["Session"] = streams.serve
        self._kvstore = service_handlers(_SERVICES["Kvstore"], handlers)
        self._admin = service_handlers(
            _SERVICES["Admin"],
            {
                name: self._unary(getattr(admin, method), limits.call_deadline_s)
                for name, method in _ADMIN_CALLS.items()
            }
            | {
                name: self._unary(getattr(transfers, method), limits.call_deadline_s)
                for name, method in _TRANSFER_CALLS.items()
            },
        )
        self._health = service_handlers(
            health_pb2.DESCRIPTOR.services_by_name["Health"],
            {"Check": self._check, "Watch": self._watch},
        )
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Listens. Raises ConfigError where an address cannot be listened on."""
        private = self._config.socket_group is None and self._config.tcp is None
        main = self._server(admin=private)
        mask = os.umask(0o177)
        try:
            _listen(main, f"unix:{self._config.socket}", "socket")
            if self._config.tcp is not None:
                _listen(main, self._config.tcp, "tcp")
            if not private:
                only_admin = grpc.aio.server(options=self._options())
                only_admin.add_generic_rpc_handlers((self._admin,))
                _listen(only_admin, f"unix:{admin_path(self._config.socket)}", "socket")
                self._servers.append(only_admin)
        finally:
            os.umask(mask)
        self._servers.append(main)
        for server in self._servers:
            await server.start()

    def _server(self, *, admin: bool) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._options(), maximum_concurrent_rpcs=_MAX_CALLS)
        server.add_generic_rpc_handlers(
            (self._kvstore, self._health, self._admin) if admin else (self._kvstore, self._health)
        )
        return server

    def _options(self) -> list[tuple[str, int]]:
        size = self._config.limits.message_bytes
        return [
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.so_reuseport", 0),
        ]

    def _unary(self, call: Callable[[Any], Awaitable[Any]], limit_s: float) -> _Handler:
        async def handler(request: Any, context: Context) -> Any:
            return await answer(call, request, context, self._owner.counters, limit_s)

        handler.__name__ = getattr(call, "__name__", "call")
        return handler

    async def _check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        now = self._health_now(request.service)
        if now == _Health.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return _Health(status=now)

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, _context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            now = self._health_now(request.service)
            if now != last:
                last = now
                yield _Health(status=now)
            await asyncio.sleep(_HEALTH_POLL_S)

    def _health_now(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        """Of the service, which nothing below ends; of `nvme:FOLDER`; of `blocks`: whether all were right so far; of
        `cache`: whether it is in use."""
        serves: bool | None = None
        if service in _SERVICE_NAMES:
            serves = True
        elif service == _BLOCKS_SERVICE:
            serves = not self._owner.found_wrong
        elif service == _CACHE_SERVICE:
            serves = self._cache_serves()
        elif service.startswith(_DISK_SERVICE):
            serves = self._disk_serves(service.removeprefix(_DISK_SERVICE))
        if serves is None:
            return _Health.SERVICE_UNKNOWN
        return _Health.SERVING if serves and not self._owner.draining else _Health.NOT_SERVING

    async def stop(self, grace_s: float) -> None:
        """Ends all calls, streams after `grace_s`."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


def _listen(server: grpc.aio.Server, address: str, key: str) -> None:
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"{key}: cannot listen on {address.removeprefix('unix:')}: {error}") from None
