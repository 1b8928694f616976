"""What a client notes of copies that have completed, until its next step tells the daemon: which, and their checksums.

A session that *compares* (`Compares.LOADS`) takes the checksum of each block that it loads and holds it against what
the tables have of the DRAM slot. So nobody below it has to: a disk's mover gives such sessions blocks that it has not
looked at. Its word that a load differs ends the block where the bytes came from.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvstore.client.credit import SlotRun
from kvstore.layout import Columns
from kvstore.tables.checksums import Checksums
from kvstore.wire.packed import COPY
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["COPIED", "Compares", "checksums_of", "copied", "differing", "put_copies", "widened"]

Records = NDArray[np.void]
U64 = NDArray[np.uint64]

_NAMES = COPY.names or ()
COPIED = np.dtype([*((name, "<u4") for name in _NAMES), ("differs", "<u8"), ("checksum", "<u8", 2)])
"""40 bytes: a COPY; whether it came out other than it was stored (1), as a load may; and the checksum of a store, zeros
where that is not known."""


class Compares(Enum):
    """What a session holds against its checksum."""

    NOTHING = "nothing"
    LOADS = "loads"


def copied(
    sources: SlotRun,
    targets: SlotRun,
    *,
    checksums: U64 | None = None,
    differs: NDArray[np.bool_] | None = None,
) -> Records:
    """COPIED[n] of copies that have completed."""
    records = np.zeros(len(sources), dtype=COPIED)
    records["source"], records["source_generation"] = sources.slots, sources.generations
    records["target"], records["target_generation"] = targets.slots, targets.generations
    if checksums is not None:
        records["checksum"] = checksums
    if differs is not None:
        records["differs"] = differs
    return records


def widened(records: Records) -> Records:
    """COPIED[n] of COPY[n] or COPIED[n]."""
    if records.dtype == COPIED:
        return records
    wide = np.zeros(len(records), dtype=COPIED)
    for name in _NAMES:
        wide[name] = records[name]
    return wide


def checksums_of(columns: Columns, slots: NDArray[np.uint32]) -> U64:
    """[n, 2] checksums of the blocks in these DRAM slots, which are held; zeros where there is none."""
    table = Checksums(columns)
    return np.where(table.known(slots)[:, None], table.of(slots), np.uint64(0))


def differing(found: U64, expected: U64) -> NDArray[np.bool_]:
    """[n] which blocks have another checksum, of those for which one is expected; [n, 2] each, zeros: none is."""
    differs: NDArray[np.bool_] = (found != expected).any(axis=1) & expected.any(axis=1)
    return differs


def put_copies(step: pb.Step, loads: Records, stores: Records) -> None:
    """Writes COPY[] or COPIED[] into a message."""
    if len(loads):  # a step of decoding has mostly neither
        loads = widened(loads)
        differs = loads["differs"] != 0
        step.loads = _copies(loads[~differs])
        step.wrong_loads = _copies(loads[differs])
    if len(stores):
        stores = widened(stores)
        step.stores = _copies(stores)
        if stores["checksum"].any():
            step.store_checksums = stores["checksum"].tobytes()


def _copies(records: Records) -> bytes:
    """COPY[n] as bytes."""
    copies = np.empty(len(records), dtype=COPY)
    for name in _NAMES:
        copies[name] = records[name]
    return copies.tobytes()
