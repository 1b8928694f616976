"""What the store says about itself: extents, counts, and why a prompt was a miss. Reads only; O(tables) is allowed."""

from __future__ import annotations

import numpy as np

from kvstore.cache_use import Access
from kvstore.layout import NONE, ExtentState, SlotState, Tier
from kvstore.moves import (
    U64,
    Explanation,
    ExtentId,
    ExtentInfo,
    MissCause,
    SessionInfo,
    StoreStats,
    TierStats,
)
from kvstore.state import StoreState
from kvstore.tables.slots import ClassKey
from kvstore.tiering.moving import Moving

__all__ = ["explain", "extent_info", "stats"]

_STATE_BITS = np.uint64(0xFF)
_DETAIL = {
    MissCause.NEVER_STORED: "no block with this hash is remembered: other tokens, another namespace, or long ago",
    MissCause.BEING_FILLED: "a request is computing it now",
    MissCause.EVICTED: "it was stored, and the last tier that had it needed the slot",
    MissCause.CORRUPT: "it was stored, and what storage gave back was not what was written, or an I/O error",
    MissCause.CLEARED: "an administrator cleared it",
    MissCause.DROPPED: "it was in memory that was released",
}


def extent_info(state: StoreState, extent: int) -> ExtentInfo:
    """One extent."""
    columns = state.columns
    tier = state.extents.tier(extent)
    base, slots = state.extents.range(extent)
    words = state.pool(tier).state[base : base + slots]
    return ExtentInfo(
        extent=ExtentId(extent),
        tier=tier,
        device=int(columns.extent_device[extent]),
        draining=state.extents.state(extent) is ExtentState.DRAINING,
        nbytes=int(columns.extent_bytes[extent]),
        slot_bytes=int(columns.extent_slot_bytes[extent]),
        slot_base=base,
        slots=slots,
        identity=int(columns.extent_identity[extent]),
        free_slots=int(np.count_nonzero((words & _STATE_BITS) == np.uint64(SlotState.FREE))),
    )


def stats(state: StoreState, moving: Moving) -> StoreStats:
    """Gauges and counters. O(slots × sessions)."""
    return StoreStats(
        tiers=tuple(_tier_stats(state, tier) for tier in Tier),
        sessions=tuple(_session_info(state, session.id) for session in state.sessions),
        counters=dict(state.counters),
        rows=state.table.used,
        max_rows=state.columns.shape.max_rows,
        queued_reads=moving.queued_reads,
        queued_writes=moving.queued_writes,
        moves_in_flight=moving.in_flight,
    )


def _tier_stats(state: StoreState, tier: Tier) -> TierStats:
    columns, pool = state.columns, state.pool(tier)
    counts = np.zeros(len(SlotState), dtype=np.int64)
    slots = held = orphans = 0
    extents = state.extents.of(tier)
    for extent in extents:
        base, size = state.extents.range(extent)
        now = (pool.state[base : base + size] & _STATE_BITS).astype(np.uint8)
        of_extent = np.bincount(now, minlength=len(SlotState))
        counts += of_extent
        slots += size
        if len(pool.holders):
            held += int(np.count_nonzero(pool.holders[base : base + size]))
        key = ClassKey(
            device=int(columns.extent_device[extent]), slot_bytes=int(columns.extent_slot_bytes[extent])
        )
        if tier is Tier.HBM and not state.has_session(key):
            orphans += int(of_extent[SlotState.SEALED])
    return TierStats(
        tier=tier,
        allocated_bytes=int(columns.extent_bytes[extents].sum()) if extents else 0,
        slots=slots,
        free_slots=int(counts[SlotState.FREE]),
        filling_slots=int(counts[SlotState.FILLING]),
        sealed_slots=int(counts[SlotState.SEALED]),
        held_slots=held,
        orphan_slots=orphans,
        quarantined_slots=int(counts[SlotState.QUARANTINED]),
    )


def _session_info(state: StoreState, number: int) -> SessionInfo:
    session = state.sessions.get(number)
    return SessionInfo(
        session=session.id,
        name=state.sessions.name(number),
        state=state.sessions.state(number).name.lower(),
        device=session.device,
        identity=int(state.columns.session_identity[number]),
        slot_bytes=session.slot_bytes,
        members=int(state.columns.session_members[number]),
        held_hbm_slots=int(np.count_nonzero(state.hbm.holders & session.holder)),
        held_dram_slots=int(np.count_nonzero(state.dram.holders & session.holder)),
        access=Access(session.use),
        attached_ms=int(state.columns.session_since[number]),
    )


def explain(state: StoreState, namespace: int, hashes: U64) -> Explanation:
    """The leading cached run of a chain by tier, and why the next block is not cached."""
    rows = state.table.locate(hashes, namespace)
    sealed = state.table.sealed(rows)
    run = len(sealed) if sealed.all() else int(sealed.argmin())
    cached = rows[:run]
    in_hbm = np.zeros(run, dtype=np.bool_)
    for device in range(state.columns.shape.devices):
        in_hbm |= state.hbm.sealed(state.columns.hbm[device, cached])
    in_dram = ~in_hbm & state.dram.sealed(state.columns.dram[cached])
    counted = {"hbm": int(in_hbm.sum()), "dram": int(in_dram.sum()), "nvme": int((~in_hbm & ~in_dram).sum())}
    by_tier = {tier: blocks for tier, blocks in counted.items() if blocks}
    if run == len(hashes):
        return Explanation(
            cached_blocks=run, cause="", detail="every block is cached", blocks_by_tier=by_tier
        )
    cause = MissCause.BEING_FILLED if rows[run] != NONE else state.ghosts.cause(hashes[run])
    return Explanation(
        cached_blocks=run,
        cause=cause.name.lower().replace("_", " "),
        detail=f"block {run} of {len(hashes)}: {_DETAIL[cause]}",
        blocks_by_tier=by_tier,
    )
