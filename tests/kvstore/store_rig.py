"""A store with one page as its slot, and short ways to say what engines and movers say. For the tests of the store."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from eviction.lru import Lru
from kvstore.layout import NONE, TableShape, Tier, table_bytes
from kvstore.leases.sealing import NO_CHECKSUMS
from kvstore.moves import Grant, MoveStatus, Outcome, Slots, StoreLimits
from kvstore.store import Store
from kvstore.tables.prebuilt import Blocks, Prebuilder, Prebuilt, open_prebuilt, prebuilt_bytes
from kvstore.tiering.loading import FIRST_COLUMNS, LAST_COLUMNS, Loading, LoadSlab
from kvstore.wire.packed import COPY, SEAL

PAGE = 4096
NO_SLOTS: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
DIGEST = b"namespace".ljust(32, b".")


def chain(length: int, seed: int = 0) -> NDArray[np.uint64]:
    """[length, 2] hashes of a prompt; the same seed gives the same prompt, longer or shorter."""
    return np.random.default_rng(seed).integers(1, 2**63, (4096, 2), dtype=np.uint64)[:length]


def build(load: Loading, blocks: dict[int, Blocks]) -> Prebuilt:
    """What the child would hand over."""
    memory = memoryview(bytearray(prebuilt_bytes(load.plan)))
    builder = Prebuilder(memory, load.plan)
    at = 0
    for slab in load.plan.slabs:
        if slab.slab in blocks:
            count = len(blocks[slab.slab].slots)
            builder.fill(np.arange(at, at + count), blocks[slab.slab], slab)
            at += count
    builder.finish()
    return open_prebuilt(memory, load.plan)


class Rig:
    """A store and its memory. Sessions are named by their numbers."""

    def __init__(
        self,
        *,
        hbm: int = 16,
        dram: int = 16,
        nvme: int = 32,
        rows: int = 256,
        devices: int = 1,
        limits: StoreLimits | None = None,
        fault: Callable[[str], None] = lambda _name: None,
    ) -> None:
        shape = TableShape(
            max_rows=rows, hbm_slots=256, dram_slots=256, nvme_slots=256, devices=devices, max_extents=32,
            max_sessions=8, max_namespaces=4,
        )  # fmt: skip
        self.limits = limits or StoreLimits(reserve_slots=1, reserve_fraction=0.0)
        self.memory = memoryview(bytearray(table_bytes(shape)))
        self.fault = fault
        self.store = Store.create(self.memory, shape, self.limits, Lru(), fault=fault)
        self.now_ms = 1_700_000_000_000
        self.message = 0
        self.tokens = 0
        self.namespaces: dict[int, int] = {}
        if hbm:
            self.store.add_extent(tier=Tier.HBM, device=0, nbytes=hbm * PAGE, slot_bytes=PAGE)
        if dram:
            self.store.add_extent(tier=Tier.DRAM, device=0, nbytes=dram * PAGE)
        if nvme:
            self.store.add_extent(tier=Tier.NVME, device=0, nbytes=nvme * 2 * PAGE)

    def attach(self, *, device: int | None = 0, slot_bytes: int = PAGE, digest: bytes = DIGEST) -> int:
        """An attached session with one namespace open."""
        self.tokens += 1
        session = self.store.attach(
            now_ms=self.now_ms, name=f"engine {self.tokens}", token_digest=self.tokens.to_bytes(16, "little"),
            device=device, slot_bytes=slot_bytes, members=1,
        )  # fmt: skip
        self.store.activate(session)
        self.namespaces[session] = self.store.open_namespace(session, digest)
        return session

    def acquire(
        self, session: int, hashes: NDArray[np.uint64], *, lease: int = 1, first: int = 0, reserve: int = 0,
        private: bool = False,
    ) -> Grant:  # fmt: skip
        """One acquire; each gets a message id of its own."""
        self.message += 1
        self.now_ms += 1
        return self.store.acquire(
            now_ms=self.now_ms, session=session, namespace=self.namespaces[session], lease=lease, hashes=hashes,
            first=first, reserve=reserve, private_fill=private, grant_id=self.message,
        )  # fmt: skip

    def step(
        self,
        session: int,
        *,
        seals: NDArray[np.void] | None = None,
        loads: NDArray[np.void] | None = None,
        stores: NDArray[np.void] | None = None,
        store_checksums: NDArray[np.uint64] = NO_CHECKSUMS,
        wrong_loads: NDArray[np.void] | None = None,
        hbm: NDArray[np.uint32] = NO_SLOTS,
        dram: NDArray[np.uint32] = NO_SLOTS,
        seen: int | None = None,
        want_slots: int = 0,
        want_room: int = 0,
    ) -> list[int]:
        """One step; returns the outcomes of its seals. `seen` None: everything."""
        self.now_ms += 1
        answer = self.store.step(
            now_ms=self.now_ms,
            session=session,
            seals=np.empty(0, dtype=SEAL) if seals is None else seals,
            loads=np.empty(0, dtype=COPY) if loads is None else loads,
            stores=np.empty(0, dtype=COPY) if stores is None else stores,
            store_checksums=store_checksums,
            wrong_loads=np.empty(0, dtype=COPY) if wrong_loads is None else wrong_loads,
            released_hbm=hbm[hbm != NONE],
            released_dram=dram[dram != NONE],
            seen=self.message if seen is None else seen,
            want_slots=want_slots,
            want_room=want_room,
        )
        outcomes: list[int] = answer.seal_outcomes.tolist()
        return outcomes

    def seals(
        self,
        session: int,
        hashes: NDArray[np.uint64],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        *,
        first: int = 0,
    ) -> NDArray[np.void]:
        """Seal records of a chain, block by block from `first` on."""
        records = np.zeros(len(slots), dtype=SEAL)
        records["slot"], records["generation"] = slots, generations
        records["namespace"] = self.namespaces[session]
        records["depth"] = np.arange(first, first + len(slots))
        records["hash"] = hashes[first : first + len(slots)]
        if len(slots) > 1:
            records["parent"][1:] = hashes[first : first + len(slots) - 1]
        return records

    def fill(self, session: int, hashes: NDArray[np.uint64], *, keep: bool = False) -> Grant:
        """Computes and seals what of a chain is a miss; lets go of all of it unless `keep`."""
        grant = self.acquire(session, hashes)
        miss = grant.outcomes == Outcome.MISS
        first = int(miss.argmax()) if miss.any() else len(hashes)
        self.step(
            session,
            seals=self.seals(
                session, hashes, grant.hbm_slots[miss], grant.hbm_generations[miss], first=first
            ),
        )
        if not keep:
            self.step(session, hbm=grant.hbm_slots, dram=grant.dram_slots)
        return grant

    def room(self, session: int, count: int) -> Slots:
        """DRAM slots ahead."""
        self.step(session, want_room=count)
        self.message += 1
        slots = self.store.top_up(session, self.message)
        assert slots is not None
        return slots

    def write_through(
        self, session: int, hashes: NDArray[np.uint64], checksums: NDArray[np.uint64] = NO_CHECKSUMS
    ) -> None:
        """The whole life of a prompt down to DRAM; nothing stays held."""
        grant = self.fill(session, hashes, keep=True)
        room = self.room(session, len(hashes))
        n = len(room.dram_slots)
        self.step(
            session,
            stores=copies(
                grant.hbm_slots[:n], grant.hbm_generations[:n], room.dram_slots, room.dram_generations
            ),
            store_checksums=checksums[:n],
            hbm=grant.hbm_slots,
            dram=room.dram_slots,
        )

    def write_down(self, *, status: MoveStatus = MoveStatus.OK, path: int = 0) -> NDArray[np.void]:
        """The mover does all that it is asked for."""
        moves = self.store.take_moves(path, 1000)
        self.done(moves, status, path=path)
        return moves

    def done(self, moves: NDArray[np.void], status: MoveStatus = MoveStatus.OK, *, path: int = 0) -> None:
        """A mover's answer."""
        self.store.moves_done(
            now_ms=self.now_ms,
            path=path,
            ids=moves["id"],
            statuses=np.full(len(moves), status, dtype=np.uint8),
        )

    def load(self, path: int, slabs: list[LoadSlab], blocks: dict[int, Blocks]) -> Loading:
        """Enters blocks of slabs that were found on disk, all that there are."""
        load = self.store.begin_load(path, slabs, sum(len(each.slots) for each in blocks.values()))
        built = build(load, blocks)
        for copy in load.copies(built, FIRST_COLUMNS + LAST_COLUMNS):
            copy.target[:] = copy.source
        for _ in load.turns(built):
            self.check()
        return load

    def recover(self) -> None:
        """The daemon died; a new one takes the tables over."""
        self.store = Store.recover(self.memory, self.limits, Lru(), now_ms=self.now_ms, fault=self.fault)

    def resume(self, session: int, *, hbm: Slots | Grant | None = None) -> None:
        """States the HBM slots of a grant, or nothing."""
        slots = NO_SLOTS if hbm is None else hbm.hbm_slots
        generations = NO_SLOTS if hbm is None else hbm.hbm_generations
        self.store.resume(
            now_ms=self.now_ms, session=session, hbm_slots=slots, hbm_gens=generations, dram_slots=NO_SLOTS,
            dram_gens=NO_SLOTS,
        )  # fmt: skip
        self.namespaces[session] = self.store.open_namespace(session, DIGEST)

    def outcomes(self, session: int, hashes: NDArray[np.uint64]) -> list[Outcome]:
        """What an acquire says, with everything that it gave let go at once."""
        grant = self.acquire(session, hashes, lease=999)
        self.store.cancel(session, 999)
        self.step(session, hbm=np.concatenate((grant.hbm_slots, grant.reserve_slots)), dram=grant.dram_slots)
        return [Outcome(each) for each in grant.outcomes]

    def evict_hbm(self) -> None:
        """Drops every HBM copy that may go."""
        state, evictor = self.store._state, self.store._evictor
        slots = np.arange(len(state.hbm), dtype=np.uint32)
        evictor.evict(Tier.HBM, slots[evictor.evictable(state.hbm, slots)])

    def evict_dram(self) -> None:
        """Drops every DRAM copy that may go."""
        state, evictor = self.store._state, self.store._evictor
        slots = np.arange(len(state.dram), dtype=np.uint32)
        evictor.evict(Tier.DRAM, slots[evictor.evictable(state.dram, slots)])

    def counter(self, name: str) -> int:
        """A counter, 0 where it never counted."""
        return self.store.stats().counters.get(name, 0)

    def tier(self, tier: Tier):  # type: ignore[no-untyped-def]
        """Statistics of a tier."""
        return self.store.stats().tiers[tier]

    def check(self) -> None:
        """The store is sound."""
        assert self.store.check_integrity() == []


def copies(
    sources: NDArray[np.uint32],
    source_generations: NDArray[np.uint32],
    targets: NDArray[np.uint32],
    target_generations: NDArray[np.uint32],
) -> NDArray[np.void]:
    """COPY records."""
    records = np.zeros(len(sources), dtype=COPY)
    records["source"], records["source_generation"] = sources, source_generations
    records["target"], records["target_generation"] = targets, target_generations
    return records
