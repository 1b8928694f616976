"""Taking blocks away on an administrator's word."""

from __future__ import annotations

import numpy as np

from kvstore.layout import NONE, State, Tier, states
from kvstore.moves import U32, ClearResult, MissCause
from kvstore.recorder import Event
from kvstore.state import StoreState

__all__ = ["clear", "sweep"]

_ROWS_A_TURN = 2048  # a millisecond and a half


def clear(state: StoreState, namespace: int | None) -> ClearResult:
    """Every block of a namespace (None: of all) that nobody holds is a miss from now on. O(rows).

    That is one word a row, 4 ms for a million; what it took in the tiers comes back by `sweep`, at once where it is
    little.
    """
    columns = state.columns
    now = states(columns.state)
    wanted = (now == State.SEALED) | (now == State.FILLING)
    if namespace is not None:
        wanted &= columns.namespace == namespace
    rows = np.flatnonzero(wanted).astype(np.uint32)
    busy = now[rows] == State.FILLING
    for device in range(columns.shape.devices):
        busy |= _held(state, Tier.HBM, columns.hbm[device, rows])
    busy |= _held(state, Tier.DRAM, columns.dram[rows])
    gone = rows[~busy]
    state.table.clear(gone)
    state.cleared.append((gone, state.words(gone)))
    sweep(state)
    for load in state.loads:
        load.clear(namespace)
    state.counters["cleared"] += len(gone)
    everything = namespace is None
    state.recorder.note(Event.CLEAR, 0, len(gone), int(busy.sum()), c=NONE if everything else namespace or 0)
    return ClearResult(removed=len(gone), kept=int(busy.sum()), digests=_digests(state, namespace))


def sweep(state: StoreState) -> None:
    """The background's part: the slots of some cleared blocks are free again."""
    while state.cleared:
        waiting, words = state.cleared.popleft()
        rows = waiting[:_ROWS_A_TURN]
        rows = rows[state.words(rows) == words[:_ROWS_A_TURN]]  # eviction may have been there first
        for tier in Tier:
            for device in range(state.columns.shape.devices if tier is Tier.HBM else 1):
                slots = state.table.column(tier, device)[rows]
                slots = slots[slots != NONE]
                if len(slots):
                    state.drop_copies(tier, slots, MissCause.CLEARED)
        if len(waiting) > _ROWS_A_TURN:
            state.cleared.appendleft((waiting[_ROWS_A_TURN:], words[_ROWS_A_TURN:]))
        if len(rows):
            return


def _digests(state: StoreState, namespace: int | None) -> tuple[bytes, ...]:
    if namespace is None or namespace >= state.columns.shape.max_namespaces:
        return ()
    digest = state.namespaces.digests16(np.array([namespace], dtype=np.uint32)).tobytes()
    return (digest,) if any(digest) else ()


def _held(state: StoreState, tier: Tier, slots: U32) -> np.typing.NDArray[np.bool_]:
    there = slots != NONE
    held: np.typing.NDArray[np.bool_] = there & (state.pool(tier).holders[np.where(there, slots, 0)] != 0)
    return held
