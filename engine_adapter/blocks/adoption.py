"""Copies to DRAM what an earlier worker left in HBM alone, so that it outlives the HBM too.

A worker that dies between sealing a block and copying it down leaves an orphan: a hit for the next worker, gone with
the device's memory. The next worker finds such blocks in the shared tables, leases them like any hit, and hands them to
its write-through, oldest first and a chain at a time. Nothing waits for it; what is no longer as the tables said is
passed over.

The engine's thread calls `poll`.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from engine_adapter.blocks.write_through import WriteThrough
from kvstore.cache_use import Access
from kvstore.client import Namespace, PendingGrant, Session, SlotRun
from kvstore.layout import NONE, Columns, SlotState, State, Tier, states
from kvstore.moves import Outcome

__all__ = ["Adoption", "orphan_leaves"]

U32 = NDArray[np.uint32]


def orphan_leaves(columns: Columns, namespace: int, device: int) -> U32:
    """Rows of the last blocks of chains that only this device's HBM has and nobody holds.

    The least recently used first, so that their order stays what it was. O(HBM slots).
    """
    rows = _orphans(columns, namespace, device)
    parents = columns.parent[rows]
    leaves = rows[~np.isin(rows, parents[parents != NONE])]
    ordered: U32 = leaves[np.argsort(columns.touch[leaves], kind="stable")]
    return ordered


def _orphans(columns: Columns, namespace: int, device: int) -> U32:
    pool = columns.pool(Tier.HBM)
    slots = np.flatnonzero((states(pool.state) == SlotState.SEALED) & (pool.holders == 0))
    rows = pool.row[slots]  # read once: the daemon goes on writing
    slots, rows = slots[rows != NONE], rows[rows != NONE]
    alone = (columns.hbm[device, rows] == slots) & (columns.namespace[rows] == namespace)
    found: U32 = rows[alone & _unsaved(columns, rows)]
    return found


def _unsaved(columns: Columns, rows: U32) -> NDArray[np.bool_]:
    """[n] which blocks no tier below HBM has."""
    unsaved: NDArray[np.bool_] = (
        (states(columns.state[rows]) == State.SEALED)
        & (columns.dram[rows] == NONE)
        & (columns.nvme[rows] == NONE)
    )
    return unsaved


def _chain_to(columns: Columns, leaf: int) -> U32 | None:
    """Rows from the root to a leaf; None where an ancestor is missing. O(depth).

    The tables may change meanwhile, so depths must count down.
    """
    chain = [leaf]
    for depth in range(int(columns.depth[leaf]) - 1, -1, -1):
        row = int(columns.parent[chain[-1]])
        if row == NONE or int(columns.depth[row]) != depth:
            return None
        chain.append(row)
    return np.array(chain[::-1], dtype=np.uint32)


class Adoption:
    """What is left to copy of the orphans that were there when the session was attached."""

    def __init__(
        self, session: Session, namespace: Namespace, write_through: WriteThrough, lease: int
    ) -> None:
        """`lease`: one that no request has."""
        self._session = session
        self._namespace = namespace
        self._write_through = write_through
        self._lease = lease
        self._grant: PendingGrant | None = None
        self._columns = session.tables.tables.columns
        device = session.device
        leases = bool(session.use.access & Access.READS)  # else it is given none of them
        self._leaves = deque(
            orphan_leaves(self._columns, namespace.handle, device.index).tolist()
            if device is not None and leases
            else ()
        )
        self.adopted_blocks = 0

    def poll(self) -> None:
        """Goes one step further, if there is anything to do; never waits."""
        if self._grant is not None and self._grant.done():
            self._take(self._grant)
            self._grant = None
        if self._grant is None and self._leaves and not self._write_through.backlog_blocks:
            self._ask(self._leaves.popleft())

    def _ask(self, leaf: int) -> None:
        """Leases the chain that ends in a leaf, from its first block that is not saved yet on."""
        columns = self._session.tables.tables.columns
        if (
            columns is not self._columns
        ):  # another session has taken the place: nothing of the old tables is left
            self._leaves.clear()
            return
        chain = _chain_to(columns, leaf)
        if chain is None or len(chain) > self._session.max_message_blocks:
            return
        unsaved = np.flatnonzero(_unsaved(columns, chain))
        if len(unsaved):
            self._grant = self._session.acquire(
                self._namespace, self._lease, columns.hash[chain], first=int(unsaved[0])
            )

    def _take(self, grant: PendingGrant) -> None:
        """Hands the blocks to the write-through; all else that was granted goes back."""
        if grant.error is None:
            granted = grant.result(0)
            columns = self._session.tables.tables.columns
            slots = granted.hbm_slots[granted.outcomes == Outcome.HIT_HBM]
            rows = columns.pool(Tier.HBM).row[slots]
            slots, rows = slots[rows != NONE], rows[rows != NONE]
            slots = slots[_unsaved(columns, rows)]
            generations = self._session.generations_of(Tier.HBM, slots)
            self._write_through.adopt(SlotRun(slots=slots, generations=generations))
            self.adopted_blocks += len(slots)
        grant.abandon()
        self._session.cancel(self._lease)
