"""Imports an exported file into a running service: blocks are proved, sealed into DRAM, and flushed to disk in turns.

A session like any other, without HBM: what it fills others hit at once. What is there already is passed over, so an
import that was killed is simply run again. Memory: two batches of at most 16 MiB, and the mapped tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client, Compares, Namespace, Session, Targets
from kvstore.errors import FailedPrecondition, KvstoreError, Unavailable
from kvstore.geometry import opaque_geometry
from kvstore.layout import State, states
from kvstore.transfer.archive import (
    END_BYTES,
    HEAD_BYTES,
    PREFIX_BYTES,
    BlockHead,
    Header,
    RunningDigest,
    payload_checksum,
    read_end,
    read_head,
    read_header,
    rest_of_header,
)
from kvstore.transfer.export import Admin
from kvstore.transfer.sealer import Sealer
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Imported", "check_file", "import_file"]

_BATCH_BYTES = 16 << 20
_BATCH_BLOCKS = 4096
_FLUSH_S = 60.0
_TOUCH_S = 5.0
_GROWTH_S, _GROWTH_POLL_S = 60.0, 1.0
_USABLE = 0.9  # of a tier: what is beyond would put out what came first

Progress = Callable[[int, int], None]
"""Told of blocks done and blocks in all."""


@dataclass(slots=True, kw_only=True)
class Imported:
    """What an import found and did, in blocks."""

    stored: int = 0
    known: int = 0
    """Were there already."""
    damaged: int = 0
    """Not what was exported, by their checksums."""
    no_room: int = 0
    """Not read: the tier that would keep them is full of blocks before them."""
    put_out: int = 0
    """Of those stored, gone again by the end: other blocks needed their room."""
    not_durable: int = 0
    """Stored, and not on disk in time; on a machine without a disk all of them."""
    complete: bool = False
    """Whether the file has its end, and the end agrees with what was read."""
    why_not: str = ""
    """Else what is wrong with it."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Block:
    head: BlockHead
    payload: memoryview


class _File:
    """An open export."""

    def __init__(self, file: Any, header: Header, begin: int, size: int) -> None:
        self._file = file
        self.header = header
        self._begin = begin
        self._size = size
        self._record_bytes = HEAD_BYTES + header.slot_bytes
        self.records = (size - begin) // self._record_bytes
        self.digest = RunningDigest()

    async def batches(self, blocks: int, found: Imported) -> AsyncIterator[list[_Block]]:
        """Whole blocks in turns of at most `blocks`; damaged ones are counted. The digest grows meanwhile."""
        await self._file.seek(self._begin)
        for begin in range(0, self.records, blocks):
            buffer = bytearray(min(blocks, self.records - begin) * self._record_bytes)
            count = await self._file.readinto(buffer)
            whole = memoryview(buffer)[: count - count % self._record_bytes]
            yield await asyncio.to_thread(self._proved, whole, found)

    def _proved(self, whole: memoryview, found: Imported) -> list[_Block]:
        good: list[_Block] = []
        for begin in range(0, len(whole), self._record_bytes):
            packed = whole[begin : begin + HEAD_BYTES]
            payload = whole[begin + HEAD_BYTES : begin + self._record_bytes]
            head = read_head(packed)
            self.digest.add(bytes(packed))
            if head is None or payload_checksum(payload) != head.checksum:
                found.damaged += 1
            else:
                good.append(_Block(head, payload))
        return good

    async def judge(self, found: Imported) -> None:
        """After all records: whether the file is complete."""
        at = self._begin + self.records * self._record_bytes
        await self._file.seek(at)
        end = read_end(await self._file.read(END_BYTES + 1))
        if end is None:
            missing = max(0, self.header.planned_blocks - self.records)
            found.why_not = f"the file was cut short: up to {missing} blocks are missing"
        elif end != self.digest.end():
            found.why_not = "the file is not what was exported: blocks are damaged, missing or exchanged"
        else:
            found.complete = True


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[_File]:
    """Raises Corruption where it is no export, OSError."""
    async with aiofiles.open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = await file.read(PREFIX_BYTES)
        rest = await file.read(rest_of_header(prefix))
        header = read_header(prefix + rest)
        yield _File(file, header, len(prefix) + len(rest), size)


async def check_file(path: Path, *, progress: Progress) -> tuple[Header, Imported]:
    """Proves a file without a service: `stored` is then how many blocks are whole. Raises Corruption, OSError."""
    found = Imported()
    began_s = time.monotonic()
    async with _opened(path) as opened:
        async for batch in opened.batches(_blocks_a_batch(opened.header), found):
            found.stored += len(batch)
            progress(found.stored + found.damaged, opened.records)
        await opened.judge(found)
        found.seconds = time.monotonic() - began_s
        return opened.header, found


async def import_file(
    client: Client, admin: Admin, path: Path, *, replace_key: bool, progress: Progress
) -> tuple[Header, Imported]:
    """Stores what is whole in a file. Raises FailedPrecondition where that would cost blocks, Corruption, OSError."""
    began_s = time.monotonic()
    async with _opened(path) as opened:
        header = opened.header
        stats = await _grown(client)
        if stats.cache_use in (pb.CACHE_USE_OFF, pb.CACHE_USE_READ):
            raise FailedPrecondition("the service is paused by its administrator: nothing is stored")
        await asyncio.to_thread(_adopt_key, admin, header, replace_key)
        room = _room(stats)
        session = await asyncio.to_thread(
            client.attach,
            "import",
            opaque_geometry(header.slot_bytes),
            None,
            targets=Targets(credit=0, room=room.ahead(header.slot_bytes)),
            compares=Compares.LOADS,  # of which it makes none
        )
        try:
            namespace = await asyncio.to_thread(session.open_namespace, header.parts)
            if namespace.key != header.key:
                raise KvstoreError("the service did not take the key of this namespace; its log says why")
            taking = _Taking(client, session, namespace, header, room)
            found = await taking.take(opened, progress)
        finally:
            await asyncio.to_thread(session.close)
    found.seconds = time.monotonic() - began_s
    return header, found


def _blocks_a_batch(header: Header) -> int:
    return max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // header.slot_bytes))


def _adopt_key(admin: Admin, header: Header, replace_key: bool) -> None:
    request = pb.AdoptKeyRequest(
        parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in header.parts.items()],
        key=header.key,
        replace=replace_key,
    )
    admin("AdoptKey", request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What the service can keep, in bytes."""

    usable_bytes: int
    window_bytes: int
    """Between two flushes; 0 without a disk."""
    dram_bytes: int

    def ahead(self, slot_bytes: int) -> int:
        """Slots to have in hand: few, since each puts something out where DRAM is full."""
        return max(4, min(256, self.dram_bytes // 32 // slot_bytes))


async def _grown(client: Client) -> pb.StatsReply:
    """The service's gauges once its DRAM is all there: it comes in pieces after a start, and evicts until then."""
    until_s = time.monotonic() + _GROWTH_S
    before = -1
    while True:
        stats = await asyncio.to_thread(client.stats)
        dram = next(tier for tier in stats.tiers if tier.tier == "dram")
        now = dram.allocated_bytes
        if now >= dram.capacity_bytes or now == before or time.monotonic() > until_s:
            return stats
        before = now
        await asyncio.sleep(_GROWTH_POLL_S)


def _room(stats: pb.StatsReply) -> _Room:
    tiers = {tier.tier: tier for tier in stats.tiers}
    disk, dram = tiers["nvme"].capacity_bytes, tiers["dram"].allocated_bytes
    if disk:
        return _Room(usable_bytes=int(disk * _USABLE), window_bytes=max(1, dram // 4), dram_bytes=dram)
    return _Room(usable_bytes=int(dram * _USABLE), window_bytes=0, dram_bytes=dram)


class _Taking:
    """The blocks of one file on their way into the service."""

    def __init__(
        self, client: Client, session: Session, namespace: Namespace, header: Header, room: _Room
    ) -> None:
        self._client = client
        self._session = session
        self._namespace = namespace
        self._header = header
        self._room = room
        self._sealer = Sealer(session, namespace)
        self._unflushed = 0
        self._taken: list[NDArray[np.uint64]] = []
        """Hashes of each batch."""

    async def take(self, opened: _File, progress: Progress) -> Imported:
        found = Imported()
        usable = self._room.usable_bytes // self._header.slot_bytes
        async for batch in opened.batches(_blocks_a_batch(self._header), found):
            known = self._known(batch).tolist() if batch else []
            new = [block for block, there in zip(batch, known, strict=True) if not there]
            found.known += len(batch) - len(new)
            fitting = new[: max(0, usable - found.stored)]
            found.no_room += len(new) - len(fitting)
            await self._store(fitting, found)
            progress(found.stored + found.known + found.damaged + found.no_room, opened.records)
        await self._flush(found)
        await asyncio.to_thread(self._touch)
        found.put_out = sum(int(np.count_nonzero(~self._has(hashes))) for hashes in self._taken)
        await opened.judge(found)
        return found

    def _known(self, batch: list[_Block]) -> NDArray[np.bool_]:
        """[n] blocks that some tier has. A hint: what is sealed twice is refused by the service."""
        return self._has(_hashes(batch))

    def _has(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        tables = self._session.tables.tables
        rows = tables.index.find(hashes)
        there = rows < tables.columns.shape.max_rows
        safe = np.where(there, rows, 0)
        known: NDArray[np.bool_] = there & (states(tables.columns.state[safe]) == State.SEALED)
        known &= tables.columns.namespace[safe] == self._namespace.handle
        return known

    def _touch(self) -> None:
        """What came first was used last where it came from: without this it would be the first to go."""
        for hashes in reversed(self._taken):
            with contextlib.suppress(KvstoreError):  # only recency is lost
                self._session.acquire(self._namespace, 1, hashes, first=len(hashes)).result(_TOUCH_S)

    async def _store(self, blocks: list[_Block], found: Imported) -> None:
        if not blocks:
            return
        self._taken.append(_hashes(blocks))
        pairs = [(block.head, block.payload) for block in blocks]
        sealed = await asyncio.to_thread(self._sealer.seal, pairs)
        found.stored += sealed
        found.known += len(blocks) - sealed
        self._unflushed += sealed * self._header.slot_bytes
        if self._room.window_bytes and self._unflushed >= self._room.window_bytes:
            await self._flush(found)

    async def _flush(self, found: Imported) -> None:
        """Has the disk take what came, so that DRAM never has to give up what nothing else has."""
        if not self._room.window_bytes:
            found.not_durable = found.stored
            return
        if self._unflushed:
            try:
                reply = await asyncio.to_thread(self._client.flush, _FLUSH_S)
            except Unavailable:  # it is being restarted; what was sealed is in memory that stays
                return
            found.not_durable = int(reply.pending_blocks)
            self._unflushed = 0


def _hashes(blocks: list[_Block]) -> NDArray[np.uint64]:
    """[n, 2]"""
    return np.frombuffer(b"".join(block.head.hash for block in blocks), dtype="<u8").reshape(-1, 2)
