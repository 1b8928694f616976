"""Memory that comes and goes: extents entered into the store, and taken out with all that was in them."""

from __future__ import annotations

import numpy as np

from kvstore.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from kvstore.layout import ExtentState, SessionState, SlotState, Tier
from kvstore.moves import ExtentId, MissCause
from kvstore.recorder import Event
from kvstore.state import StoreState

__all__ = ["add_extent", "drop_extent", "forget_blocks"]


def add_extent(
    state: StoreState,
    tier: Tier,
    device: int,
    nbytes: int,
    slot_bytes: int,
    extent: int | None,
    identity: int,
) -> ExtentId:
    """See Store.add_extent."""
    if tier is Tier.HBM and not slot_bytes:
        raise InvalidArgument("an HBM extent has a slot size")
    added = state.extents.add(tier, device, nbytes, extent, identity)
    if slot_bytes:
        try:
            _cut(state, tier, added, slot_bytes)
        except (InvalidArgument, FailedPrecondition, ResourceExhausted):
            state.extents.remove(added)
            raise
        state.pool(tier).open_extent(added)
    for owner in state.pool(tier).classes.values():
        owner.exhausted = False
    state.recorder.note(Event.EXTENT_ADDED, tier, state.extents.range(added)[1], added, device, nbytes)
    return added


def _cut(state: StoreState, tier: Tier, extent: int, slot_bytes: int) -> None:
    state.extents.check_class(extent, slot_bytes)
    cut = state.extents.assign(extent, slot_bytes)
    whole = tier is not Tier.HBM or (
        cut is not None and cut[1] * slot_bytes == state.columns.extent_bytes[extent]
    )
    if cut is None or not whole:
        raise ResourceExhausted(f"the tables have too few {tier.name.lower()} slots left for this extent")


def drop_extent(state: StoreState, extent: int) -> None:
    """The memory of an extent is gone, and whatever was in it; slots that somebody held are nobody's.

    Raises: NotFound; FailedPrecondition while an attached session holds a slot of it.
    """
    tier = state.extents.require(extent)
    pool = state.pool(tier)
    base, size = state.extents.range(extent)
    slots = np.arange(base, base + size, dtype=np.uint32)
    if len(pool.holders):
        attached = sum(
            1 << s.id for s in state.sessions if state.sessions.state(s.id) is SessionState.ATTACHED
        )
        if (pool.holders[slots] & np.uint64(attached)).any():
            raise FailedPrecondition(f"an attached session holds slots of extent {extent}")
    pool.close_extent(extent)
    if state.extents.state(extent) is ExtentState.READY:
        state.extents.drain(extent)
    filling = slots[pool.filling(slots)]
    if tier is Tier.HBM:
        state.unlink_fills(filling)
    elif tier is Tier.DRAM:
        state.unlink_promotions(filling)
    pool.free(filling)
    sealed = slots[pool.sealed(slots)]
    if len(sealed):
        state.drop_copies(tier, sealed, MissCause.DROPPED)
    pool.free(slots[np.isin(pool.states(slots), (SlotState.QUARANTINED, SlotState.DISTRUSTED))])
    state.count_spoiled()
    state.unmade[extent] = False  # of whoever has its number next nothing is known
    state.extents.remove(extent)
    state.recorder.note(Event.EXTENT_DROPPED, tier, 0, extent)


def forget_blocks(state: StoreState, extent: int) -> int:
    """The bytes of an HBM extent are not what they were: its blocks end, the memory stays. Returns how many.

    Raises: NotFound; InvalidArgument for another tier's; FailedPrecondition, with nothing done, where anybody holds a
    slot of it.
    """
    if state.extents.require(extent) is not Tier.HBM:
        raise InvalidArgument(f"extent {extent} is no HBM")
    base, size = state.extents.range(extent)
    slots = np.arange(base, base + size, dtype=np.uint32)
    if state.hbm.holders[slots].any():
        raise FailedPrecondition(f"slots of extent {extent} are held")
    sealed = slots[state.hbm.sealed(slots)]
    if len(sealed):
        state.drop_copies(Tier.HBM, sealed, MissCause.CORRUPT)
    return len(sealed)
