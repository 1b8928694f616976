"""The shared tables: what every column is and where it lies in the memory that the caller gives.

Owns the vocabulary of states and the map from a `TableShape` to byte offsets. The daemon alone writes; clients map
the same memory read-only and open it with the header alone. The state word of a row or slot is its commit: other
columns are filled before it is set, and it is cleared before they change (ARCHITECTURE.md, "Order of writes").
Everything is little-endian and 64-byte aligned. Columns, not structured rows: a gather of one field over rows is
twice as fast (FACTS: 2.6 against 5.5 ms an acquire of 4,096 at 10 M rows).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "BUCKET_ENTRIES",
    "GENERATION_SHIFT",
    "MAX_MOVERS",
    "MAX_SESSIONS",
    "MOVER_BIT",
    "NONE",
    "Columns",
    "ExtentState",
    "PoolColumns",
    "SessionState",
    "SlotState",
    "State",
    "TableShape",
    "Tier",
    "generations",
    "latest_touch_ms",
    "open_columns",
    "read_shape",
    "state_word",
    "states",
    "table_bytes",
    "touch_key",
    "write_header",
]

NONE = 0xFFFFFFFF
"""No row, no slot."""
MAX_SESSIONS = 48
"""Bits 0..47 of a slot's `holders` word."""
MOVER_BIT = 48
"""Bits 48..63 of a slot's `holders` word are the movers'."""
MAX_MOVERS = 16
BUCKET_ENTRIES = 8
GENERATION_SHIFT = np.uint64(8)

_STATE_MASK = np.uint64(0xFF)
_MAGIC = b"KVSTABL3"
_ALIGN = 64
_HEADER_BYTES = 4096
_DISTRUSTS_AT = 2048
"""Of the header: zeros in tables of daemons that did not know it."""
_FORBIDDEN_AT = _DISTRUSTS_AT + _ALIGN
"""Likewise: nothing is taken away."""
_DEPTH_BITS = 20
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1


class Tier(enum.IntEnum):
    """Where bytes lie; a smaller number is nearer to the engine."""

    HBM = 0
    DRAM = 1
    NVME = 2


class State(enum.IntEnum):
    """State of a block's row."""

    FREE = 0
    FILLING = 1  # its hash is reserved by a slot that is being filled; no tier has it yet
    SEALED = 2  # at least one tier has it
    CLEARED = 3  # by an administrator: nobody finds it any more, and its slots come back bit by bit


class SlotState(enum.IntEnum):
    """State of a slot of any tier."""

    FREE = 0
    FILLING = 1  # given to a session or a mover that writes it
    SEALED = 2  # holds the complete block of its row
    QUARANTINED = 3  # nvme: the medium under it failed; never given out again
    DISTRUSTED = 4  # memory: a block that was found wrong while somebody held it; free when the last lets go


class ExtentState(enum.IntEnum):
    """State of an extent."""

    FREE = 0  # the entry is unused
    UNASSIGNED = 1  # memory is there, no slot class yet
    READY = 2  # cut into slots
    DRAINING = 3  # gives out no more slots; leaves when its last slot is free
    LOADING = 4  # nvme: cut into slots, whose blocks are being found; gives none out yet


class SessionState(enum.IntEnum):
    """State of a session."""

    FREE = 0
    ATTACHING = 1  # its members have not presented themselves yet
    ATTACHED = 2
    LOST = 3  # its stream is gone, its processes may live: what it holds stays held, it gets nothing new
    DYING = 4  # some members are dead, not all


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Sizes that fix the layout. All are counts of entries."""

    max_rows: int
    hbm_slots: int
    dram_slots: int
    nvme_slots: int
    devices: int = 1
    max_extents: int = 4096
    max_sessions: int = MAX_SESSIONS
    max_namespaces: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 1 <= value < NONE:
                raise InvalidArgument(f"{field.name} must be between 1 and {NONE - 1}, not {value}")
        if self.max_sessions > MAX_SESSIONS:
            raise InvalidArgument(f"max_sessions is at most {MAX_SESSIONS}, not {self.max_sessions}")
        if self.devices > 255 or self.max_extents > 65535:
            raise InvalidArgument("at most 255 devices and 65535 extents")

    @property
    def buckets(self) -> int:
        """Buckets of the index: a power of two, at most half full when every row is used.

        A block whose two buckets are full is not cached and ends the prefix of all behind it. Measured under turnover,
        of a million entries: 0 at 0.5 full, 60 at 0.64, 1,200 at 0.7, 21,000 at 0.8.
        """
        wanted = -(-self.max_rows * 2 // BUCKET_ENTRIES)
        return 1 << max(1, (wanted - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolColumns:
    """Columns of the slots of one tier. The NVMe tier has no `holders`: nothing maps it."""

    state: NDArray[np.uint64]  # [slots] generation << 8 | SlotState
    row: NDArray[np.uint32]  # [slots] row whose block it holds or is being filled for; NONE
    extent: NDArray[np.uint16]  # [slots] extent that it lies in
    holders: NDArray[np.uint64]  # [slots] bit s: session s, bit 48 + m: mover m; zero-length for NVMe


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Every column of the tables, as views of one memory."""

    shape: TableShape
    distrusts: NDArray[np.uint64]  # [1] times that slots became DISTRUSTED, counted once they are
    forbidden: NDArray[np.uint8]
    """[1 + n] bits of `Access` that are taken away: at 0 from everybody, at 1 + h from requests with namespace h. For
    clients, so that a lookup promises nothing that an acquire refuses. Namespaces from n on have none: a hint."""
    # blocks, one row a block
    state: NDArray[np.uint64]  # [rows] generation << 8 | State
    hash: NDArray[np.uint64]  # [rows, 2]
    namespace: NDArray[np.uint32]  # [rows]
    parent: NDArray[np.uint32]  # [rows] row of the parent when it was stored; NONE
    depth: NDArray[np.uint32]  # [rows] blocks before it
    touch: NDArray[np.uint64]  # [rows] `touch_key`: the smaller goes first
    priority: NDArray[np.uint8]  # [rows] 0 normal; higher stays longer
    hbm: NDArray[np.uint32]  # [devices, rows] slot or NONE
    dram: NDArray[np.uint32]  # [rows] slot or NONE
    nvme: NDArray[np.uint32]  # [rows] slot or NONE
    # slots
    pools: tuple[PoolColumns, PoolColumns, PoolColumns]  # by Tier
    nvme_changed: NDArray[np.uint8]  # [nvme slots] not 0: the durable index has to learn of it
    # index
    tags: NDArray[np.uint32]  # [buckets, 8]
    rows: NDArray[np.uint32]  # [buckets, 8] row or NONE
    # extents
    extent_tier: NDArray[np.uint8]  # [extents]
    extent_device: NDArray[np.uint8]  # [extents] HBM device or NVMe path
    extent_state: NDArray[np.uint8]  # [extents] ExtentState
    extent_slot_bytes: NDArray[np.uint64]  # [extents]
    extent_slot_base: NDArray[np.uint32]  # [extents] its slots are [base, base + slots)
    extent_slots: NDArray[np.uint32]  # [extents]
    extent_bytes: NDArray[np.uint64]  # [extents]
    extent_identity: NDArray[np.uint64]  # [extents] HBM: digest of the device that its blocks were written on
    # sessions
    session_state: NDArray[np.uint8]  # [sessions] SessionState
    session_token: NDArray[np.uint8]  # [sessions, 16] digest of the token, never the token
    session_device: NDArray[np.uint8]  # [sessions] 255: no owned HBM
    session_slot_bytes: NDArray[np.uint64]  # [sessions]
    session_identity: NDArray[np.uint64]  # [sessions] digest of its device; 0: not stated
    session_members: NDArray[np.uint8]  # [sessions]
    session_since: NDArray[np.uint64]  # [sessions] ms of its attach
    session_name: NDArray[np.uint8]  # [sessions, 128] UTF-8, zero padded
    # namespaces
    namespace_digest: NDArray[np.uint8]  # [namespaces, 32]; zeros: unused
    # checksums of what DRAM slots hold: kvstore.tables.checksums
    dram_checksum: NDArray[np.uint64]  # [dram slots, 2] xxh3-128, low half first
    dram_checksum_of: NDArray[np.uint64]  # [dram slots] generation + 1 of the slot that it is of; 0: of none

    def pool(self, tier: Tier) -> PoolColumns:
        """Slots of one tier."""
        return self.pools[tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    dtype: str
    shape: tuple[int, ...]


def _columns(shape: TableShape) -> Iterator[_Column]:
    def column(name: str, dtype: str, *dims: int) -> _Column:
        return _Column(name=name, dtype=dtype, shape=dims)

    rows, extents, sessions = shape.max_rows, shape.max_extents, shape.max_sessions
    yield column("state", "<u8", rows)
    yield column("hash", "<u8", rows, 2)
    yield column("namespace", "<u4", rows)
    yield column("parent", "<u4", rows)
    yield column("depth", "<u4", rows)
    yield column("touch", "<u8", rows)
    yield column("priority", "u1", rows)
    yield column("hbm", "<u4", shape.devices, rows)
    yield column("dram", "<u4", rows)
    yield column("nvme", "<u4", rows)
    for tier, slots in zip(Tier, (shape.hbm_slots, shape.dram_slots, shape.nvme_slots), strict=True):
        yield column(f"{tier.name}.state", "<u8", slots)
        yield column(f"{tier.name}.row", "<u4", slots)
        yield column(f"{tier.name}.extent", "<u2", slots)
        yield column(f"{tier.name}.holders", "<u8", 0 if tier is Tier.NVME else slots)
    yield column("nvme_changed", "u1", shape.nvme_slots)
    yield column("tags", "<u4", shape.buckets, BUCKET_ENTRIES)
    yield column("rows", "<u4", shape.buckets, BUCKET_ENTRIES)
    yield column("extent_tier", "u1", extents)
    yield column("extent_device", "u1", extents)
    yield column("extent_state", "u1", extents)
    yield column("extent_slot_bytes", "<u8", extents)
    yield column("extent_slot_base", "<u4", extents)
    yield column("extent_slots", "<u4", extents)
    yield column("extent_bytes", "<u8", extents)
    yield column("extent_identity", "<u8", extents)
    yield column("session_state", "u1", sessions)
    yield column("session_token", "u1", sessions, 16)
    yield column("session_device", "u1", sessions)
    yield column("session_slot_bytes", "<u8", sessions)
    yield column("session_identity", "<u8", sessions)
    yield column("session_members", "u1", sessions)
    yield column("session_since", "<u8", sessions)
    yield column("session_name", "u1", sessions, 128)
    yield column("namespace_digest", "u1", shape.max_namespaces, 32)
    # Behind all that there was before: clients of then map these tables, too.
    yield column("dram_checksum", "<u8", shape.dram_slots, 2)
    yield column("dram_checksum_of", "<u8", shape.dram_slots)


def _column_bytes(column: _Column) -> int:
    raw = int(np.prod(column.shape, dtype=np.int64)) * np.dtype(column.dtype).itemsize
    return -(-raw // _ALIGN) * _ALIGN


def table_bytes(shape: TableShape) -> int:
    """Bytes that the tables of this shape take, header included, a multiple of 4096."""
    total = _HEADER_BYTES + sum(_column_bytes(column) for column in _columns(shape))
    return -(-total // 4096) * 4096


def write_header(memory: memoryview, shape: TableShape) -> None:
    """Writes magic and shape at the start of `memory`; the magic last."""
    values = tuple(getattr(shape, field.name) for field in fields(TableShape))
    struct.pack_into(f"<{len(values)}Q", memory, 8, *values)
    memory[0:8] = _MAGIC


def read_shape(memory: memoryview) -> TableShape:
    """Shape of tables that somebody else made.

    Raises: FailedPrecondition when this is not a table of this version.
    """
    if len(memory) < _HEADER_BYTES or bytes(memory[0:8]) != _MAGIC:
        raise FailedPrecondition("these shared tables are of another version of kvstore: restart both sides")
    names = [field.name for field in fields(TableShape)]
    values = struct.unpack_from(f"<{len(names)}Q", memory, 8)
    shape = TableShape(**dict(zip(names, values, strict=True)))
    if table_bytes(shape) > len(memory):
        raise FailedPrecondition(
            "the shared tables are shorter than their header says, or of an older kvstore"
        )
    return shape


def open_columns(memory: memoryview, shape: TableShape) -> Columns:
    """Views of every column; read-only where `memory` is."""
    views: dict[str, NDArray[np.generic]] = {
        "distrusts": np.frombuffer(memory, dtype="<u8", count=1, offset=_DISTRUSTS_AT),
        "forbidden": np.frombuffer(
            memory, dtype="u1", count=_HEADER_BYTES - _FORBIDDEN_AT, offset=_FORBIDDEN_AT
        ),
    }
    offset = _HEADER_BYTES
    for column in _columns(shape):
        count = int(np.prod(column.shape, dtype=np.int64))
        view = np.frombuffer(memory, dtype=column.dtype, count=count, offset=offset)
        views[column.name] = view.reshape(column.shape)
        offset += _column_bytes(column)
    pools = []
    for tier in Tier:
        parts = {part: views.pop(f"{tier.name}.{part}") for part in ("state", "row", "extent", "holders")}
        pools.append(PoolColumns(**parts))  # type: ignore[arg-type]
    return Columns(shape=shape, pools=tuple(pools), **views)  # type: ignore[arg-type]


def state_word(generation: int, state: int) -> np.uint64:
    """The commit word of a row or slot."""
    return np.uint64((generation & 0xFFFFFFFFFFFFFF) << 8 | int(state))


def states(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """State of each word. O(n)."""
    return (words & _STATE_MASK).astype(np.uint8)


def generations(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Low 32 bits of each word's generation, as they travel on the wire. O(n)."""
    return (words >> GENERATION_SHIFT).astype(np.uint32)


def touch_key(now_ms: int | NDArray[np.uint64], depths: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Key of tail-first LRU: (last touch, −depth), the smaller goes first. O(n)."""
    head = (np.asarray(now_ms, dtype=np.uint64) << np.uint64(_DEPTH_BITS)) | np.uint64(_MAX_DEPTH)
    found: NDArray[np.uint64] = np.subtract(head, np.minimum(depths, _MAX_DEPTH), dtype=np.uint64)
    return found


def latest_touch_ms(touches: NDArray[np.uint64]) -> int:
    """The time in the latest of these touch keys; 0 where there is none. O(n)."""
    return int(touches.max(initial=0)) >> _DEPTH_BITS
