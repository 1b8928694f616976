"""What a path's durable index has to learn of: slots that changed, and coarsely when blocks were last used.

Which slots changed is noted in the shared tables before they change, and taken back when the index has it: a daemon
that is killed leaves exactly what its successor has to say again. Last use is never a write of its own: it goes with
whatever else changes in a group, and in a slow pass over groups that were used since they were written.
"""

from __future__ import annotations

import numpy as np

from kvstore.layout import SlotState, Tier
from kvstore.moves import U32, U64, NvmeChanges
from kvstore.state import StoreState
from kvstore.tiering.flights import parent_hashes
from kvstore.wire.packed import NVME_ENTRY

__all__ = ["GROUP_SLOTS", "IndexChanges"]

GROUP_SLOTS = 128
"""Slots that the index keeps under one key, and so writes together."""
_WINDOW_SLOTS = 1 << 16
_CHANGED, _TAKEN = 1, 2
_STATE_BITS = np.uint64(0xFF)
_TOUCH_SHIFT = np.uint64(20)
_PASS_MS = 600_000
"""A group's uses are written once in so long at most, where nothing else changes in it."""
_TURN_MS = 1_000
_GROUPS_LOOKED_AT = 128  # half a millisecond
_GROUPS_A_TURN = 8
"""4 MiB a minute of index at most: 8 KiB a group, of what was used and nothing else."""


class IndexChanges:
    """Of all paths. O(slots / 65,536) where nothing changed."""

    __slots__ = ("_hand", "_next_turn_ms", "_pass_hand", "_state", "_written_ms")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._hand = 0
        self._pass_hand = 0
        self._next_turn_ms = 0
        groups = -(-len(state.nvme) // GROUP_SLOTS)
        self._written_ms: U64 = np.zeros(groups, dtype=np.uint64)
        """When the uses of each group's blocks were noted last; 0: before this life, so that all are noted once."""

    def written(self, path: int) -> None:
        """What a path's index says of uses was read just now."""
        state = self._state
        for extent in state.extents.of(Tier.NVME, path):
            base, size = state.extents.range(extent)
            self._written_ms[base // GROUP_SLOTS : -(-(base + size) // GROUP_SLOTS)] = state.now_ms

    def take(self, path: int, limit: int) -> NvmeChanges:
        """About `limit` changed slots of a path, as they are now. `committed` or `put_back` is their end."""
        state = self._state
        slots = self._some(path, limit)
        slots = np.concatenate((slots, self._used_beside(path, slots)))
        state.nvme_changed[slots] = _TAKEN
        sealed = state.nvme.sealed(slots)
        return NvmeChanges(published=self._entries(slots[sealed]), freed=slots[~sealed])

    def _some(self, path: int, limit: int) -> U32:
        """Changed slots, window by window from where the last call ended."""
        state, total = self._state, len(self._state.nvme)
        found: list[U32] = []
        count = 0
        for _ in range(-(-total // _WINDOW_SLOTS)):
            begin = self._hand
            changed = state.nvme_changed[begin : begin + _WINDOW_SLOTS] == _CHANGED
            if changed.any():
                slots = (np.flatnonzero(changed) + begin).astype(np.uint32)
                slots = slots[state.nvme.devices(slots) == path][: limit - count]
                found.append(slots)
                count += len(slots)
                if count >= limit:
                    break
            self._hand = begin + _WINDOW_SLOTS if begin + _WINDOW_SLOTS < total else 0
        return np.concatenate(found) if found else np.empty(0, dtype=np.uint32)

    def _used_beside(self, path: int, slots: U32) -> U32:
        """Unchanged slots of the same groups whose blocks were used since: their groups are written anyway.

        Of this path alone: where extents of two paths meet, a group has slots of both.
        """
        groups = np.unique(slots // np.uint32(GROUP_SLOTS))
        found = self._used(groups)
        self._written_ms[groups] = self._state.now_ms
        own: U32 = found[self._state.nvme.devices(found) == path]
        return own

    def _used(self, groups: U32) -> U32:
        state = self._state
        slots = (groups[:, None] * np.uint32(GROUP_SLOTS) + np.arange(GROUP_SLOTS, dtype=np.uint32)).reshape(
            -1
        )
        slots = slots[slots < len(state.nvme)].astype(np.uint32)
        slots = slots[(state.nvme.state[slots] & _STATE_BITS) == np.uint64(SlotState.SEALED)]
        slots = slots[state.nvme_changed[slots] == 0]
        used_ms = state.columns.touch[state.nvme.row[slots]] >> _TOUCH_SHIFT
        found: U32 = slots[used_ms > self._written_ms[slots // np.uint32(GROUP_SLOTS)]]
        return found

    def _entries(self, slots: U32) -> np.typing.NDArray[np.void]:
        state, columns = self._state, self._state.columns
        rows = state.nvme.row[slots]
        entries = np.zeros(len(slots), dtype=NVME_ENTRY)
        entries["slot"], entries["generation"] = slots, state.nvme.generations(slots)
        entries["namespace"], entries["depth"] = columns.namespace[rows], columns.depth[rows]
        entries["touch"], entries["hash"] = columns.touch[rows], columns.hash[rows]
        entries["parent"] = parent_hashes(state, rows)
        entries["ns_digest"] = state.namespaces.digests16(columns.namespace[rows])
        return entries

    def committed(self, slots: U32) -> None:
        """The index has what was taken of these; what changed since is still to come."""
        marks = self._state.nvme_changed
        marks[slots[marks[slots] == _TAKEN]] = 0

    def put_back(self, path: int) -> None:
        """What was taken of a path and not committed is to be taken again. O(slots)."""
        marks = self._state.nvme_changed
        slots = np.flatnonzero(marks == _TAKEN).astype(np.uint32)
        marks[slots[self._state.nvme.devices(slots) == path]] = _CHANGED

    def all_changed(self, path: int) -> None:
        """The index of a path is empty: it has to learn of every block. O(slots)."""
        state = self._state
        for extent in state.extents.of(Tier.NVME, path):
            base, size = state.extents.range(extent)
            state.nvme_changed[base : base + size] = _CHANGED

    def tick(self) -> None:
        """The background's part: now and then some groups whose blocks were used are to be written."""
        state = self._state
        if state.now_ms < self._next_turn_ms:
            return
        self._next_turn_ms = state.now_ms + _TURN_MS
        window = _GROUPS_LOOKED_AT
        begin = self._pass_hand if self._pass_hand < len(self._written_ms) else 0
        old = self._written_ms[begin : begin + window] + np.uint64(_PASS_MS) <= np.uint64(state.now_ms)
        groups = (np.flatnonzero(old) + begin).astype(np.uint32)
        slots = self._used(groups) if len(groups) else groups
        of_group = slots // np.uint32(GROUP_SLOTS)
        chosen = np.unique(of_group)[:_GROUPS_A_TURN]
        if len(chosen):
            state.nvme_changed[slots[np.isin(of_group, chosen)]] = _CHANGED
        if len(chosen) < _GROUPS_A_TURN:
            self._pass_hand = begin + window
