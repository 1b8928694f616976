"""How commands reach the daemon: the configured socket, and for Admin the socket on which it is offered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.cli.settings import load_settings
from kvstore.client.connect import Client, connect
from kvstore.daemon.sockets import admin_path
from kvstore.errors import Unavailable

__all__ = ["call_admin", "open_client"]


@contextmanager
def open_client(socket: str | None) -> Iterator[Client]:
    """A client of the daemon on `socket`, or where the configuration says.

    Raises ConfigError, and Unavailable with one line that says what to do when nobody answers.
    """
    with _client(_socket(socket)) as client:
        yield client


def call_admin(socket: str | None, method: str, request: Any) -> Any:
    """One call of service Admin. Raises: the error of its status."""
    path = _socket(socket)
    own = admin_path(path)
    with _client(own if Path(own).exists() else path) as client:
        return client.call(method, request, service="admin")


@contextmanager
def _client(path: str) -> Iterator[Client]:
    with connect(path) as client:
        try:
            yield client
        except Unavailable:
            raise Unavailable(
                f"no service answers on {path}: start one with `kvstore serve`, or name its --socket"
            ) from None


def _socket(socket: str | None) -> str:
    return load_settings({"socket": socket}).config.serve.socket
