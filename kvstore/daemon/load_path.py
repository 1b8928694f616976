"""Takes over what a path holds while the daemon serves: a child builds, a thread copies, the loop enters it in pieces.

The child needs seconds for ten million blocks, and the loop a fraction of one, in turns of some 0.1 ms between which it
answers. Nobody sees a block before its turn; until then it is a miss. Owner loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import numpy as np

from kvstore.daemon.log import Log
from kvstore.daemon.nvme import FoundPath, SlabTable
from kvstore.daemon.owner import Owner
from kvstore.errors import KvstoreError, ResourceExhausted
from kvstore.tables.prebuilt import open_prebuilt
from kvstore.tiering.loading import FIRST_COLUMNS, LAST_COLUMNS, Loading, LoadSlab, RowCopy
from tiers.nvme.cleared import hash_of
from tiers.nvme.recover import Found
from tiers.nvme.slab import SlabFile

__all__ = ["load_path"]

_LOG = Log("loading")
_TURN_S = (
    0.000_3  # of the loop at a time, and as much again where a piece is larger: half of what an acquire takes
)


async def load_path(
    *,
    number: int,
    path: FoundPath,
    found: Found,
    slabs: list[SlabFile],
    owner: Owner,
    table: SlabTable,
    cleared: Mapping[bytes, int],
) -> int:
    """Makes the slabs of a path extents of the store and their blocks rows; returns how many blocks.

    `cleared` was cleared since the path was found. Raises KvstoreError, with nothing of it done.
    """
    began_s = asyncio.get_running_loop().time()
    owner.continue_after(found.blocks.newest_ms)
    wanted = [LoadSlab(slab=file.number, nbytes=file.nbytes, slot_bytes=file.slot_bytes) for file in slabs]
    load = owner.store.begin_load(number, wanted, found.blocks.blocks)
    if len(load.extents) < len(slabs):
        owner.warnings[f"extents-{number}"] = (
            f"{path.directory.path} is not used in full: the tables have room for {len(load.extents)} of its "
            f"{len(slabs)} slabs"
        )
    for digest in cleared:
        if (block := hash_of(digest)) is not None:
            load.leave_out_block(block)
        else:
            load.clear(owner.store.intern_namespace(digest) if digest else None)
    try:
        for file in slabs:
            if file.number in load.extents:
                table.set(load.extents[file.number], file.number, file.slot_bytes)
        memory = await _built(found, load, _handles(owner, found))
    except (KvstoreError, OSError):
        load.cancel()
        raise
    built = open_prebuilt(memory, load.plan)
    built_s = asyncio.get_running_loop().time() - began_s
    until_s = time.monotonic() + _TURN_S
    for _ in load.turns(built):
        if time.monotonic() > until_s:
            # Twice: what a call has put off to the next turn of the loop is part of its answer.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            until_s = time.monotonic() + _TURN_S
    owner.store.index_changes.written(number)
    _LOG.info(
        "blocks loaded",
        path=path.directory.path,
        found=found.blocks.blocks,
        loaded=load.loaded,
        built_s=round(built_s, 3),
        seconds=round(asyncio.get_running_loop().time() - began_s, 3),
    )
    return load.loaded


def _handles(owner: Owner, found: Found) -> dict[bytes, int]:
    """What the store calls the namespaces; one that it has no room for is left out."""
    handles: dict[bytes, int] = {}
    for digest in found.blocks.digests:
        try:
            handles[digest] = owner.store.intern_namespace(digest)
        except ResourceExhausted as error:
            owner.warnings["namespaces-on-disk"] = f"blocks of some namespaces stay on disk unused: {error}"
    return handles


async def _built(found: Found, load: Loading, handles: Mapping[bytes, int]) -> memoryview:
    """What the child has built, with the rows' columns copied."""
    plan = load.plan
    memory = await asyncio.to_thread(found.build_columns, plan, handles)
    first = asyncio.to_thread(_copy, load.copies(open_prebuilt(memory, plan), FIRST_COLUMNS))
    both = await asyncio.gather(first, asyncio.to_thread(found.build_rest), return_exceptions=True)
    for done in both:
        if isinstance(done, BaseException):
            raise done
    await asyncio.to_thread(_copy, load.copies(open_prebuilt(memory, plan), LAST_COLUMNS))
    return memory


def _copy(copies: Iterable[RowCopy]) -> None:
    """In a thread: each piece is copied without the GIL."""
    for copy in copies:
        np.copyto(copy.target, copy.source)
