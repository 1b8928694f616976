"""Making room: free slots of a class, by cutting unassigned extents first and by evicting after that.

Owns the victims chosen ahead: a batch at a time, checked again when each is used, so that a grant in need of one slot
does not look at a million. Where the tier has a policy of its own (`ranking`) that names them; else, and where
it does not know any, the store's own key does (`kvstore.victims.by_key`).
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
from numpy.typing import NDArray

from eviction.base import MayGo
from kvstore.layout import NONE, ExtentState, SlotState, State, Tier
from kvstore.moves import U32, MissCause
from kvstore.state import NO_SLOTS, StoreState
from kvstore.tables.slots import ClassKey, SlotClass, SlotPool
from kvstore.tables.table import PINNED
from kvstore.victims.by_key import ONLY_COPY_MS, ByKey, Chosen, kept, lower, unheld
from kvstore.victims.quotas import ANYBODY
from kvstore.victims.ranking import Ranking
from kvstore.victims.turns import Turns

__all__ = ["Evictor"]

_SAMPLE_SLOTS = 4096
_TURN_SLOTS = 1024
_ROW_WINDOW = 1 << 16
_ROWS_A_CALL = 2048
_SLOTS_A_LOOK = 1 << 18
_STATE_BITS = np.uint64(0xFF)
_ANY = np.uint64(0xFFFFFFFFFFFFFFFF)


class Evictor:
    """Frees slots. Nothing held, being filled, waited for or on its way is ever a victim."""

    __slots__ = (
        "_by_key",
        "_chosen",
        "_looked",
        "_refilling",
        "_row_hand",
        "_state",
        "_turns",
        "leaving",
        "short",
    )

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._turns = Turns(state.quotas)
        self._chosen: dict[tuple[Tier, ClassKey, bytes], Chosen] = {}
        self._by_key = ByKey(state, self.evictable)
        self._row_hand = 0
        self._looked: Counter[tuple[Tier, ClassKey]] = Counter()
        """Windows of a class where `unwanted` goes on."""
        self._refilling: set[tuple[Tier, ClassKey]] = set()
        """Classes whose reserve fell below the low mark and has not reached the high one."""
        self.short: dict[tuple[Tier, ClassKey], None] = {}
        """Classes that could not be served: the background looks whether an extent should change class."""
        self.leaving: set[int] = set()
        """Extents that no class gets any more (`kvstore.victims.resizing`)."""

    def make_room(self, tier: Tier, key: ClassKey, count: int, asks: int = ANYBODY) -> SlotClass:
        """Tries to have `count` slots of a class free, and returns the class; `len(free)` says how many there are.

        `asks`: the tenant that they are for (`Quotas.asks`).
        """
        owner = self._state.pool(tier).class_of(key)
        evicted = self._free_up(tier, owner, count, asks)
        if evicted:  # somebody waits for it: the reserve was too small
            self._state.counters[f"evictions_{tier.name.lower()}_inline"] += evicted
        return owner

    def make_room_among(
        self, key: ClassKey, count: int, may_go: MayGo, *, kept_free: int = 0, asks: int = ANYBODY
    ) -> SlotClass:
        """As `make_room` in DRAM, with `kept_free` more, taking no block but what `may_go` ([n] rows → [n]) allows."""
        owner = self._state.dram.class_of(key)
        while len(owner.free) - kept_free < count and self._assign_one(Tier.DRAM, key):
            pass
        look = partial(self._victims_among, owner, may_go)
        while (missing := count + kept_free - len(owner.free)) > 0 and not owner.exhausted:
            victims = self._turns.take(Tier.DRAM, owner, asks, count, missing, look)
            owner.exhausted = False  # others may take what this must not
            if len(victims):
                self.evict(Tier.DRAM, victims)
            if not len(victims) or not self._state.quotas.active:
                break  # one look; of tenants one in each turn
        return owner

    def _free_up(self, tier: Tier, owner: SlotClass, count: int, asks: int = ANYBODY) -> int:
        """Cuts unassigned extents, then evicts, until `count` slots are free or none can be; how many were evicted."""
        pool, evicted = self._state.pool(tier), 0
        while len(owner.free) < count and tier is not Tier.HBM and self._assign_one(tier, owner.key):
            pass
        look = self._take
        while (missing := count - len(owner.free)) > 0:
            victims = self._turns.take(tier, owner, asks, count, missing, partial(look, pool, owner))
            if not len(victims):
                break
            self.evict(tier, victims)
            evicted += len(victims)
            if len(victims) < missing and not self._state.quotas.active:
                look = self._oldest  # a policy that found too few is not asked again and again
        if len(owner.free) < count and tier is not Tier.HBM:
            self.short[tier, owner.key] = None
        return evicted

    def keep_reserves(self) -> None:
        """The background's part: extents change class, and rows and slots of each class stay free."""
        self._state.rankings.tick(self._state.now_ms)
        self.rebalance()
        self.keep_rows()
        for tier in Tier:
            for key in list(self._state.pool(tier).classes):
                if self._has_reserve(tier, key):
                    self.keep_reserve(tier, key)

    def _has_reserve(self, tier: Tier, key: ClassKey) -> bool:
        """HBM without a session is nobody's to make room in, and of a path whose blocks are still being entered the
        extents that come have the room."""
        if tier is Tier.HBM:
            return self._state.has_session(key)
        return tier is Tier.DRAM or all(load.path != key.device for load in self._state.loads)

    def keep_reserve(self, tier: Tier, key: ClassKey) -> None:
        """The background's part: some slots of the class are free before anybody asks.

        It begins below the low mark, half of the reserve, and goes on to the high one, the whole: a search for victims
        is then paid by many slots, and a tier that nobody writes to loses nothing.
        """
        owner = self._state.pool(tier).class_of(key)
        high, free = self.reserve_of(owner), len(owner.free)
        if free >= (high if (tier, key) in self._refilling else (high + 1) // 2):
            self._refilling.discard((tier, key))
            return
        self._refilling.add((tier, key))
        owner.exhausted = False
        # So many at a turn: a call that comes meanwhile does not wait for a whole reserve.
        wanted = min(high, free + _TURN_SLOTS)
        if not len(self._state.queued):
            self._free_up(tier, owner, wanted)
        elif tier is Tier.DRAM:  # what is wanted soon is worth more than a free slot
            self.make_room_among(key, wanted, lambda rows: self._state.queued.wanted[rows] == 0)
        else:
            self._free_up(tier, owner, min(wanted, self.unwanted(tier, key, wanted)))

    def reserve_of(self, owner: SlotClass) -> int:
        """Slots that the background keeps free in a class: the high mark."""
        limits = self._state.limits
        wanted = max(limits.reserve_slots, int(owner.slots * limits.reserve_fraction))
        return min(wanted, owner.slots // 4)

    def keep_rows(self) -> None:
        """The background's part for rows: where storage has more slots than the table has rows, the rows run out first.

        Takes what is least recently used of all by a sampled threshold, in whatever tiers it lies: window after window
        from where the last call stopped, so many rows a call at most that none takes long.
        """
        state, columns = self._state, self._state.columns
        rows_in_all, limits = columns.shape.max_rows, state.limits
        wanted = min(max(limits.reserve_slots, int(rows_in_all * limits.reserve_fraction)), rows_in_all // 4)
        missing = min(wanted - len(state.table.runs), _ROWS_A_CALL)
        if missing <= 0:
            return
        stride = max(1, rows_in_all // _SAMPLE_SLOTS)
        sample = np.arange(self._row_hand % stride, rows_in_all, stride, dtype=np.uint32)
        keys = columns.touch[sample[state.table.sealed(sample)]]
        rank = -(-4 * missing // stride)
        threshold = np.partition(keys, rank)[rank] if rank < len(keys) else _ANY
        found = 0
        for _ in range(-(-rows_in_all // _ROW_WINDOW)):
            found += self._drop_rows_below(threshold, missing - found)
            if found >= missing:
                return
        if not found:  # what is old is all held or pinned
            self._drop_rows_below(_ANY, missing)

    def _drop_rows_below(self, threshold: np.uint64, count: int) -> int:
        """Up to `count` droppable blocks of the next window with touch keys up to `threshold` go; how many did."""
        columns = self._state.columns
        begin = self._row_hand if self._row_hand < len(columns.touch) else 0
        self._row_hand = begin + _ROW_WINDOW
        old = columns.touch[begin : self._row_hand] <= threshold
        old &= (columns.state[begin : self._row_hand] & _STATE_BITS) == np.uint64(State.SEALED)
        rows = np.flatnonzero(old).astype(np.uint32) + np.uint32(begin)
        if not len(rows):
            return 0
        best = rows[self._state.policy.victims(columns.touch[rows], self._droppable(rows), count)]
        if self._state.quotas.active:
            best = best[~self._state.quotas.spared(best)]
        if len(best):
            self._drop_rows(best)
        return len(best)

    def _drop_rows(self, rows: U32) -> None:
        """These blocks lose all their copies."""
        state = self._state
        for tier in reversed(Tier):
            for device in self._devices(tier):
                slots = state.table.slots(tier, rows, device)
                slots = slots[slots != NONE]
                if len(slots):
                    state.drop_copies(tier, slots, MissCause.EVICTED)
        state.counters["evictions_rows"] += len(rows)

    def _droppable(self, rows: U32) -> NDArray[np.bool_]:
        """[n] whether each row is a block all of whose copies may be victims now."""
        state = self._state
        good: NDArray[np.bool_] = state.table.sealed(rows) & (state.columns.priority[rows] != PINNED)
        good &= state.queued.wanted[rows] == 0
        for tier in Tier:
            for device in self._devices(tier):
                slots = state.table.slots(tier, rows, device)
                there = good & (slots != NONE)
                good[there] = self.evictable(state.pool(tier), slots[there])
        return good

    def _devices(self, tier: Tier) -> range:
        """Of the columns that point into a tier."""
        return range(self._state.columns.shape.devices if tier is Tier.HBM else 1)

    def _assign_one(self, tier: Tier, key: ClassKey) -> bool:
        """Gives an unassigned extent to the class, if there is one."""
        state = self._state
        if tier is Tier.NVME and state.now_ms < state.no_slab_until_ms[key.device]:
            return False
        for extent in state.extents.of(tier, key.device, ExtentState.UNASSIGNED):
            if extent not in self.leaving and state.extents.assign(extent, key.slot_bytes) is not None:
                state.fault("extent.assigned")
                state.unmade[extent] = False
                state.pool(tier).open_extent(extent)
                return True
        return False

    def leave(self, tier: Tier, extent: int) -> None:
        """The extent gives out no more slots, and no class gets it any more."""
        state = self._state
        self.leaving.add(extent)
        state.pool(tier).close_extent(extent)
        if state.extents.state(extent) is ExtentState.READY:
            state.extents.drain(extent)
        self._chosen.clear()

    def evict(self, tier: Tier, victims: U32) -> None:
        """These slots, which `evictable` has passed, become free."""
        state = self._state
        rows = state.pool(tier).row[victims]
        state.quotas.note_evicted(tier, rows)
        ranking = state.rankings.get(tier)
        if ranking is not None:
            ranking.left(rows)
        if tier is Tier.HBM:
            state.queued.lost(rows)
        ended = state.drop_copies(tier, victims, MissCause.EVICTED)
        name = tier.name.lower()
        state.counters[f"evictions_{name}"] += len(victims)
        state.counters[f"evictions_{name}_last_copy"] += ended

    # -- choice

    def _take(self, pool: SlotPool, owner: SlotClass, count: int) -> U32:
        """Up to `count` victims that are good now."""
        if owner.exhausted:
            return NO_SLOTS
        ranking = self._state.rankings.get(pool.tier)
        if ranking is not None and ranking.all_known:
            victims = self._ranked(pool, owner, ranking, count)
            if len(victims):
                return victims
        return self._oldest(pool, owner, count)

    def _oldest(self, pool: SlotPool, owner: SlotClass, count: int) -> U32:
        """As `_take`, by the store's own key; it finds some wherever any may go."""
        if owner.exhausted:
            return NO_SLOTS
        ranking = self._state.rankings.get(pool.tier)
        name = (pool.tier, owner.key, self._turns.name)
        chosen = self._chosen.get(name)
        while True:
            if chosen is None or not len(chosen.slots):
                ahead = max(count, self._state.limits.victim_batch, owner.slots // 256)
                few = self._turns.few(pool.tier, owner)
                chosen = self._by_key.choose(pool, owner, ahead, few)
                self._chosen[name] = chosen
                if not len(chosen.slots):
                    owner.exhausted = True
                    return NO_SLOTS
            slots, good = chosen.slots[:count], self._by_key.still_good(pool, chosen, count)
            chosen.keep(slice(count, None))
            if good.any():
                return slots[good] if ranking is None else self._strangers(pool, owner, ranking, slots[good])

    def _strangers(self, pool: SlotPool, owner: SlotClass, ranking: Ranking, victims: U32) -> U32:
        """Of victims by the store's own key those that a policy does not know, which go before all that it knows; where
        there are none any more it names the victims."""
        if (
            ranking.all_known
        ):  # it named none: these are what queued requests want, or lie behind much that is held
            return victims
        strangers = victims[~ranking.knows(pool.row[victims])]
        if len(strangers):
            return strangers
        ranking.all_known = True
        named = self._ranked(pool, owner, ranking, len(victims))
        return named if len(named) else victims

    def _victims_among(self, owner: SlotClass, may_go: MayGo, count: int) -> U32:
        """Up to `count` slots of DRAM whose blocks `may_go` lets go; one look at the next victims."""
        state, pool, name = self._state, self._state.dram, (Tier.DRAM, owner.key, self._turns.name)
        ranking = state.rankings.get(Tier.DRAM)
        if ranking is not None and ranking.all_known:
            named = self._ranked(pool, owner, ranking, count, may_go)
            if len(named):
                return named
        found: list[U32] = []
        for chosen in (
            self._chosen.get(name),
            None,
        ):  # what was chosen ahead, and then what goes first by now
            if chosen is None:
                if count <= 0:
                    break
                ahead = max(count, state.limits.victim_batch, owner.slots // 256)
                chosen = self._chosen[name] = self._by_key.choose(pool, owner, ahead)
            good = self._by_key.still_good(pool, chosen, len(chosen.slots))
            good[good] = may_go(pool.row[chosen.slots[good]])
            good[np.flatnonzero(good)[count:]] = False
            found.append(chosen.slots[good])
            chosen.keep(~good)
            count -= len(found[-1])
        return np.unique(np.concatenate(found))

    def _ranked(
        self, pool: SlotPool, owner: SlotClass, ranking: Ranking, count: int, spare: MayGo | None = None
    ) -> U32:
        """Up to `count` victims that a policy of the tier's own names; they have left it, so all must go now.

        What a queued request wants it does not name, nor, while there is other, what has lost its only copy then.
        """
        state, columns = self._state, self._state.columns
        state.rankings.tell(state.now_ms / 1000)
        of_class = np.zeros(len(columns.extent_state), dtype=np.bool_)
        of_class[owner.extents] = True
        safe_before = max(state.now_ms - ONLY_COPY_MS, 0) << 20

        def may_go(slots: U32) -> NDArray[np.bool_]:
            good = self.evictable(pool, slots) & of_class[pool.extent[slots]]
            rows = pool.row[slots[good]]
            good[good] = ~kept(state, rows) if spare is None else spare(rows)
            return good

        def expendable(slots: U32) -> NDArray[np.bool_]:
            rows = pool.row.take(slots)
            good: NDArray[np.bool_] = rows != NONE
            rows = np.where(good, rows, np.uint32(0))
            if pool.tier is Tier.DRAM:
                good &= lower(columns, Tier.DRAM, rows) | (columns.touch.take(rows) < np.uint64(safe_before))
            else:
                good &= (columns.dram.take(rows) == NONE) & (columns.hbm[:, rows] == NONE).all(axis=0)
            good[good] = may_go(slots[good])  # dearer, so of those alone
            return good

        now_s = state.now_ms / 1000
        if not any(c.slots for c in state.nvme.classes.values()):
            return ranking.victims(count, now_s, may_go)
        victims = ranking.victims(count, now_s, expendable)
        if len(victims) == count:
            return victims
        # A policy looks at some of its blocks a call: that few of these have another copy does not mean that none has.
        return np.concatenate((victims, ranking.victims(count - len(victims), now_s, may_go)))

    def evictable(self, pool: SlotPool, slots: U32) -> NDArray[np.bool_]:
        """[n] whether each slot may be a victim now."""
        state, columns = self._state, self._state.columns
        good = pool.sealed(slots)
        if len(pool.holders):
            good &= pool.holders.take(slots) == 0
        rows = np.where(good, pool.row.take(slots), np.uint32(0))
        good = self._turns.passes(good, pool.tier, slots)
        good &= state.waits.waited.take(rows) == 0
        pinned = columns.priority.take(rows) == PINNED
        if pool.tier is Tier.NVME:
            good &= ~pinned & ~state.dram.filling(np.where(good, columns.dram.take(rows), np.uint32(NONE)))
        elif pinned.any():
            good &= ~(pinned & ~lower(columns, pool.tier, rows))
        return good

    def unwanted(self, tier: Tier, key: ClassKey, most: int) -> int:
        """Slots of a class that are free, or of blocks that may go and no queued request wants; it counts to `most`.

        It looks at so many slots a call that none takes long, from where the last one stopped: it may count too few.
        """
        pool, queued = self._state.pool(tier), self._state.queued
        owner = pool.class_of(key)
        count, looked, begin = len(owner.free), 0, self._looked[tier, key]
        ranges = [
            (low, min(low + _ROW_WINDOW, base + size))
            for base, size in owner.free.ranges()
            for low in range(base, base + size, _ROW_WINDOW)
        ]
        for window in range(begin, begin + len(ranges)):
            self._looked[tier, key] = window % len(ranges)
            if count >= most or looked >= _SLOTS_A_LOOK:
                break
            low, high = ranges[window % len(ranges)]
            looked += high - low
            slots = unheld(pool, low, high)
            slots = slots[queued.wanted.take(pool.row.take(slots)) == 0]
            for first in range(0, len(slots), _SAMPLE_SLOTS):
                if count < most:
                    part = slots[first : first + _SAMPLE_SLOTS]
                    count += int(np.count_nonzero(self.evictable(pool, part)))
        return min(count, most)

    # -- extents that change class

    def rebalance(self) -> None:
        """Lets classes that came short take extents from larger ones; finishes what drains. O(slots of an extent)."""
        state = self._state
        for tier in (Tier.DRAM, Tier.NVME) if state.extents.draining else ():
            for extent in state.extents.of(tier, None, ExtentState.DRAINING):
                if extent not in self.leaving:
                    self._finish_draining(tier, extent)
        for tier, key in list(self.short):
            donor = self._donor(tier, key)
            if donor is not None:
                state.pool(tier).close_extent(donor)
                state.extents.drain(donor)
                self._chosen.clear()
                self._finish_draining(tier, donor)
                self._assign_one(tier, key)
        self.short.clear()

    def drain(self, tier: Tier, extent: int) -> bool:
        """Empties an extent that gives out no more slots as far as that can be done now. True: it has no used slot."""
        pool = self._state.pool(tier)
        base, size = self._state.extents.range(extent)
        slots = np.arange(base, base + size, dtype=np.uint32)
        victims = slots[self.evictable(pool, slots)]
        if len(victims):
            self.evict(tier, victims)
        return bool((pool.states(slots) == SlotState.FREE).all())

    def _finish_draining(self, tier: Tier, extent: int) -> None:
        if self.drain(tier, extent):
            self._state.extents.unassign(extent)

    def _donor(self, tier: Tier, key: ClassKey) -> int | None:
        """An extent that should go to a class that came short: of the largest other class, when that has two more than
        this one, or when no session uses it; None when none should."""
        state = self._state
        pool = state.pool(tier)
        others = [
            c for c in pool.classes.values() if c.key.device == key.device and c.key != key and c.extents
        ]
        if not others or state.extents.of(tier, key.device, ExtentState.DRAINING):
            return None
        in_use = {session.slot_bytes for session in state.sessions}
        others.sort(key=lambda c: (c.key.slot_bytes in in_use, -len(c.extents)))
        donor, mine = others[0], len(pool.class_of(key).extents)
        if donor.key.slot_bytes in in_use:
            donor = max(others, key=lambda c: len(c.extents))
            if len(donor.extents) < mine + 2:
                return None
        elif key.slot_bytes not in in_use:
            return None
        size, range_of, may_lose = donor.key.slot_bytes, state.extents.range, state.quotas.may_lose
        able = [extent for extent in donor.extents if may_lose(tier, size, *range_of(extent))]
        return min(able, key=lambda extent: self._held(pool, extent), default=None)

    def _held(self, pool: SlotPool, extent: int) -> int:
        base, size = self._state.extents.range(extent)
        if not len(pool.holders):
            return int(
                np.count_nonzero(
                    pool.states(np.arange(base, base + size, dtype=np.uint32)) == SlotState.FILLING
                )
            )
        return int(np.count_nonzero(pool.holders[base : base + size]))
