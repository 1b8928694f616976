"""What all parts of the store work on: the columns and what is derived from them, in one place.

Owns the elementary transitions that keep slot and row in step: linking, unlinking, letting go. Everything above
(acquiring, sealing, moving, evicting, recovering) is made of these. One owner: nothing here is thread-safe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eviction.base import EvictionPolicy
from kvstore.layout import (
    GENERATION_SHIFT,
    MAX_MOVERS,
    MOVER_BIT,
    NONE,
    Columns,
    ExtentState,
    SessionState,
    SlotState,
    Tier,
)
from kvstore.leases.sessions import Namespaces, Session, Sessions
from kvstore.leases.uses import Uses
from kvstore.leases.waiting import Waits
from kvstore.moves import U32, U64, MissCause, StoreLimits
from kvstore.recorder import Event, NoRecorder, Recorder
from kvstore.tables.checksums import Checksums
from kvstore.tables.extents import Extents
from kvstore.tables.slots import ClassKey, SlotPool
from kvstore.tables.table import BlockTable
from kvstore.tiering.early import EarlyReads
from kvstore.tiering.queued import Queued
from kvstore.trust.copied import PrivateCopies
from kvstore.trust.sampling import Sample
from kvstore.trust.suspects import Suspects
from kvstore.victims.ghosts import Ghosts
from kvstore.victims.quotas import Quotas
from kvstore.victims.ranking import Rankings
from kvstore.victims.retention import Retention

__all__ = ["NO_SLOTS", "Load", "StoreState", "mover_bit", "no_fault"]

NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)
_SESSION_BITS = np.uint64((1 << MOVER_BIT) - 1)
_STATE_BITS = np.uint64(0xFF)
_FILLING, _DISTRUSTED = np.uint8(SlotState.FILLING), np.uint8(SlotState.DISTRUSTED)


class Load(Protocol):
    """What `kvstore.tiering.loading` has under way for one path."""

    @property
    def path(self) -> int:
        """Its number."""
        ...

    def clear(self, namespace: int | None) -> None:
        """What a namespace (None: every one) has is not to be entered any more."""
        ...


def mover_bit(path: int) -> np.uint64:
    """The bit of a path's mover in a `holders` word."""
    return np.uint64(1 << (MOVER_BIT + path))


def no_fault(_name: str) -> None:
    """Outside tests nothing happens between two writes."""


class StoreState:
    """The store's parts and the transitions between them."""

    __slots__ = (
        "checksums",
        "cleared",
        "columns",
        "copied",
        "counters",
        "dram",
        "early",
        "extents",
        "fault",
        "ghosts",
        "hbm",
        "hung",
        "limits",
        "loads",
        "namespaces",
        "no_slab_until_ms",
        "now_ms",
        "nvme",
        "nvme_changed",
        "policy",
        "queued",
        "quotas",
        "rankings",
        "recorder",
        "retention",
        "sample",
        "sealed_in_dram",
        "sessions",
        "spoiled",
        "suspects",
        "table",
        "unmade",
        "uses",
        "waits",
    )

    def __init__(
        self, columns: Columns, limits: StoreLimits, policy: EvictionPolicy, fault: Callable[[str], None]
    ) -> None:
        self.columns = columns
        self.limits = limits
        self.policy = policy
        self.fault = fault
        self.now_ms = 0
        """The latest time that a caller has told."""
        self.recorder: Recorder = NoRecorder()
        """Where decisions are noted: one record a call, before it is known what they lead to."""
        self.counters: Counter[str] = Counter()
        self.extents = Extents(columns)
        self.hbm = SlotPool(columns, Tier.HBM, fault)
        self.dram = SlotPool(columns, Tier.DRAM, fault)
        self.nvme = SlotPool(columns, Tier.NVME, fault)
        self.copied = PrivateCopies(self.hbm)
        self.early = EarlyReads(self.dram, self.counters)
        self.table = BlockTable(columns, fault)
        self.sessions = Sessions(columns)
        self.namespaces = Namespaces(columns)
        self.waits = Waits(columns.shape.max_rows, self._unresolved)
        self.queued = Queued(columns.shape.max_rows)
        self.rankings = Rankings(columns, self.dram, self.nvme, self.queued.wanted)
        """Who names victims in DRAM and NVMe in place of `policy`."""
        self.retention = Retention(columns)
        self.quotas = Quotas(columns)
        self.uses = Uses(columns.shape.max_namespaces, columns.forbidden)
        self.ghosts = Ghosts(limits.ghosts)
        self.sample = Sample(limits.canary_every)
        self.nvme_changed = columns.nvme_changed
        """NVMe slots that the durable index has to learn of: noted before they change, see tiering.index_changes."""
        self.cleared: deque[tuple[U32, U64]] = deque()
        """Rows that were cleared and still have slots, with their words since; a start frees them all."""
        self.loads: list[Load] = []
        """Paths whose blocks are being entered: rows and extents are put aside for them."""
        self.hung: NDArray[np.bool_] = np.zeros(256, dtype=np.bool_)
        """Paths, by the number that an extent has of them, whose disk does not answer: kvstore.tiering.paths."""
        self.no_slab_until_ms = [0] * MAX_MOVERS
        """When a path may be asked for another slab."""
        self.unmade: NDArray[np.bool_] = np.zeros(columns.shape.max_extents, dtype=np.bool_)
        """NVMe extents whose slab could not be made; they drain."""
        self.suspects = Suspects()
        self.checksums = Checksums(columns)
        self.spoiled = np.uint64(0)
        """Sessions that hold a block that was found wrong, by their bits: kvstore.trust.distrusting."""
        self.count_spoiled()
        self.sealed_in_dram: list[U32] = []
        """Rows that came into DRAM by a seal or a copy, for write-behind."""

    def tell_time(self, now_ms: int) -> None:
        """The caller's clock, which never runs backwards here."""
        self.now_ms = max(self.now_ms, now_ms)

    def pool(self, tier: Tier) -> SlotPool:
        """The slots of a tier."""
        return (self.hbm, self.dram, self.nvme)[tier]

    # -- links between rows and slots

    def link(self, tier: Tier, rows: U32, slots: U32, device: int) -> None:
        """Slots name their rows, then rows their slots. States are the caller's."""
        self.pool(tier).row[slots] = rows
        self.fault("link.slots")
        self.table.column(tier, device)[rows] = slots
        self.fault("link.rows")

    def complete(self, tier: Tier, rows: U32, slots: U32, device: int) -> None:
        """FILLING slots hold the complete blocks of these rows from now on."""
        pool = self.pool(tier)
        if tier is Tier.NVME:
            self.nvme_changed[slots] = 1
            self.fault("complete.noted")
        pool.row[slots] = rows
        self.fault("complete.row")
        pool.set_state(slots, SlotState.SEALED)
        self.fault("complete.slot")
        self.table.column(tier, device)[rows] = slots
        self.fault("complete.link")
        self.rankings.came(tier, slots)

    def unlink_fills(self, slots: U32) -> None:
        """FILLING HBM slots become private: rows reserved for them end, loads into them are not waited for."""
        rows = self.hbm.row[slots]
        has_row = rows != NONE
        if not has_row.any():
            return
        slots, rows = slots[has_row], rows[has_row]
        reserved = self.table.filling(rows)
        self.table.free(rows[reserved])
        self.fault("fills.rows")
        loading, devices = ~reserved, self.hbm.devices(slots)
        self.columns.hbm[devices[loading], rows[loading]] = NONE
        self.hbm.row[slots] = NONE
        self.waits.resolved(rows)

    def unlink_promotions(self, slots: U32) -> None:
        """FILLING DRAM slots that a mover was to read into lose their rows."""
        rows = self.dram.row[slots]
        has_row = rows != NONE
        self.columns.dram[rows[has_row]] = NONE
        self.fault("promotions.unlinked")
        self.dram.row[slots] = NONE
        self.waits.resolved(rows[has_row])

    def drop_copies(self, tier: Tier, slots: U32, cause: MissCause) -> int:
        """SEALED slots of a tier lose their blocks and become free; rows without another copy end.

        Nobody holds them. Returns the number of rows that ended.
        """
        pool = self.pool(tier)
        rows = pool.row.take(slots)
        if tier is Tier.NVME:
            self.nvme_changed[slots] = 1
        elif tier is Tier.DRAM:
            self.early.gone(slots)
        if tier is Tier.HBM and self.columns.shape.devices > 1:
            self.columns.hbm[pool.devices(slots), rows] = NONE
        else:
            self.table.column(tier, 0)[rows] = NONE
        self.fault("drop.unlinked")
        last = np.unique(rows[~self.table.has_copy(rows)])
        block = self.columns.hash[rows[0]].tobytes() if len(rows) else bytes(16)
        self.recorder.note(Event.DROP, tier, len(slots), len(last), cause, block=block)
        if len(last):
            self.ghosts.note(self.columns.hash[last], cause)
            self.table.free(last)
        self.fault("drop.rows")
        pool.free(slots)
        self.waits.resolved(rows)
        return len(last)

    # -- holders

    def let_go(self, tier: Tier, slots: U32, holder: np.uint64) -> None:
        """A session no longer touches these slots, all held by it; duplicates allowed: fills end, blocks stay.

        A slot that somebody else holds too stays out of use, whatever its state: recovery can leave one that two
        readers held as a private slot of both.
        """
        pool = self.pool(tier)
        states = pool.states(slots)
        distrusted = states == _DISTRUSTED
        ends = (states == _FILLING) | distrusted
        kept = slots
        if ends.any():
            fills = np.unique(slots[ends])
            kept = slots[~ends]
            if tier is Tier.HBM:
                self.unlink_fills(fills)
            self.fault("let_go.fills")
            pool.unhold(fills, holder)
            pool.free(fills[pool.holders[fills] == 0])
        if len(kept):
            pool.unhold(kept, holder)
        if distrusted.any():
            self.count_spoiled()
        self.fault("let_go.done")

    def count_spoiled(self) -> None:
        """Who holds blocks that were found wrong, anew. O(slots)."""
        bits = np.uint64(0)
        for pool in (self.hbm, self.dram):
            wrong = (pool.state & _STATE_BITS) == np.uint64(SlotState.DISTRUSTED)
            bits |= np.bitwise_or.reduce(pool.holders[wrong], initial=np.uint64(0))
        self.spoiled = bits & _SESSION_BITS

    def let_go_all(self, session: Session) -> int:
        """Everything that a session holds comes back. O(slots). Returns the number of slots."""
        freed = 0
        for tier in (Tier.HBM, Tier.DRAM):
            held = self.pool(tier).held_by(session.holder)
            self.let_go(tier, held, session.holder)
            freed += len(held)
        session.unseen.clear()
        session.held_bound = 0
        return freed

    def may_hold(self, session: Session, slots: int) -> int:
        """How many of `slots` more the session may hold; counts anew where the bound is reached."""
        limit = self.limits.max_held_slots
        if session.held_bound + slots > limit:
            session.held_bound = sum(
                int(np.count_nonzero(pool.holders & session.holder)) for pool in (self.hbm, self.dram)
            )
        return max(0, min(slots, limit - session.held_bound))

    def held_slots(
        self, pool: SlotPool, slots: U32, generations: U32, holder: np.uint64
    ) -> NDArray[np.bool_]:
        """[n] which of the named slots (any numbers) the holder has, under these generations."""
        inside = slots < len(pool)
        safe = np.where(inside, slots, 0)
        held: NDArray[np.bool_] = inside & ((pool.holders[safe] & holder) != 0)
        held &= pool.generations(safe) == generations
        return held

    def held_by_sessions(self, pool: SlotPool, slots: U32) -> NDArray[np.bool_]:
        """[n] whether a session holds each, whoever else does."""
        held: NDArray[np.bool_] = (pool.holders[slots] & _SESSION_BITS) != 0
        return held

    def has_session(self, key: ClassKey) -> bool:
        """Whether a session, in whatever state, maps the HBM of this class."""
        return bool(self.sessions.mapping(key))

    def drawing_on(self, tier: Tier, key: ClassKey) -> int:
        """Attached sessions that are given slots of this class."""
        return sum(
            1
            for session in self.sessions
            if key == (session.hbm_key if tier is Tier.HBM else session.dram_key)
            and self.sessions.state(session.id) is SessionState.ATTACHED
        )

    def unassigned_slots(self, key: ClassKey) -> int:
        """Slots of DRAM that this class would get of extents that no class has yet."""
        extents = self.extents.of(Tier.DRAM, 0, ExtentState.UNASSIGNED)
        return sum(int(self.columns.extent_bytes[extent]) for extent in extents) // key.slot_bytes

    # -- waiting

    def words(self, rows: U32) -> U64:
        """[n] state words of rows."""
        words: U64 = self.columns.state.take(rows)
        return words

    def promoted(self, rows: U32) -> NDArray[np.bool_]:
        """[n] rows whose block is on its way into DRAM, from a disk that answers."""
        filling = self.dram.filling(self.columns.dram[rows])
        if self.hung.any() and filling.any():
            nvme = self.columns.nvme[rows[filling]]
            known = nvme != NONE
            filling[filling] = ~(known & self.hung[self.nvme.devices(np.where(known, nvme, np.uint32(0)))])
        return filling

    def _unresolved(self, rows: U32, words: U64, session: int) -> NDArray[np.bool_]:
        """[n] rows, as they were at `words`, that are still being filled or on their way to the session."""
        now = self.columns.state[rows]
        same = (now >> GENERATION_SHIFT) == (words >> GENERATION_SHIFT)
        on_way = self.table.filling(rows) | self.promoted(rows)
        device = self.sessions.get(session).device
        if device is not None:
            on_way |= self.hbm.filling(self.columns.hbm[device, rows])
        waiting: NDArray[np.bool_] = same & on_way
        return waiting
