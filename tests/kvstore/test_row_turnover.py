"""A table with fewer rows than there are slots goes on taking new blocks."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from eviction.lru import Lru
from kvstore.layout import TableShape, Tier, table_bytes
from kvstore.moves import Grant, Outcome, SealOutcome, StoreLimits
from kvstore.store import Store
from kvstore.wire.packed import COPY, SEAL

ROWS = 1024
SLOTS = 4096
CHAIN = 64
PAGE = 4096
U64 = NDArray[np.uint64]
NO_SLOTS = np.empty(0, dtype=np.uint32)


class Engine:
    """One session that stores and reads chains; a tick of the background after each."""

    def __init__(self) -> None:
        shape = TableShape(max_rows=ROWS, hbm_slots=SLOTS, dram_slots=8, nvme_slots=8)
        memory = memoryview(bytearray(table_bytes(shape)))
        self.store = Store.create(memory, shape, StoreLimits(reserve_fraction=0.125), Lru())
        self.store.add_extent(tier=Tier.HBM, device=0, nbytes=SLOTS * PAGE, slot_bytes=PAGE)
        self.session = self.store.attach(
            now_ms=1, name="e", token_digest=bytes(range(16)), device=0, slot_bytes=PAGE, members=1
        )
        self.store.activate(self.session)
        self.namespace = self.store.open_namespace(self.session, bytes(range(1, 33)))
        self.now_ms = 1
        self.ids = itertools.count(1)

    def acquire(self, chain: U64) -> Grant:
        self.now_ms += 1
        number = next(self.ids)
        return self.store.acquire(
            now_ms=self.now_ms,
            session=self.session,
            namespace=self.namespace,
            lease=number,
            hashes=chain,
            first=0,
            reserve=0,
            private_fill=False,
            grant_id=number,
        )

    def step(self, seals: NDArray[np.void], released: NDArray[np.uint32]) -> list[int]:
        answer = self.store.step(
            now_ms=self.now_ms,
            session=self.session,
            seals=seals,
            loads=np.empty(0, dtype=COPY),
            stores=np.empty(0, dtype=COPY),
            released_hbm=released,
            released_dram=NO_SLOTS,
            seen=next(self.ids),
            want_slots=0,
            want_room=0,
        )
        return answer.seal_outcomes.tolist()

    def put(self, chain: U64) -> None:
        grant = self.acquire(chain)
        assert (grant.outcomes == Outcome.MISS).all()
        seals = np.zeros(len(chain), dtype=SEAL)
        seals["slot"], seals["generation"] = grant.hbm_slots, grant.hbm_generations
        seals["namespace"], seals["depth"] = self.namespace, np.arange(len(chain))
        seals["hash"], seals["parent"][1:] = chain, chain[:-1]
        assert set(self.step(seals, NO_SLOTS)) == {SealOutcome.PUBLISHED}
        self.step(seals[:0], grant.hbm_slots)
        self.store.tick(self.now_ms)

    def read(self, chain: U64) -> int:
        """Blocks that are cached; what is a miss is given back."""
        grant = self.acquire(chain)
        self.step(np.empty(0, dtype=SEAL), grant.hbm_slots)
        return int((grant.outcomes == Outcome.HIT_HBM).sum())


def test_new_blocks_take_the_rows_of_the_least_recently_used() -> None:
    """With more slots than rows, a full table took no new block any more: the cache was frozen as it was."""
    engine = Engine()
    rng = np.random.default_rng(0)
    hot = rng.integers(0, 1 << 64, (CHAIN, 2), dtype=np.uint64)
    engine.put(hot)
    chains = [rng.integers(0, 1 << 64, (CHAIN, 2), dtype=np.uint64) for _ in range(3 * ROWS // CHAIN)]
    for chain in chains:
        engine.put(chain)
        assert engine.read(hot) == CHAIN, "what is used all the time stays"
    assert engine.store.check_integrity() == []
    assert [engine.read(chain) for chain in chains[-10:]] == [CHAIN] * 10
    assert engine.read(chains[0]) == 0


def test_held_blocks_keep_their_rows() -> None:
    engine = Engine()
    rng = np.random.default_rng(1)
    held = rng.integers(0, 1 << 64, (CHAIN, 2), dtype=np.uint64)
    engine.put(held)
    assert (engine.acquire(held).outcomes == Outcome.HIT_HBM).all()
    for _ in range(2 * ROWS // CHAIN):
        engine.put(rng.integers(0, 1 << 64, (CHAIN, 2), dtype=np.uint64))
    assert (engine.acquire(held).outcomes == Outcome.HIT_HBM).all()
    assert engine.store.check_integrity() == []
