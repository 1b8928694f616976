"""A store in this process, filled with chains of blocks: the pure core without daemon, memory of KV or disk.

Used where the daemon would only add noise. The tables are real and as large as they would be; extents are numbers.
"""

from __future__ import annotations

import itertools
import mmap

import numpy as np
from numpy.typing import NDArray

from bench.blocks import SMALL, seals_of
from eviction.lru import Lru
from kvstore.layout import TableShape, Tier, open_columns, table_bytes
from kvstore.match import match
from kvstore.moves import Grant, Outcome, SealOutcome, StoreLimits
from kvstore.store import Store
from kvstore.tables.index import Index
from kvstore.wire.packed import COPY, SEAL

__all__ = ["FilledStore"]

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_EXTENT_SLOTS = 16384
_CHAIN = 4096
_SPARE = 2 * _CHAIN
_NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)
_NO_COPIES = np.empty(0, dtype=COPY)
_NO_SEALS = np.empty(0, dtype=SEAL)


class FilledStore:
    """A store with one attached session and `rows` sealed blocks in HBM, in chains of 4,096."""

    def __init__(self, rows: int, *, seed: int = 0) -> None:
        slots = -(-(rows + _SPARE) // _EXTENT_SLOTS) * _EXTENT_SLOTS
        small = _EXTENT_SLOTS
        spare_rows = slots // 16  # so that slots run out before rows do
        shape = TableShape(max_rows=slots + spare_rows, hbm_slots=slots, dram_slots=small, nvme_slots=small)
        self._memory = mmap.mmap(-1, table_bytes(shape))
        self.store = Store.create(memoryview(self._memory), shape, StoreLimits(), Lru())
        for _ in range(slots // _EXTENT_SLOTS):
            nbytes = _EXTENT_SLOTS * SMALL.slot_bytes
            self.store.add_extent(tier=Tier.HBM, device=0, nbytes=nbytes, slot_bytes=SMALL.slot_bytes)
        self.columns = open_columns(memoryview(self._memory), shape)
        self.index = Index(self.columns)
        self.now_ms = 1
        self._ids = itertools.count(1)
        self.session = self.store.attach(
            now_ms=self.now_ms,
            name="bench",
            token_digest=bytes(range(16)),
            device=0,
            slot_bytes=SMALL.slot_bytes,
            members=1,
        )
        self.store.activate(self.session)
        self.namespace = self.store.open_namespace(self.session, bytes(range(1, 33)))
        rng = np.random.default_rng(seed)
        self.chains: list[U64] = []
        for at in range(0, rows, _CHAIN):
            chain = rng.integers(0, 1 << 64, (min(_CHAIN, rows - at), 2), dtype=np.uint64)
            self.put(chain)
            self.chains.append(chain)

    def acquire(self, chain: U64, *, first: int = 0) -> Grant:
        """One acquire of a whole chain, a millisecond after the last call."""
        self.now_ms += 1
        grant_id = next(self._ids)
        return self.store.acquire(
            now_ms=self.now_ms,
            session=self.session,
            namespace=self.namespace,
            lease=grant_id,
            hashes=chain,
            first=first,
            reserve=0,
            private_fill=False,
            grant_id=grant_id,
        )

    def step(self, *, seals: NDArray[np.void] = _NO_SEALS, released: U32 = _NO_SLOTS) -> NDArray[np.uint8]:
        """One step that has seen every grant; what became of its seals."""
        answer = self.store.step(
            now_ms=self.now_ms,
            session=self.session,
            seals=seals,
            loads=_NO_COPIES,
            stores=_NO_COPIES,
            released_hbm=released,
            released_dram=_NO_SLOTS,
            seen=next(self._ids),
            want_slots=0,
            want_room=0,
        )
        return answer.seal_outcomes

    def put(self, chain: U64) -> None:
        """Stores a chain that is not there, and lets go of it."""
        grant = self.acquire(chain)
        assert (grant.outcomes == Outcome.MISS).all(), "a new chain is all misses"
        outcomes = self.step(seals=seals_of(self.namespace, chain, grant.hbm_slots, grant.hbm_generations))
        assert (outcomes == SealOutcome.PUBLISHED).all(), "what was filled is published"
        self.step(released=grant.hbm_slots)

    def match(self, chain: U64) -> int:
        """Leading blocks that are cached, without touching any."""
        return match(self.columns, self.index, self.namespace, chain, device=0).hits
