"""What must be true of the disk tier, whatever dies: the bytes, what was acknowledged, what was cleared, the capacity.

A block's bytes follow from its hash, so nothing has to be remembered to tell whether they are right. What a flush
has acknowledged is remembered with the slot that had it then: a block that the living store has let go of (evicted,
cleared, unreadable) is owed no more; whatever it still had when everything died must be there afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.layout import NONE, Tier
from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import MOVE
from tests.simulation.disk import SimDisk
from tests.simulation.life import Life
from tests.simulation.shape import SLOT_BYTES, Wrong
from tiers.nvme.index import RECORD
from tiers.nvme.io import NvmeTier
from tiers.nvme.slab import list_slabs, stride_bytes

Key = tuple[int, int]  # the words of a hash

_POOL = np.random.default_rng(20261130).integers(0, 256, 8 * SLOT_BYTES, dtype=np.uint8).tobytes()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store has a block on disk."""

    slot: int
    generation: int


def payload(key: Key) -> bytes:
    """The bytes of a block."""
    at = key[0] % (7 * SLOT_BYTES)
    return key[0].to_bytes(8, "little") + key[1].to_bytes(8, "little") + _POOL[at : at + SLOT_BYTES - 16]


def key_of(words: np.ndarray) -> Key:
    """A hash as a key."""
    return int(words[0]), int(words[1])


def places(life: Life) -> dict[Key, Place]:
    """Every block that the store says the disk has."""
    columns, pool = life.columns, life.store._state.nvme
    rows = np.flatnonzero(columns.nvme != NONE)
    rows = rows[life.store._state.table.sealed(rows.astype(np.uint32))]
    slots = columns.nvme[rows]
    good = pool.sealed(slots) & (pool.row[slots] == rows)
    rows, slots = rows[good], slots[good]
    generations = pool.generations(slots)
    return {
        key_of(columns.hash[row]): Place(int(slot), int(generation))
        for row, slot, generation in zip(rows, slots, generations, strict=True)
    }


def on_path(life: Life, number: int) -> np.ndarray:
    """RECORD[] of those of one path, as a start would find them."""
    columns, pool = life.columns, life.store._state.nvme
    slots = np.array([place.slot for place in places(life).values()], dtype=np.uint32)
    slots = slots[pool.devices(slots) == number]
    rows, extents = pool.row[slots], pool.extent[slots]
    records = np.zeros(len(slots), dtype=RECORD)
    records["slab"] = life.movers.slabs.numbers(extents)
    records["slot"] = slots - columns.extent_slot_base[extents]
    records["generation"], records["length"] = pool.generations(slots), SLOT_BYTES
    records["hash"] = columns.hash[rows]
    records["ns_digest"] = life.store._state.namespaces.digests16(columns.namespace[rows])
    return records


def known(life: Life) -> set[Key]:
    """Every block that the store would serve from anywhere."""
    columns = life.columns
    rows = np.arange(len(columns.state), dtype=np.uint32)
    return {key_of(words) for words in columns.hash[rows[life.store._state.table.sealed(rows)]]}


def in_dram(life: Life) -> set[Key]:
    """Every block that is complete in DRAM."""
    columns, pool = life.columns, life.store._state.dram
    slots = np.arange(len(pool), dtype=np.uint32)
    return {key_of(columns.hash[row]) for row in pool.row[slots[pool.sealed(slots)]]}


def check_memory(life: Life) -> None:
    """The store's own invariants, and every complete slot of memory has its block's bytes."""
    faults = life.store.check_integrity()
    if faults:
        raise Wrong(f"integrity: {faults}")
    for tier in (Tier.HBM, Tier.DRAM):
        pool, memory = life.store._state.pool(tier), life.machine.memory(tier)
        slots = np.arange(len(pool), dtype=np.uint32)
        complete = pool.sealed(slots)
        if tier is Tier.DRAM:  # what nobody has looked at is given to those alone who compare
            complete &= ~life.store._state.checksums.unread(slots)
        for slot in slots[complete].tolist():
            extent, at = address(life, tier, slot)
            key = key_of(life.columns.hash[pool.row[slot]])
            if bytes(memory[extent][at : at + SLOT_BYTES]) != payload(key):
                raise Wrong(f"{tier.name} slot {slot} has other bytes than its block {key}")


def address(life: Life, tier: Tier, slot: int) -> tuple[int, int]:
    """(extent, offset in bytes) of a slot."""
    columns = life.columns
    extent = int(columns.pools[tier].extent[slot])
    stride = stride_bytes(SLOT_BYTES) if tier is Tier.NVME else SLOT_BYTES
    return extent, (slot - int(columns.extent_slot_base[extent])) * stride


class _Scratch:
    """Memory to read blocks into."""

    def __init__(self, slots: int) -> None:
        self.bytes = bytearray(slots * SLOT_BYTES)

    def view(self, extent: int) -> memoryview:
        return memoryview(self.bytes)


def read_records(folder: str, disk: SimDisk, records: np.ndarray) -> dict[Key, MoveStatus]:
    """Reads every block of RECORD[] of a path through the real tier: what became of each.

    Raises Wrong where one that the tier calls good has other bytes.
    """
    scratch = _Scratch(max(1, len(records)))
    tier = NvmeTier(Path(folder), scratch, disk=disk)  # type: ignore[arg-type]
    for slab in list_slabs(Path(folder), disk):
        tier.open_slab(slab.number, slab.number, slab.nbytes, slab.slot_bytes)
    moves = np.zeros(len(records), dtype=MOVE)
    moves["id"] = np.arange(1, len(records) + 1)
    moves["kind"] = MoveKind.READ
    moves["dram_offset"] = np.arange(len(records), dtype=np.uint64) * np.uint64(SLOT_BYTES)
    moves["nvme_extent"] = records["slab"]
    moves["nvme_offset"] = records["slot"].astype(np.uint64) * np.uint64(stride_bytes(SLOT_BYTES))
    moves["length"] = SLOT_BYTES
    for name in ("generation", "hash", "ns_digest"):
        moves[name] = records[name]
    replies = tier.transfer(moves)
    tier.close()
    found: dict[Key, MoveStatus] = {}
    statuses = dict(zip(replies["id"].tolist(), replies["status"].tolist(), strict=True))
    for at in np.argsort(
        records["touch"], kind="stable"
    ).tolist():  # of one that stands twice the newest counts
        key = key_of(records["hash"][at])
        found[key] = MoveStatus(statuses[at + 1])
        read = scratch.bytes[at * SLOT_BYTES : (at + 1) * SLOT_BYTES]
        if found[key] is MoveStatus.OK and read != payload(key):
            raise Wrong(f"the disk serves other bytes as block {key}")
    return found
