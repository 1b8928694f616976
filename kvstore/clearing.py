"""Taking blocks away on an administrator's word."""

from __future__ import annotations

import numpy as np

from kvstore.layout import NONE, State, Tier, states
from kvstore.moves import U32, ClearResult, MissCause
from kvstore.recorder import Event
from kvstore.state import StoreState

__all__ = ["clear"]


def clear(state: StoreState, namespace: int | None) -> ClearResult:
    """Removes every block of a namespace (None: of all) that nobody holds, from every tier. O(rows)."""
    columns = state.columns
    now = states(columns.state)
    wanted = now != State.FREE
    if namespace is not None:
        wanted &= columns.namespace == namespace
    rows = np.flatnonzero(wanted).astype(np.uint32)
    busy = now[rows] == State.FILLING
    for device in range(columns.shape.devices):
        busy |= _held(state, Tier.HBM, columns.hbm[device, rows])
    busy |= _held(state, Tier.DRAM, columns.dram[rows])
    gone = rows[~busy]
    for tier in Tier:
        for device in range(columns.shape.devices if tier is Tier.HBM else 1):
            slots = state.table.column(tier, device)[gone]
            slots = slots[slots != NONE]
            if len(slots):
                state.drop_copies(tier, slots, MissCause.CLEARED)
    for load in state.loads:
        load.clear(namespace)
    state.counters["cleared"] += len(gone)
    everything = namespace is None
    state.recorder.note(Event.CLEAR, 0, len(gone), int(busy.sum()), c=NONE if everything else namespace or 0)
    return ClearResult(removed=len(gone), kept=int(busy.sum()), digests=_digests(state, namespace))


def _digests(state: StoreState, namespace: int | None) -> tuple[bytes, ...]:
    if namespace is None or namespace >= state.columns.shape.max_namespaces:
        return ()
    digest = state.namespaces.digests16(np.array([namespace], dtype=np.uint32)).tobytes()
    return (digest,) if any(digest) else ()


def _held(state: StoreState, tier: Tier, slots: U32) -> np.typing.NDArray[np.bool_]:
    there = slots != NONE
    held: np.typing.NDArray[np.bool_] = there & (state.pool(tier).holders[np.where(there, slots, 0)] != 0)
    return held
