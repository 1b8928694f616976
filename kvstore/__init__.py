"""kvstore: a KV-cache memory service for LLM inference.

Importing this package imports neither torch nor grpc nor numpy; `connect` brings the client in at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client import connect

__all__ = ["__version__", "connect"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "connect":
        from kvstore.client import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
