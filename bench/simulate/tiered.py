"""The real store with one engine attached, for a simulation: tables and decisions are real, extents are numbers.

Holds what the store holds a client to: a session holds a slot once, so requests that share one are counted here, and a
slot goes back when the last of them lets go.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from eviction.base import PolicyFactory, Stop
from eviction.lru import Lru
from kvstore.layout import NONE, TableShape, Tier, open_columns, table_bytes
from kvstore.match import match
from kvstore.moves import Grant, MoveStatus, Outcome, SealOutcome, Slots, StoreLimits, StoreStats
from kvstore.store import Store
from kvstore.tables.extents import TRAILER_BYTES
from kvstore.tables.index import Index
from kvstore.wire.packed import COPY, SEAL

__all__ = ["Answer", "Sizes", "TieredStore"]

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)
_NO_SEALS = np.empty(0, dtype=SEAL)
_NO_COPIES = np.empty(0, dtype=COPY)
_DIGEST = b"simulated".ljust(32, b".")
_SPARE_ROWS = 1024


class Sizes:
    """Slots of each tier."""

    __slots__ = ("dram", "hbm", "nvme", "slot_bytes")

    def __init__(self, *, slot_bytes: int, hbm_bytes: int, dram_bytes: int, nvme_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.hbm = hbm_bytes // slot_bytes
        self.dram = dram_bytes // slot_bytes
        self.nvme = nvme_bytes // (slot_bytes + TRAILER_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an acquire."""

    grant: Grant | None
    coming: bool  # blocks of it are on their way: it does not lack slots


class TieredStore:
    """See the module. Times are those of the simulation, in seconds."""

    def __init__(
        self,
        sizes: Sizes,
        policy: PolicyFactory | None,
        *,
        most_blocks: int,
        prefetch_share: float = 0.5,
    ) -> None:
        """`policy` makes the orders of DRAM and of NVMe; None: the store's own, tail-first LRU."""
        shape = TableShape(
            max_rows=sizes.hbm + sizes.dram + sizes.nvme + _SPARE_ROWS,
            hbm_slots=max(1, sizes.hbm),
            dram_slots=max(1, sizes.dram),
            nvme_slots=max(1, sizes.nvme),
            max_extents=16,
            max_sessions=1,
            max_namespaces=1,
        )
        limits = StoreLimits(
            max_message_blocks=max(most_blocks, 1),
            max_reserve=max(most_blocks, 8192),
            paths=1,
            prefetch_share=prefetch_share,
        )
        self._memory = mmap.mmap(-1, table_bytes(shape))
        view = memoryview(self._memory)
        self.store = Store.create(view, shape, limits, Lru())
        self._columns = open_columns(view, shape)
        self._index = Index(self._columns)
        self._now_ms = 1
        for tier, slots in ((Tier.DRAM, sizes.dram), (Tier.NVME, sizes.nvme)):
            if policy is not None and slots:
                self.store.hints.rankings.rank(tier, "simulated", policy, slots * sizes.slot_bytes)
        for tier, slots, size in (
            (Tier.HBM, sizes.hbm, sizes.slot_bytes),
            (Tier.DRAM, sizes.dram, sizes.slot_bytes),
            (Tier.NVME, sizes.nvme, sizes.slot_bytes + TRAILER_BYTES),
        ):
            if slots:
                slot_bytes = sizes.slot_bytes if tier is Tier.HBM else 0
                self.store.add_extent(tier=tier, device=0, nbytes=slots * size, slot_bytes=slot_bytes)
        self._session = self.store.attach(
            now_ms=1,
            name="simulated",
            token_digest=bytes(16),
            device=0,
            slot_bytes=sizes.slot_bytes,
            members=1,
        )
        self.store.activate(self._session)
        self._namespace = self.store.open_namespace(self._session, _DIGEST)
        self._ids = count(1)
        self._held = {
            Tier.HBM: np.zeros(shape.hbm_slots, dtype=np.int32),
            Tier.DRAM: np.zeros(shape.dram_slots, dtype=np.int32),
        }

    def tell_time(self, now_s: float) -> None:
        """It is so late now."""
        self._now_ms = int(now_s * 1000) + 1

    # -- requests

    def found(self, hashes: U64) -> U8:
        """Tiers of the leading cached run."""
        return match(self._columns, self._index, self._namespace, hashes, device=0).tiers

    def ended(self, hashes: U64, stop: Stop) -> None:
        """The answer to a prompt is complete."""
        rows = self._index.locate(hashes)
        self.store.hints.rankings.ended(rows[rows != NONE], stop)

    def prefetch(self, lease: int, hashes: U64, at_s: float) -> None:
        """A request waits that is expected to run at that time."""
        self.store.prefetch(
            now_ms=self._now_ms,
            session=self._session,
            namespace=self._namespace,
            lease=lease,
            hashes=hashes,
            deadline_ms=int(at_s * 1000) + 1,
        )

    def acquire(self, lease: int, hashes: U64, reserve: int) -> Answer:
        """A slot for every block, or none of them: then the lease waits, and `changed` will name it."""
        grant = self.store.acquire(
            now_ms=self._now_ms,
            session=self._session,
            namespace=self._namespace,
            lease=lease,
            hashes=hashes,
            first=0,
            reserve=reserve,
            private_fill=False,
            grant_id=next(self._ids),
        )
        self.hold(Tier.HBM, np.concatenate((grant.hbm_slots, grant.reserve_slots)))
        self.hold(Tier.DRAM, grant.dram_slots)
        if grant.complete and len(grant.reserve_slots) == reserve:
            return Answer(grant=grant, coming=False)
        self.release(hbm=np.concatenate((grant.hbm_slots, grant.reserve_slots)), dram=grant.dram_slots)
        coming = (grant.outcomes == Outcome.PROMOTING) | (grant.outcomes == Outcome.PENDING)
        return Answer(grant=None, coming=bool(coming.any()))

    def seal(self, hashes: U64, grant: Grant) -> U32:
        """What of a grant was computed is complete; positions of the blocks that are published now."""
        at = np.flatnonzero(grant.outcomes == Outcome.MISS)
        seals = np.zeros(len(at), dtype=SEAL)
        seals["slot"], seals["generation"] = grant.hbm_slots[at], grant.hbm_generations[at]
        seals["namespace"], seals["depth"], seals["hash"] = self._namespace, at, hashes[at]
        inner = at > 0
        seals["parent"][inner] = hashes[at[inner] - 1]
        outcomes = self._step(seals=seals)
        published: U32 = at[outcomes == SealOutcome.PUBLISHED].astype(np.uint32)
        return published

    def room(self, blocks: int) -> Slots | None:
        """Slots in DRAM for so many blocks, or as many as there are."""
        self._step(want_room=blocks)
        slots = self.store.top_up(self._session, next(self._ids))
        if slots is not None:
            self.hold(Tier.DRAM, slots.dram_slots)
        return slots

    def loaded(self, copies: NDArray[np.void]) -> None:
        """These are in HBM now, and their sources are let go."""
        self._step(loads=copies, dram=self._last(Tier.DRAM, copies["source"]))

    def stored(self, copies: NDArray[np.void]) -> None:
        """These are in DRAM now; neither side is used for it any more."""
        self._step(
            stores=copies,
            hbm=self._last(Tier.HBM, copies["source"]),
            dram=self._last(Tier.DRAM, copies["target"]),
        )

    def hold(self, tier: Tier, slots: U32) -> None:
        """Counts one more user of each slot; NONE is passed over."""
        self._held[tier][slots[slots != NONE]] += 1

    def release(self, *, hbm: U32 = _NO_SLOTS, dram: U32 = _NO_SLOTS) -> None:
        """One user less of each slot."""
        self._step(hbm=self._last(Tier.HBM, hbm), dram=self._last(Tier.DRAM, dram))

    def changed(self) -> list[int]:
        """Leases that should ask again."""
        return [lease for _, leases in self.store.take_changed() for lease in leases]

    # -- the disk

    def take_moves(self, limit: int) -> NDArray[np.void]:
        """What the disk is to do."""
        return self.store.take_moves(0, limit)

    def moved(self, moves: NDArray[np.void]) -> None:
        """It has done that."""
        ok = np.full(len(moves), MoveStatus.OK, dtype=np.uint8)
        self.store.moves_done(now_ms=self._now_ms, path=0, ids=moves["id"], statuses=ok)

    def tick(self) -> None:
        """The background's turn."""
        self.store.tick(self._now_ms)

    def check_rankings(self) -> None:
        """Raises AssertionError where a policy's parts contradict each other."""
        self.store.hints.rankings.check_integrity()

    def stats(self) -> StoreStats:
        """Of the store."""
        return self.store.stats()

    # -- parts

    def _last(self, tier: Tier, slots: U32) -> U32:
        """Of these slots, those that nobody uses any more."""
        slots = slots[slots != NONE]
        self._held[tier][slots] -= 1
        gone: U32 = slots[self._held[tier][slots] == 0]
        return gone

    def _step(
        self,
        *,
        seals: NDArray[np.void] = _NO_SEALS,
        loads: NDArray[np.void] = _NO_COPIES,
        stores: NDArray[np.void] = _NO_COPIES,
        hbm: U32 = _NO_SLOTS,
        dram: U32 = _NO_SLOTS,
        want_room: int = 0,
    ) -> U8:
        answer = self.store.step(
            now_ms=self._now_ms,
            session=self._session,
            seals=seals,
            loads=loads,
            stores=stores,
            released_hbm=hbm,
            released_dram=dram,
            seen=next(self._ids),
            want_slots=0,
            want_room=want_room,
        )
        return answer.seal_outcomes
