"""Exports a namespace of a running service into one file, without holding, moving or asking for a block.

Memory: two batches of at most 16 MiB each and their packed copies, 64 MiB in all, and the mapped tables. The file is
written under another name and renamed when it is complete and on the medium; what a killed export leaves is a file
that was cut short, and can be imported as such.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiofiles
import numpy as np

from kvstore.client import Client, Compares, Targets
from kvstore.errors import FailedPrecondition, NotFound
from kvstore.geometry import opaque_geometry
from kvstore.layout import NONE, Columns, Tier
from kvstore.transfer.archive import Header, RunningDigest, pack_end, pack_header
from kvstore.transfer.plan import Planned, handle_of, plan
from kvstore.transfer.source import Batch, SlabPlace, Source, Unmapping
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = [
    "Exported",
    "Readable",
    "Written",
    "export_namespace",
    "unfinished",
    "write_archive",
]

_BATCH_BYTES = 16 << 20
_BATCH_BLOCKS = 4096

Admin = Callable[[str, Any], Any]
"""One call of service Admin: method and request."""
Progress = Callable[[int, int], None]
"""Told of blocks done and blocks in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export did, in blocks."""

    blocks: int
    gone: int
    """Left the store before they were read."""
    unread: int
    """Are in the store and could not be read: the file lacks them."""
    hbm_only: int
    """Only in HBM, which nobody but its engine can read: written through, they would have been in DRAM."""
    other_size: int
    """Of a namespace with blocks of several sizes, those that are not of the most common one."""
    slot_bytes: int
    file_bytes: int
    seconds: float
    unopened: tuple[str, ...] = ()
    """Slabs that an export without a service could not open, with the reason: no count has their blocks."""


def unfinished(file: Path) -> Path:
    """Where an export is written until it is complete."""
    return file.with_name(f"{file.name}.part")


async def export_namespace(
    client: Client, admin: Admin, info: pb.NamespaceInfo, file: Path, *, progress: Progress
) -> Exported:
    """Writes the namespace that `info` (of the call Namespaces) describes.

    Raises NotFound where it has no blocks, FailedPrecondition where its parts are not known, OSError of the file.
    """
    if not info.parts:
        raise FailedPrecondition(
            "no engine has opened this namespace since its parts are remembered: attach its engine once"
        )
    began_s = time.monotonic()
    geometry = opaque_geometry(4096)
    targets = Targets(credit=0, room=0)
    unmapping = Unmapping()
    attach = functools.partial(client.attach, targets=targets, listener=unmapping, compares=Compares.LOADS)
    session = await asyncio.to_thread(attach, "export", geometry, None)
    try:
        columns = session.tables.tables.columns
        handle = handle_of(columns, info.digest)
        planned = None if handle is None else await asyncio.to_thread(plan, columns, handle)
        if planned is None or not len(planned):
            raise NotFound("this namespace has no blocks")
        sizes = _sizes(columns, planned)
        slot_bytes = int(np.bincount(sizes // 4096).argmax()) * 4096
        if not slot_bytes:
            raise FailedPrecondition(
                "every block of this namespace is in HBM alone, where only its engine reads"
            )
        fitting = (sizes == slot_bytes) | (sizes == 0)
        source = await asyncio.to_thread(
            Source,
            columns,
            session.dram,
            unmapping,
            functools.partial(_slabs, admin),
            namespace_digest=info.digest,
            slot_bytes=slot_bytes,
        )
        try:
            wanted = planned.take(np.flatnonzero(fitting))
            done = await write_archive(info, file, source, wanted, slot_bytes, progress)
        finally:
            source.close()
    finally:
        await asyncio.to_thread(session.close)
    return Exported(
        blocks=done.blocks,
        gone=done.gone,
        unread=done.unread,
        hbm_only=done.hbm_only,
        other_size=int(np.count_nonzero(~fitting)),
        slot_bytes=slot_bytes,
        file_bytes=done.file_bytes,
        seconds=time.monotonic() - began_s,
    )


def _slabs(admin: Admin) -> dict[int, SlabPlace]:
    reply: pb.SlabsReply = admin("Slabs", pb.SlabsRequest())
    return {
        slab.extent: SlabPlace(directory=Path(slab.directory), number=slab.number, slot_bytes=slab.slot_bytes)
        for slab in reply.slabs
    }


def _sizes(columns: Columns, planned: Planned) -> np.typing.NDArray[np.int64]:
    """[n] slot size of each block, by the copy in DRAM or else on disk; 0 where only HBM has it."""
    sizes = np.zeros(len(planned), dtype=np.int64)
    for tier, column in ((Tier.NVME, columns.nvme), (Tier.DRAM, columns.dram)):
        slots = column[planned.rows]
        there = slots != NONE
        extents = columns.pool(tier).extent[slots[there]]
        sizes[there] = columns.extent_slot_bytes[extents].astype(np.int64)
    return sizes


class Readable(Protocol):
    """Where blocks come from."""

    def read(self, planned: Planned) -> Batch:
        """These blocks, in this order; blocks. One call at a time."""
        ...


@dataclass(slots=True)
class Written:
    """What went into a file, and what did not."""

    blocks: int = 0
    gone: int = 0
    unread: int = 0
    hbm_only: int = 0
    file_bytes: int = 0


async def write_archive(
    info: pb.NamespaceInfo,
    file: Path,
    source: Readable,
    planned: Planned,
    slot_bytes: int,
    progress: Progress,
) -> Written:
    """Writes these blocks of a namespace. Raises OSError."""
    header = Header(
        parts={part.tag: part.value for part in info.parts},
        key=info.key,
        slot_bytes=slot_bytes,
        planned_blocks=len(planned),
        created_ms=time.time_ns() // 1_000_000,
    )
    return await _Writer(file, source, planned, progress).write(header)


class _Writer:
    """Reads one batch in a thread while the last one is written."""

    def __init__(self, file: Path, source: Readable, planned: Planned, progress: Progress) -> None:
        self._file = file
        self._source = source
        self._planned = planned
        self._progress = progress

    async def write(self, header: Header) -> Written:
        part = unfinished(self._file)
        done, digest = Written(), RunningDigest()
        async with aiofiles.open(part, "wb", opener=_private) as out, self._batches(header) as batches:
            done.file_bytes += await out.write(pack_header(header))
            async for batch in batches:
                for head in batch.heads:
                    digest.add(head)
                done.file_bytes += await out.write(batch.packed)
                done.blocks += len(batch.heads)
                done.gone += batch.gone
                done.unread += batch.unread
                done.hbm_only += batch.hbm_only
                looked_at = done.blocks + done.gone + done.unread + done.hbm_only
                self._progress(looked_at, len(self._planned))
            done.file_bytes += await out.write(pack_end(digest.end()))
            await out.flush()
            await asyncio.to_thread(os.fsync, out.fileno())
        part.rename(self._file)
        return done

    @asynccontextmanager
    async def _batches(self, header: Header) -> AsyncIterator[AsyncIterator[Batch]]:
        step = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // header.slot_bytes))
        reading: set[asyncio.Task[Batch]] = set()  # one at most: a source's calls share what they read with

        async def finished() -> Batch:
            await asyncio.wait(reading)  # not the task itself: cancelled, it would leave its thread behind
            return reading.pop().result()

        async def ahead() -> AsyncIterator[Batch]:
            for begin in range(0, len(self._planned), step):
                part = self._planned.part(begin, begin + step)
                last = await finished() if reading else None
                reading.add(asyncio.create_task(asyncio.to_thread(self._source.read, part)))
                if last is not None:
                    yield last
            if reading:
                yield await finished()

        try:
            yield ahead()
        finally:
            if reading:  # threads end before the files that they read are closed
                await asyncio.wait(reading)


def _private(path: str, flags: int) -> int:
    """Blocks are plaintext prompts, and the header has the key that finds them."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
