"""What a step reports: blocks that are complete, copies that have ended, slots that are no longer touched.

Owns the rule that only a verified slot is published: it is the session's, of that generation, still FILLING, and no
other slot holds the block. Everything here may be said twice with the same result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import NONE, Tier, touch_key
from kvstore.leases.sessions import Session
from kvstore.moves import U8, U32, U64, SealOutcome
from kvstore.recorder import Event
from kvstore.state import NO_SLOTS, StoreState
from kvstore.tables.firsts import firsts
from kvstore.tables.slots import SlotPool
from kvstore.tables.table import distinct
from kvstore.trust.distrusting import distrust_fills
from kvstore.wire.packed import COPY

__all__ = ["NO_CHECKSUMS", "NO_COPIES", "Sealing"]

NO_CHECKSUMS: U64 = np.empty((0, 2), dtype=np.uint64)
NO_COPIES: NDArray[np.void] = np.empty(0, dtype=COPY)

Records = NDArray[np.void]
_PUBLISHED = int(SealOutcome.PUBLISHED)
_SEAL_COUNTERS = tuple(f"seals_{outcome.name.lower()}" for outcome in SealOutcome)
"""By the outcome's number."""


class Sealing:
    """Applies seals, copies and releases of one session."""

    __slots__ = ("_state",)

    def __init__(self, state: StoreState) -> None:
        self._state = state

    # -- seals

    def seal(self, session: Session, seals: Records, now_ms: int) -> U8:
        """[n] SealOutcome. Slots are HBM slots, or DRAM slots of a session without owned HBM."""
        tier = Tier.DRAM if session.device is None else Tier.HBM
        pool = self._state.pool(tier)
        slots: U32 = seals["slot"]
        outcomes = np.full(len(seals), SealOutcome.STALE, dtype=np.uint8)
        good = self._state.held_slots(pool, slots, seals["generation"], session.holder)
        if not session.namespaces.issuperset(seals["namespace"].tolist()):
            good &= np.isin(seals["namespace"], np.array([*session.namespaces], dtype=np.uint32))
        kept = good.copy()
        kept[good] = self._state.uses.may_write(session.use, seals["namespace"][good])
        if self._state.spoiled & session.holder:  # what it computes now may be computed from a wrong block
            kept &= ~pool.filling(np.where(good, slots, NONE))
        if session.device is None:  # nor what it computes behind one that it has let go of
            kept &= ~self._state.suspects.behind(session.id, seals)
        at = np.flatnonzero(kept)
        at, repeated = self._first_of_each_slot(at, slots)
        if len(at):
            outcomes[at] = self._seal_distinct(session, tier, seals[at], now_ms)
        if len(repeated):
            outcomes[repeated] = self._already_sealed(pool, seals[repeated])
        if not kept.all():
            outcomes[good & ~kept] = self._drop(tier, slots[good & ~kept])
        counts = np.bincount(outcomes, minlength=len(_SEAL_COUNTERS)).tolist()
        block = seals["hash"][0].tobytes() if len(seals) else bytes(16)
        self._state.recorder.note(Event.SEAL, session.id, len(seals), counts[_PUBLISHED], block=block)
        for name, count in zip(_SEAL_COUNTERS, counts, strict=True):
            self._state.counters[name] += count
        return outcomes

    def _drop(self, tier: Tier, slots: U32) -> U8:
        """[n] DUPLICATE: blocks that must not be stored stay private, as if they were there already."""
        state = self._state
        state.counters["seals_dropped"] += len(slots)
        if tier is Tier.HBM:  # reserved before that was said: nobody shall wait for them
            state.unlink_fills(np.unique(slots[state.hbm.filling(slots)]))
        return np.full(len(slots), SealOutcome.DUPLICATE, dtype=np.uint8)

    def _first_of_each_slot(
        self, at: NDArray[np.intp], slots: U32
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Positions of the first record of each slot, and those of the others."""
        first = firsts(slots[at])
        return at[first], at[~first]

    def _already_sealed(self, pool: SlotPool, seals: Records) -> U8:
        """[n] PUBLISHED where the slot holds that very block, STALE where it holds another, DUPLICATE where none."""
        slots = seals["slot"]
        rows = pool.row[slots]
        sealed = pool.sealed(slots)
        safe = np.where(sealed, rows, 0)
        columns = self._state.columns
        same = (columns.hash[safe] == seals["hash"]).all(axis=1) & (
            columns.namespace[safe] == seals["namespace"]
        )
        outcomes = np.full(len(seals), SealOutcome.STALE, dtype=np.uint8)
        outcomes[sealed & same] = SealOutcome.PUBLISHED
        outcomes[~sealed] = SealOutcome.DUPLICATE
        return outcomes

    def _seal_distinct(self, session: Session, tier: Tier, seals: Records, now_ms: int) -> U8:
        """As `seal`, for records of distinct slots that the session holds under these generations."""
        pool = self._state.pool(tier)
        filling = pool.filling(seals["slot"])
        outcomes = np.full(len(seals), SealOutcome.DUPLICATE, dtype=np.uint8)
        if not filling.all():
            outcomes[~filling] = self._already_sealed(pool, seals[~filling])
        fills = np.flatnonzero(filling)
        fills = fills[distinct(seals["hash"][fills])]  # of one block under two slots the first counts
        published = self._publish(session, tier, seals[fills], now_ms)
        outcomes[fills[published]] = SealOutcome.PUBLISHED
        return outcomes

    def _publish(self, session: Session, tier: Tier, seals: Records, now_ms: int) -> NDArray[np.bool_]:
        """Publishes FILLING slots of distinct blocks: [n] which were; the others' blocks are published already."""
        state = self._state
        pool = state.pool(tier)
        slots = seals["slot"]
        mine = pool.row[slots]
        # As most are: then the index need not be asked.
        reserved = state.table.are(mine, seals["hash"], seals["namespace"])
        rows = mine if reserved else state.table.find(seals["hash"], seals["namespace"])
        if tier is Tier.HBM and not reserved:
            other = (mine != NONE) & (mine != rows)
            if other.any():  # reserved for one block, filled with another
                state.unlink_fills(slots[other])
                rows = state.table.find(seals["hash"], seals["namespace"])
        new = rows == NONE
        if new.any():
            rows[new] = self._reserve(seals[new], now_ms)
        wins = state.table.filling(rows)
        self._take_over(rows[wins], slots[wins], tier)
        won = rows[wins]
        device = 0 if session.device is None else session.device
        state.fault("seal.begin")
        state.complete(tier, won, slots[wins], device)
        state.fault("seal.commit")
        state.table.publish(won)
        state.table.touch(won, now_ms)
        if tier is Tier.DRAM:
            state.sealed_in_dram.append(won)
        state.waits.resolved(won)
        again = self._of_storage_alone(tier, rows, slots)
        if again.any():
            self._computed_again(tier, rows[again], slots[again], device, now_ms)
        return wins | again

    def _of_storage_alone(self, tier: Tier, rows: U32, slots: U32) -> NDArray[np.bool_]:
        """[n] blocks that are published, that no memory has, and whose slots are nobody else's."""
        columns, alone = self._state.columns, self._state.table.sealed(rows)
        if alone.any():
            known = rows[alone]
            unseen = (columns.dram[known] == NONE) & (columns.hbm[:, known] == NONE).all(axis=0)
            alone[alone] = unseen & (self._state.pool(tier).row[slots[alone]] == NONE)
        return alone

    def _computed_again(self, tier: Tier, rows: U32, slots: U32, device: int, now_ms: int) -> None:
        """What was computed because storage is slow is found in memory from now on.

        Only where no memory has the block: copies in memory are compared with each other, and what was computed twice
        may differ in its last bits.
        """
        state = self._state
        state.complete(tier, rows, slots, device)
        state.table.touch(rows, now_ms)
        if tier is Tier.DRAM:
            state.sealed_in_dram.append(rows)
        state.waits.resolved(rows)

    def _reserve(self, seals: Records, now_ms: int) -> U32:
        state = self._state
        rows = state.table.reserve(
            hashes=seals["hash"],
            namespaces=seals["namespace"],
            depths=seals["depth"],
            parents=np.full(len(seals), NONE, dtype=np.uint32),
            touches=touch_key(now_ms, seals["depth"]),
        )
        below = (seals["depth"] > 0) & (rows != NONE)  # their parents may be among them
        parents = state.table.find(seals["parent"][below], seals["namespace"][below])
        state.columns.parent[rows[below]] = parents
        return rows

    def _take_over(self, rows: U32, slots: U32, tier: Tier) -> None:
        """Rows that other slots have reserved: those slots become private, this filler was sooner."""
        state = self._state
        for device in range(state.columns.shape.devices):
            column = state.columns.hbm[device]
            there = column[rows]
            foreign = there != NONE
            if tier is Tier.HBM:
                foreign &= there != slots
            if foreign.any():
                column[rows[foreign]] = NONE
                state.hbm.row[there[foreign]] = NONE

    # -- copies

    def loads(self, session: Session, copies: Records) -> None:
        """DRAM → HBM copies that have ended: the HBM slot holds the block."""
        if session.device is None or not len(copies):
            return
        state = self._state
        if state.spoiled & session.holder:
            self._loads_of_wrong_blocks(session, copies)
        at = self._believed(session, copies, state.dram, state.hbm)
        target = copies["target"][at]
        rows = state.dram.row[copies["source"][at]]
        mine = state.hbm.row[target]
        linked = mine == rows
        # Reserved for another block than it was filled with.
        state.unlink_fills(target[(mine != NONE) & ~linked])
        free = ~linked & (state.columns.hbm[session.device, rows] == NONE)
        free[free] = firsts(rows[free])
        publish = linked | free
        if not publish.all():
            state.copied.note(target[~publish], rows[~publish], state.words(rows[~publish]))
        rows, target = rows[publish], target[publish]
        state.fault("loads.begin")
        state.complete(Tier.HBM, rows, target, session.device)
        state.counters["loads"] += len(rows)
        state.recorder.note(Event.LOADED, session.id, len(rows))
        state.waits.resolved(rows)

    def _loads_of_wrong_blocks(self, session: Session, copies: Records) -> None:
        """The targets hold what was found wrong while it was copied."""
        state = self._state
        source, target = copies["source"], copies["target"]
        wrong = state.held_slots(state.dram, source, copies["source_generation"], session.holder)
        wrong &= state.held_slots(state.hbm, target, copies["target_generation"], session.holder)
        wrong &= state.dram.distrusted(np.where(wrong, source, NONE))
        wrong &= state.hbm.filling(np.where(wrong, target, NONE))
        distrust_fills(state, np.unique(target[wrong]))

    def wrong_loads(self, session: Session, copies: Records) -> U32:
        """DRAM → HBM copies that have ended and are not what their checksum says: the DRAM slots, if that can be true.

        Nothing is published by that; the HBM slots stay the session's, to be given back.
        """
        if session.device is None or not session.verifies or not len(copies):
            return NO_SLOTS
        state = self._state
        at = self._believed(session, copies, state.dram, state.hbm)
        source: U32 = copies["source"][at]
        state.unlink_fills(copies["target"][at])
        return np.unique(source[state.checksums.known(source)])

    def stores(self, session: Session, copies: Records, checksums: U64) -> None:
        """HBM → DRAM copies that have ended: the DRAM slot holds the block; it stays held until it is released.

        `checksums` [n, 2], or none: see Step.store_checksums.
        """
        if session.device is None or not len(copies):
            return
        state = self._state
        at = self._believed(session, copies, state.hbm, state.dram)
        source = copies["source"][at]
        rows = state.hbm.row[source]
        free = state.columns.dram[rows] == NONE
        free[free] = firsts(rows[free])
        at = at[free]
        rows, target = rows[free], copies["target"][at]
        # Also that there is none: a daemon that died here may have noted one of a slot that now gets another block.
        state.checksums.forget(target)
        if len(checksums):
            said = checksums[at].any(axis=1)
            state.checksums.note(target[said], checksums[at][said])
        state.fault("stores.begin")
        state.complete(Tier.DRAM, rows, target, 0)
        state.counters["stores"] += len(rows)
        state.recorder.note(Event.STORED, session.id, len(rows))
        state.sealed_in_dram.append(rows)
        state.hbm.note_unheld(source)
        state.waits.resolved(rows)

    def _believed(
        self, session: Session, copies: Records, sources: SlotPool, targets: SlotPool
    ) -> NDArray[np.intp]:
        """Positions of the copies that can be true, of distinct targets: the session holds both slots under these
        generations, the source is complete, the target is being filled."""
        source, target = copies["source"], copies["target"]
        good = self._state.held_slots(sources, source, copies["source_generation"], session.holder)
        good &= self._state.held_slots(targets, target, copies["target_generation"], session.holder)
        good &= sources.sealed(np.where(good, source, NONE)) & targets.filling(np.where(good, target, NONE))
        good[good] = firsts(target[good])
        return np.flatnonzero(good)

    # -- releases

    def release(self, session: Session, hbm: U32, dram: U32) -> None:
        """Slots that the session no longer touches, but for those granted again since (rule B)."""
        hbm, dram = session.not_granted_since(hbm, dram)
        for tier, slots in ((Tier.HBM, hbm), (Tier.DRAM, dram)):
            if not len(slots):
                continue
            pool = self._state.pool(tier)
            inside = slots < len(pool)
            slots = slots if inside.all() else slots[inside]
            held = pool.held(slots, session.holder)
            self._state.let_go(tier, slots if held.all() else slots[held], session.holder)
