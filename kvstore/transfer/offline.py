"""Exports out of the folders of a service that does not run: its locks, its slabs, its secret and what it remembers.

Finds blocks by the trailers of all slots, as a start without an index would, so also those of slots that were free by
then: whole blocks of that namespace all the same. What was cleared stays out. Blocks: called in a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.daemon.namespaces import KnownNamespace, known_namespaces, read_beside_slabs
from kvstore.errors import AlreadyExists, ConfigError, NotFound
from kvstore.transfer.export import Exported, Progress, write_archive
from kvstore.transfer.plan import DIGEST_BYTES, Planned, hottest_first
from kvstore.transfer.source import Batch, SlabPlace, SlabReader, pack_blocks
from kvstore.wire.v1 import kvstore_pb2 as pb
from tiers.nvme.cleared import read_cleared, without_cleared
from tiers.nvme.directory import lock_existing, read_secret
from tiers.nvme.scan import scan_slabs, unopenable
from tiers.nvme.slab import list_slabs

__all__ = ["Offline", "opened_folders"]


class Offline:
    """The locked folders of one service, and the blocks in them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError where there is no secret, Corruption where the file of clears is damaged."""
        self._folders = folders
        secret = next((secret for folder in folders if (secret := read_secret(folder)) is not None), None)
        if secret is None:
            raise ConfigError(f"nvme: {folders[0]} has no secret: no service has ever used it")
        text = read_beside_slabs([str(folder) for folder in folders])
        known = {} if text is None else known_namespaces(text, secret)
        self._known: dict[bytes, KnownNamespace] = {
            each.row_digest[:DIGEST_BYTES]: each for each in known.values()
        }
        self.unopened = tuple(text for folder in folders for text in unopenable(folder, list_slabs(folder)))
        """Slabs that cannot be opened, with the reason: whose blocks are in them nobody knows."""
        found = [_records(folder) for folder in folders]
        self._records: NDArray[np.void] = np.concatenate(found)
        self._folder_of = np.repeat(np.arange(len(folders)), [len(part) for part in found])

    def namespaces(self) -> list[pb.NamespaceInfo]:
        """What is there, as a running service says it."""
        packed = np.ascontiguousarray(self._records["ns_digest"]).view("V16").reshape(-1)
        digests, counts = np.unique(packed, return_counts=True)
        blocks = {digest.tobytes(): int(count) for digest, count in zip(digests, counts, strict=True)}
        return [
            _info(digest, self._known.get(digest), blocks.get(digest, 0))
            for digest in sorted({*blocks, *self._known})
        ]

    async def export(self, info: pb.NamespaceInfo, file: Path, progress: Progress) -> Exported:
        """Writes a namespace. Raises NotFound where it has no blocks or its parts are not known, OSError."""
        began_s = time.monotonic()
        if not info.parts:
            raise NotFound(
                "the parts of this namespace are not known: start the service and attach its engine once"
            )
        mine = (self._records["ns_digest"] == np.frombuffer(info.digest, dtype="<u8")).all(axis=1)
        if not mine.any():
            raise NotFound("this namespace has no blocks")
        slot_bytes = int(np.bincount(self._records["length"][mine] // 4096).argmax()) * 4096
        fitting = mine & (self._records["length"] == slot_bytes)
        at = np.flatnonzero(fitting)
        source = _Source(self, at, info.digest, slot_bytes)
        try:
            done = await write_archive(info, file, source, source.planned, slot_bytes, progress)
        finally:
            source.close()
        return Exported(
            blocks=done.blocks,
            gone=done.gone,
            unread=done.unread,
            hbm_only=0,
            other_size=int(np.count_nonzero(mine & ~fitting)),
            slot_bytes=slot_bytes,
            file_bytes=done.file_bytes,
            unopened=self.unopened,
            seconds=time.monotonic() - began_s,
        )

    def place(self, at: int) -> tuple[SlabPlace, int]:
        """Where a record's block lies: its slab, and which slot of it."""
        record = self._records[at]
        place = SlabPlace(
            directory=self._folders[int(self._folder_of[at])],
            number=int(record["slab"]),
            slot_bytes=int(record["length"]),
        )
        return place, int(record["slot"])

    def hashes(self, at: NDArray[np.intp]) -> NDArray[np.uint64]:
        """[n, 2] of these records."""
        found: NDArray[np.uint64] = self._records["hash"][at]
        return found

    def planned(self, at: NDArray[np.intp]) -> Planned:
        """These records as blocks to export, the most recently written first, parents before children."""
        records = self._records[at]
        positions = {block.tobytes(): position for position, block in enumerate(records["hash"])}
        parents = np.array(
            [positions.get(parent.tobytes(), -1) for parent in records["parent"]], dtype=np.int64
        )
        depths, touches = records["depth"].astype(np.uint32), records["touch"].astype(np.uint64)
        known = parents >= 0
        known[known] = depths[parents[known]] + 1 == depths[known]
        whole = Planned(
            rows=at.astype(np.uint32),
            words=np.zeros(len(at), dtype=np.uint64),
            hashes=records["hash"].copy(),
            parents=records["parent"].copy(),
            depths=depths,
            touches=touches,
        )
        return whole.take(hottest_first(np.where(known, parents, -1), depths, touches))


class _Source:
    """Some records' blocks, each once; `rows` of what is planned are positions of records."""

    def __init__(self, offline: Offline, at: NDArray[np.intp], digest: bytes, slot_bytes: int) -> None:
        self._offline = offline
        self._slot_bytes = slot_bytes
        self._reader = SlabReader(digest, slot_bytes)
        hashes = offline.hashes(at)
        _, first = np.unique(hashes, axis=0, return_index=True)
        self.planned = offline.planned(at[np.sort(first)])
        self._others: dict[bytes, list[int]] = {}  # copies on other disks
        for again in np.setdiff1d(np.arange(len(at)), first).tolist():
            self._others.setdefault(hashes[again].tobytes(), []).append(int(at[again]))

    def read(self, planned: Planned) -> Batch:
        payloads = np.empty((len(planned), self._slot_bytes), dtype=np.uint8)
        good = np.zeros(len(planned), dtype=np.bool_)
        for at, row in enumerate(planned.rows.tolist()):
            block = planned.hashes[at].tobytes()
            records = (row, *self._others.get(block, ()))
            good[at] = any(self._read(record, block, payloads[at]) for record in records)
        return pack_blocks(planned, payloads, good, hbm_only=0, unread=int(np.count_nonzero(~good)))

    def _read(self, record: int, block: bytes, payload: NDArray[np.uint8]) -> bool:
        place, slot = self._offline.place(record)
        return self._reader.read(place, slot, block, payload)

    def close(self) -> None:
        self._reader.close()


@contextmanager
def opened_folders(paths: Sequence[str]) -> Iterator[Offline]:
    """The folders of a service, locked for as long as the block runs.

    Raises AlreadyExists while a service, or its mover, has one; ConfigError where one is no path of kvstore.
    """
    if not paths:
        raise ConfigError("no NVMe path is configured: without a service there is nothing to export from")
    folders = [Path(path) for path in paths]
    with ExitStack() as held:
        for folder in folders:
            try:
                held.callback(os.close, lock_existing(folder))
            except AlreadyExists as error:
                raise AlreadyExists(
                    f"{error.message}: export from that service without --offline, or stop it first"
                ) from None
        yield Offline(folders)


def _records(folder: Path) -> NDArray[np.void]:
    return without_cleared(scan_slabs(folder, list_slabs(folder)), read_cleared(folder))


def _info(digest: bytes, known: KnownNamespace | None, blocks: int) -> pb.NamespaceInfo:
    parts = {} if known is None else known.parts
    return pb.NamespaceInfo(
        digest=digest,
        parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in sorted(parts.items())],
        key=b"" if known is None else known.key,
        adopted=known is not None and known.adopted,
        blocks=blocks,
        nvme_blocks=blocks,
    )
