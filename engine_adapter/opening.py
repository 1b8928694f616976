"""Opens a block manager over a running daemon, with what it needs around it, and closes it in the right order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_adapter.adapter import KvstoreBlockManager
from engine_adapter.budget import device_spec
from engine_adapter.copier import Copier, TwinCopier
from engine_adapter.group import MemberGroup
from engine_adapter.group_copier import GroupCopier
from kvstore.client import DramListener, connect
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
    device: str = "cpu",
    patience_s: float = 5.0,
    timeout_s: float = 5.0,
    group: MemberGroup | None = None,
) -> Iterator[KvstoreBlockManager]:
    """A block manager whose pages are owned HBM, kept by the daemon at `socket`: a GPU's, or its twin for "cpu".

    `group`: the other processes, where each block is shared among several; `hbm_bytes` are those of one of them.
    `parts`: what makes the engine's KV interchangeable (kvstore/identity.py). Raises: Unavailable where no daemon
    listens, and whatever else attaching raises. At the end copies finish before the session is given up.
    """
    with connect(socket, timeout_s=timeout_s) as client:
        copier, listener = _copier(device)
        try:
            spec = device_spec(device, hbm_bytes)
            session = client.attach(name, geometry, spec, listener=listener, group=group)
        except BaseException:
            copier.close(timeout_s)
            raise
        if group is not None:
            copier = group_copier = GroupCopier(copier, group)
            group.on_copied(group_copier.copied)
        with session:
            try:
                yield KvstoreBlockManager(session, parts, copier, patience_s=patience_s)
            finally:
                copier.close(timeout_s)


def _copier(device: str) -> tuple[Copier, DramListener | None]:
    """The copier of a device, and who pins DRAM for it."""
    if device == "cpu":
        return TwinCopier(), None
    from engine_adapter.cuda_copier import CudaCopier

    copier = CudaCopier(device_spec(device, 0).index)
    return copier, copier
