"""Opens a block manager over a running daemon, with what it needs around it, and closes it in the right order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_adapter.adapter import KvstoreBlockManager
from engine_adapter.copier import TwinCopier
from kvstore.client import DeviceSpec, connect
from kvstore.geometry import Geometry

__all__ = ["open_block_manager"]


@contextmanager
def open_block_manager(
    *,
    socket: str | Path | None,
    name: str,
    geometry: Geometry,
    parts: Mapping[str, bytes],
    hbm_bytes: int,
    device: int = 0,
    patience_s: float = 5.0,
    timeout_s: float = 5.0,
) -> Iterator[KvstoreBlockManager]:
    """A block manager whose pages are owned HBM (its twin on this host), kept by the daemon at `socket`.

    `parts`: what makes the engine's KV interchangeable (kvstore/identity.py). Raises: Unavailable where no daemon
    listens, and whatever else attaching raises. At the end copies finish before the session is given up.
    """
    with (
        connect(socket, timeout_s=timeout_s) as client,
        client.attach(name, geometry, DeviceSpec(hbm_bytes=hbm_bytes, index=device)) as session,
    ):
        copier = TwinCopier()
        try:
            yield KvstoreBlockManager(session, parts, copier, patience_s=patience_s)
        finally:
            copier.close(timeout_s)
