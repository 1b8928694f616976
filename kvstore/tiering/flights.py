"""Moves in flight: what a mover has been told and has not answered.

Owns the table of them and how a move is written out. Ids never repeat in a daemon's life; an answer counts only while
its id is in the table and comes from the path it was given to. A mover looks at the bytes of as few blocks as it can:
not of those that it writes with a checksum that is known, nor of those that it reads while all sessions compare what
they load.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, State
from kvstore.moves import U32, U64, MoveKind
from kvstore.state import StoreState
from kvstore.tables.extents import TRAILER_BYTES
from kvstore.wire.packed import MOVE

__all__ = ["Flights", "parent_hashes"]

_FLIGHT = np.dtype(
    [
        ("id", "<u8"),  # 0: unused
        ("kind", "u1"),
        ("path", "u1"),
        ("unread", "u1"),
        ("row", "<u4"),
        ("row_word", "<u8"),
        ("dram", "<u4"),
        ("dram_word", "<u8"),
        ("nvme", "<u4"),
        ("nvme_generation", "<u4"),
    ]
)
_AT_BITS = 14
_MAX_FLIGHTS = 1 << _AT_BITS


def parent_hashes(state: StoreState, rows: U32) -> U64:
    """[n, 2] hash of each row's parent, zeros where it has left the table. A hint: nothing is served by it."""
    columns = state.columns
    parents = columns.parent[rows]
    known = parents != NONE
    safe = np.where(known, parents, np.uint32(0))
    known &= columns.depth[safe] + 1 == columns.depth[rows]
    known &= columns.namespace[safe] == columns.namespace[rows]
    known &= (columns.state[safe] & np.uint64(0xFF)) != np.uint64(State.FREE)
    found: U64 = np.where(known[:, None], columns.hash[safe], np.uint64(0))
    return found


class Flights:
    """The table. All operations are vectorised over moves."""

    __slots__ = ("_free", "_serial", "_state", "_table")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._table = np.zeros(_MAX_FLIGHTS, dtype=_FLIGHT)
        self._free: U32 = np.arange(_MAX_FLIGHTS, dtype=np.uint32)
        self._serial = 1

    def __len__(self) -> int:
        """Moves in flight."""
        return _MAX_FLIGHTS - len(self._free)

    @property
    def places(self) -> int:
        """How many more there may be."""
        return len(self._free)

    def begin(self, kind: MoveKind, path: int, dram: U32, nvme: U32) -> NDArray[np.void]:
        """MOVE[n] of the blocks in these DRAM slots; they are in flight from now on. VERIFY looks at no `nvme`."""
        state = self._state
        n = len(dram)
        at, self._free = self._free[:n], self._free[n:]
        ids = (np.arange(self._serial, self._serial + n, dtype=np.uint64) << np.uint64(_AT_BITS)) | at
        self._serial += n
        rows = state.dram.row[dram]
        moves = self._moves(kind, ids, rows, dram, nvme)
        table = self._table
        table["id"][at], table["kind"][at], table["path"][at] = ids, kind, path
        table["unread"][at] = moves["unread"]
        table["row"][at], table["row_word"][at] = rows, state.columns.state[rows]
        table["dram"][at], table["dram_word"][at] = dram, state.dram.state[dram]
        table["nvme"][at] = nvme if kind is not MoveKind.VERIFY else NONE
        table["nvme_generation"][at] = moves["generation"]
        return moves

    def _moves(self, kind: MoveKind, ids: U64, rows: U32, dram: U32, nvme: U32) -> NDArray[np.void]:
        state, columns = self._state, self._state.columns
        moves = np.zeros(len(ids), dtype=MOVE)
        moves["id"], moves["kind"] = ids, kind
        moves["dram_slot"], moves["nvme_slot"] = dram, nvme
        moves["dram_extent"], moves["nvme_extent"] = state.dram.extent[dram], state.nvme.extent[nvme]
        sizes = state.dram.slot_bytes(dram)
        dram_base = columns.extent_slot_base[moves["dram_extent"]]
        nvme_base = columns.extent_slot_base[moves["nvme_extent"]]
        moves["dram_offset"] = (dram - dram_base).astype(np.uint64) * sizes
        moves["nvme_offset"] = (nvme - nvme_base).astype(np.uint64) * (sizes + np.uint64(TRAILER_BYTES))
        moves["length"] = sizes
        moves["generation"] = state.nvme.generations(nvme)
        moves["namespace"], moves["depth"] = columns.namespace[rows], columns.depth[rows]
        moves["hash"], moves["parent"] = columns.hash[rows], parent_hashes(state, rows)
        moves["ns_digest"] = state.namespaces.digests16(columns.namespace[rows])
        if kind is MoveKind.WRITE:
            moves["unread"], moves["checksum"] = state.checksums.known(dram), state.checksums.of(dram)
        elif kind is MoveKind.READ:
            moves["unread"] = state.sessions.all_verify()
        return moves

    def end(self, path: int, ids: U64) -> tuple[NDArray[np.void], NDArray[np.intp]]:
        """Takes these out: (flights, the positions in `ids` that name them). Others are passed over, as are repeats."""
        _, known = self.look(path, ids)
        return self._take((ids[known] & np.uint64(_MAX_FLIGHTS - 1)).astype(np.int64)), known

    def look(self, path: int, ids: U64) -> tuple[NDArray[np.void], NDArray[np.intp]]:
        """As `end`, and they stay in flight."""
        at = (ids & np.uint64(_MAX_FLIGHTS - 1)).astype(np.int64)
        known = np.flatnonzero(
            (self._table["id"][at] == ids) & (ids != 0) & (self._table["path"][at] == path)
        )
        known = known[np.sort(np.unique(at[known], return_index=True)[1])]
        return self._table[at[known]], known

    def end_all(self, path: int) -> NDArray[np.void]:
        """Takes everything out that a path has."""
        return self._take(np.flatnonzero((self._table["id"] != 0) & (self._table["path"] == path)))

    def touch_extent(self, field: str, base: int, size: int) -> bool:
        """Whether a move in flight touches slots [base, base + size) of the tier named by `field`: dram or nvme."""
        slots = self._table[field]
        return bool(((self._table["id"] != 0) & (slots >= base) & (slots < base + size)).any())

    def _take(self, at: NDArray[np.int64]) -> NDArray[np.void]:
        flights = self._table[at]
        self._table["id"][at] = 0
        self._free = np.concatenate((self._free, at.astype(np.uint32)))
        return flights
