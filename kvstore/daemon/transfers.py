"""What export and import ask for: which namespaces there are, where the slabs lie, and another machine's key.

Part of service Admin: keys of hash chains leave the daemon here, to its own user alone.
"""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from kvstore.daemon.namespaces import KnownNamespace, Namespaces, write_beside_slabs
from kvstore.daemon.nvme import SlabTable
from kvstore.daemon.owner import Owner
from kvstore.errors import FailedPrecondition, InvalidArgument, KvstoreError
from kvstore.identity import KEY_BYTES
from kvstore.layout import NONE, Columns, State, Tier, states
from kvstore.transfer.plan import DIGEST_BYTES, handle_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Transfers"]

_SAVE_INTERVAL_S = 1.0


class Transfers:
    """Answers the calls. Every method raises KvstoreError for what it refuses."""

    def __init__(self, *, owner: Owner, columns: Columns, slabs: SlabTable, namespaces: Namespaces) -> None:
        self._owner = owner
        self._columns = columns
        self._slabs = slabs
        self._namespaces = namespaces
        self._saving = asyncio.Lock()

    async def namespaces(self, _request: pb.NamespacesRequest) -> pb.NamespacesReply:
        """Every namespace that has blocks, or whose parts are known."""
        counts = await asyncio.to_thread(_counts, self._columns)
        known = {digest[:DIGEST_BYTES]: each for digest, each in self._namespaces.by_row_digest().items()}
        short = self._columns.namespace_digest[:, :DIGEST_BYTES]
        names = {digest.tobytes(): handle for handle, digest in enumerate(short)}
        told = []
        for digest in sorted({*known, *(name for name in names if any(name))}):
            handle = names.get(digest)
            blocks = (0, 0, 0, 0) if handle is None else tuple(counts[handle].tolist())
            if digest in known or blocks[0]:
                told.append(_told(digest, known.get(digest), blocks))
        return pb.NamespacesReply(namespaces=told)

    async def slabs(self, _request: pb.SlabsRequest) -> pb.SlabsReply:
        """Which file each extent of the disk tier is."""
        paths = self._owner.config.nvme
        infos = [info for info in self._owner.store.extents(Tier.NVME) if self._slabs.number(info.extent)]
        return pb.SlabsReply(
            slabs=[
                pb.SlabInfo(
                    extent=info.extent,
                    directory=paths[info.device].path,
                    number=self._slabs.number(info.extent),
                    slot_bytes=self._slabs.slot_bytes(info.extent),
                )
                for info in infos
                if info.device < len(paths)
            ]
        )

    async def adopt_key(self, request: pb.AdoptKeyRequest) -> pb.AdoptKeyReply:
        """The namespace goes by another machine's key; answered when that is durable."""
        parts = {part.tag: part.value for part in request.parts}
        if len(parts) != len(request.parts):
            raise InvalidArgument("a part of the namespace is stated twice")
        if len(request.key) != KEY_BYTES:
            raise InvalidArgument(f"a key is {KEY_BYTES} bytes, not {len(request.key)}")
        now = self._namespaces.opened(parts)
        if now.key == request.key:
            return pb.AdoptKeyReply(adopted=False)
        stored = await asyncio.to_thread(_blocks_of, self._columns, now.row_digest)
        if stored and not request.replace:
            raise FailedPrecondition(
                f"this machine has {stored} blocks of the namespace under a key of its own, which would be found no "
                "more: clear them, or give them up with --replace-key"
            )
        self._namespaces.adopt(parts, request.key)
        try:
            await self._save()
        except OSError as error:
            raise KvstoreError(
                f"the key is not kept beside the slabs, so a restart may lose it: {error.strerror}"
            ) from error
        return pb.AdoptKeyReply(adopted=True, given_up=stored)

    async def save_forever(self) -> None:
        """Brings what engines open to the files, a moment later."""
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_S)
            await self.save_what_is_new()

    async def save_what_is_new(self) -> None:
        """What the files lack is written, if it can be."""
        if self._namespaces.unsaved:
            try:
                await self._save()
            except OSError:  # its path is out of service, which is said elsewhere
                self._namespaces.unsaved = True

    async def _save(self) -> None:
        folders = [path.path for path in self._owner.config.nvme]
        async with self._saving:
            await asyncio.to_thread(write_beside_slabs, folders, self._namespaces.take_unsaved())


def _told(digest: bytes, known: KnownNamespace | None, blocks: tuple[int, ...]) -> pb.NamespaceInfo:
    parts = {} if known is None else known.parts
    return pb.NamespaceInfo(
        digest=digest,
        parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in sorted(parts.items())],
        key=b"" if known is None else known.key,
        adopted=known is not None and known.adopted,
        blocks=blocks[0],
        hbm_blocks=blocks[1],
        dram_blocks=blocks[2],
        nvme_blocks=blocks[3],
    )


def _counts(columns: Columns) -> NDArray[np.int64]:
    """[namespaces, 4] blocks in all, in HBM, DRAM and on NVMe. Reads what the loop changes: about right. O(rows)."""
    sealed = states(columns.state) == State.SEALED
    size = columns.shape.max_namespaces
    of_row = np.minimum(columns.namespace, size - 1)
    in_hbm = (columns.hbm != NONE).any(axis=0)
    masks = (sealed, sealed & in_hbm, sealed & (columns.dram != NONE), sealed & (columns.nvme != NONE))
    return np.stack([np.bincount(of_row[mask], minlength=size) for mask in masks], axis=1)


def _blocks_of(columns: Columns, digest: bytes) -> int:
    """Blocks of the namespace that the tables call so. O(rows)."""
    handle = handle_of(columns, digest)
    if handle is None:
        return 0
    used = (columns.namespace == handle) & (states(columns.state) != State.FREE)
    return int(np.count_nonzero(used))
