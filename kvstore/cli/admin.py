"""How commands reach the daemon: the configured socket, and for Admin the socket on which it is offered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.cli.settings import load_settings
from kvstore.client.connect import Client
from kvstore.config import Config
from kvstore.daemon.sockets import admin_path
from kvstore.errors import Unavailable

__all__ = ["call_admin", "open_client"]


@contextmanager
def open_client(socket: str | None) -> Iterator[Client]:
    """A client of the daemon on `socket`, or where the configuration says.

    Raises ConfigError, and Unavailable with one line that says what to do when nobody answers.
    """
    config = _config(socket)
    with _client(config.serve.socket, config) as client:
        yield client


def call_admin(socket: str | None, method: str, request: Any) -> Any:
    """One call of service Admin. Raises: the error of its status."""
    config = _config(socket)
    path, own = config.serve.socket, admin_path(config.serve.socket)
    with _client(own if Path(own).exists() else path, config) as client:
        return client.call(method, request, service="admin")


@contextmanager
def _client(path: str, config: Config) -> Iterator[Client]:
    with Client(path, config.client.timeout_s) as client:
        try:
            yield client
        except Unavailable:
            raise Unavailable(
                f"no service answers on {path}: start one with `kvstore serve`, or name its --socket"
            ) from None


def _config(socket: str | None) -> Config:
    return load_settings({"socket": socket}).config
