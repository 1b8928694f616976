"""How commands reach the daemon: the configured socket, and for Admin the socket on which it is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.cli.settings import load_settings
from kvstore.client.connect import Client, connect
from kvstore.daemon.sockets import admin_path

__all__ = ["call_admin", "open_client"]


def open_client(socket: str | None) -> Client:
    """A client of the daemon on `socket`, or where the configuration says. Raises ConfigError."""
    return connect(_socket(socket))


def call_admin(socket: str | None, method: str, request: Any) -> Any:
    """One call of service Admin. Raises: the error of its status."""
    path = _socket(socket)
    own = admin_path(path)
    with connect(own if Path(own).exists() else path) as client:
        return client.call(method, request, service="admin")


def _socket(socket: str | None) -> str:
    return load_settings({"socket": socket}).config.serve.socket
