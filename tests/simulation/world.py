"""A small machine around the store: engines, movers and memory whose bytes are known, and crashes at any write.

The naive model is in plain dicts: what each piece of memory really contains, who holds what, what movers have in
hand. After every operation it is compared with the store: each slot that the store calls complete must really contain
its row's block, and the store's holders must be the model's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from eviction.lru import Lru
from eviction.reuse_ages import ReuseAges
from kvstore.layout import NONE, SlotState, TableShape, Tier, states, table_bytes
from kvstore.moves import Grant, MoveKind, MoveStatus, Outcome, SealOutcome, StoreLimits
from kvstore.store import Store
from kvstore.tables.prebuilt import Blocks, Prebuilder, open_prebuilt, prebuilt_bytes
from kvstore.tenant import Tenant
from kvstore.tiering.loading import FIRST_COLUMNS, LAST_COLUMNS, Loading, LoadSlab
from kvstore.tiering.next_turns import CLASSES, NextTurns
from kvstore.wire.packed import COPY, SEAL

PAGE = 4096
Key = tuple[Tier, int]  # tier, slot
Content = tuple[int, ...] | str  # hash words, or garbage
NO_SLOTS = np.empty(0, dtype=np.uint32)


class Crash(Exception):
    """The daemon died between two writes."""


@dataclass
class Client:
    """An engine: what it believes."""

    id: int
    device: int | None
    slot_bytes: int
    token: bytes
    model: int
    namespace: int = -1
    attached: bool = True
    held: dict[Key, int] = field(default_factory=dict)  # generation
    fills: dict[Key, int] = field(
        default_factory=dict
    )  # what it will write: position in `blocks`; -1 free to choose
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)  # hbm slot → (dram slot, its generation)
    room: set[int] = field(default_factory=set)
    sealed: dict[int, int] = field(default_factory=dict)  # hbm slot → block, published by us and still held
    said: set[Key] = field(
        default_factory=set
    )  # reported as complete, perhaps unanswered: never written again
    waiting: set[int] = field(default_factory=set)
    seen: int = 0
    wants: tuple[int, int] = (0, 0)


_TENANTS = (
    Tenant(
        name="a", hbm_reserve_bytes=3 * PAGE, dram_reserve_bytes=6 * PAGE, nvme_reserve_bytes=8 * PAGE,
        nvme_quota_bytes=16 * PAGE,
    ),
    Tenant(name="b", hbm_quota_bytes=4 * PAGE, dram_quota_bytes=12 * PAGE, dram_reserve_bytes=4 * PAGE),
)  # fmt: skip


class World:
    """The machine. Every public method is one operation, after which `check` holds."""

    CHAINS = 4
    BLOCKS = 10

    def __init__(self, seed: int = 0, *, limits: StoreLimits | None = None) -> None:
        self.rng = random.Random(seed)
        self.shape = TableShape(
            max_rows=96, hbm_slots=40, dram_slots=48, nvme_slots=64, devices=2, max_extents=16, max_sessions=6,
            max_namespaces=4,
        )  # fmt: skip
        self.limits = limits or StoreLimits(
            max_waiting_leases=8,
            max_held_slots=200,
            ghosts=32,
            victim_batch=4,
            reserve_slots=1,
            max_writes=16,
            canary_every=2,
        )
        self.memory = memoryview(bytearray(table_bytes(self.shape)))
        self.now_ms = 1_700_000_000_000
        self.fault_in: int | None = None
        self.points: list[str] = []  # fault points that were passed
        self.die_again_in: int | None = None  # the next recovery dies too
        self.crashes = 0
        self.reported = 0  # of the daemon that lives now
        self.next_grant = 1
        self.next_lease = 1
        self.content: dict[tuple[int, int], tuple[int, Content]] = {}  # (extent, offset) → (bytes, content)
        self.clients: dict[int, Client] = {}
        self.in_flight: list[np.void] = []
        self.zombies: list[np.void] = []  # moves of a mover whose daemon died: they may still happen
        self.mover_known_dead = True
        self.tokens = 0
        hashes = np.random.default_rng(7)
        self.blocks: list[np.ndarray] = []
        for _model in range(2):
            shared = hashes.integers(1, 2**63, (3, 2), dtype=np.uint64)
            for _chain in range(self.CHAINS):
                own = hashes.integers(1, 2**63, (self.BLOCKS - 3, 2), dtype=np.uint64)
                self.blocks.append(np.concatenate((shared, own)))
        self.store = Store.create(self.memory, self.shape, self.limits, Lru(), fault=self._fault)
        self._expect_turns()
        self._tell_tenants()
        self._extents()

    def _expect_turns(self) -> None:
        """Blocks of next turns are read while nothing else is."""
        self.store.prefetching.turns = NextTurns(self.shape.max_rows, ReuseAges(CLASSES, 256))

    def _tell_tenants(self) -> None:
        """The models are of two tenants: what each has is counted, and is checked with all else."""
        sharing = self.store.sharing
        sharing.configure(_TENANTS)
        sharing.on_namespace(lambda handle, digest: sharing.assign(handle, _TENANTS[digest[0] % 2].name))

    def _extents(self) -> None:
        add = self.store.add_extent
        add(tier=Tier.HBM, device=0, nbytes=5 * PAGE, slot_bytes=PAGE)
        add(tier=Tier.HBM, device=0, nbytes=3 * PAGE, slot_bytes=PAGE)
        add(tier=Tier.HBM, device=0, nbytes=6 * 2 * PAGE, slot_bytes=2 * PAGE)
        add(tier=Tier.HBM, device=1, nbytes=8 * PAGE, slot_bytes=PAGE)
        for _ in range(3):
            add(tier=Tier.DRAM, device=0, nbytes=6 * PAGE)
        for _ in range(2):
            add(tier=Tier.NVME, device=0, nbytes=24 * PAGE)

    # ------------------------------------------------------------ crashes

    def _fault(self, name: str) -> None:
        self.points.append(name)
        if self.fault_in is not None:
            self.fault_in -= 1
            if self.fault_in < 0:
                self.fault_in = None
                raise Crash

    def _call(
        self, call: Callable[[], object], maybe_released: set[tuple[int, Key]] | None = None
    ) -> object | None:
        """Runs a call into the store; when the daemon dies in it, recovers and returns None."""
        try:
            return call()
        except Crash:
            self.crashes += 1
            self._recover(maybe_released or set())
            return None

    def _recover(self, maybe_released: set[tuple[int, Key]]) -> None:
        """A new daemon over the same memory, and clients that state what they hold."""
        self.zombies += self.in_flight
        self.in_flight = []
        self.reported = 0
        self.mover_known_dead = False
        self.fault_in, self.die_again_in = self.die_again_in, None
        while True:
            try:
                self.store = Store.recover(
                    self.memory, self.limits, Lru(), now_ms=self.now_ms, fault=self._fault
                )
                self._tell_tenants()
                self._expect_turns()
                break
            except Crash:
                self.fault_in = None
        alive = {session.session for session in self.store.stats().sessions}
        for client in list(self.clients.values()):
            if client.id not in alive:
                assert client.id in {number for number, _ in maybe_released}, "a session was lost"
                del self.clients[client.id]
                continue
            client.attached = False
            for key in list(client.held):
                if not self._store_holds(client, key):
                    assert (client.id, key) in maybe_released, f"{key} was taken from session {client.id}"
                    self._forget(client, key)
        self.check()

    def _store_holds(self, client: Client, key: Key) -> bool:
        pool = self.store._state.pool(key[0])
        slot = key[1]
        same = int(pool.generations(np.array([slot], dtype=np.uint32))[0]) == client.held[key]
        return bool(int(pool.holders[slot]) >> client.id & 1) and same

    def _forget(self, client: Client, key: Key) -> None:
        del client.held[key]
        client.fills.pop(key, None)
        client.said.discard(key)
        if key[0] is Tier.HBM:
            client.loads.pop(key[1], None)
            client.sealed.pop(key[1], None)
        else:
            client.room.discard(key[1])

    # ------------------------------------------------------------ memory

    def _address(self, tier: Tier, slot: int) -> tuple[int, int, int]:
        """(extent, offset, bytes) of a slot now."""
        columns = self.store._state.columns
        extent = int(columns.pool(tier).extent[slot])
        size = int(columns.extent_slot_bytes[extent])
        stride = size + (PAGE if tier is Tier.NVME else 0)
        return extent, (slot - int(columns.extent_slot_base[extent])) * stride, stride

    def write(self, tier: Tier, slot: int, content: Content) -> None:
        """Bytes change; whatever overlapped them is gone."""
        extent, offset, size = self._address(tier, slot)
        self._write_at(extent, offset, size, content)

    def _write_at(self, extent: int, offset: int, size: int, content: Content) -> None:
        for there, (length, _) in list(self.content.items()):
            if there[0] == extent and there[1] < offset + size and offset < there[1] + length:
                del self.content[there]
        self.content[extent, offset] = (size, content)

    def read(self, tier: Tier, slot: int) -> Content:
        """Bytes of a slot."""
        extent, offset, _ = self._address(tier, slot)
        return self.content.get((extent, offset), (0, "never written"))[1]

    # ------------------------------------------------------------ clients

    def attach(self, model: int, device: int | None) -> None:
        """A new engine."""
        if len(self.clients) >= self.shape.max_sessions:
            return
        self.tokens += 1
        token = self.tokens.to_bytes(16, "little")
        slot_bytes = PAGE * (1 + model)
        known = set(self.clients)

        def call() -> int:
            session = self.store.attach(
                now_ms=self.now_ms,
                name="sim",
                token_digest=token,
                device=device,
                slot_bytes=slot_bytes,
                members=1,
            )
            self.store.activate(session)
            return session

        session = self._call(call)
        if session is None:
            for info in self.store.stats().sessions:  # it never got its answer: its process goes away
                if info.session not in known:
                    self.store.dead(info.session, self.now_ms)
            return
        assert isinstance(session, int)
        client = Client(id=session, device=device, slot_bytes=slot_bytes, token=token, model=model)
        client.namespace = self.store.open_namespace(session, bytes([model + 1]) * 32)
        self.clients[session] = client

    def client(self, number: int, *, attached: bool = True) -> Client | None:
        """One of the clients, by any number."""
        some = [client for client in self.clients.values() if client.attached is attached]
        return some[number % len(some)] if some else None

    def chain(self, client: Client, chain: int, length: int) -> list[int]:
        """Positions of blocks in `self.blocks`, encoded."""
        number = client.model * self.CHAINS + chain % self.CHAINS
        return [number * self.BLOCKS + i for i in range(min(length, self.BLOCKS))]

    def hash_of(self, block: int) -> np.ndarray:
        """The hash of a block."""
        return self.blocks[block // self.BLOCKS][block % self.BLOCKS]

    def name(self, block: int) -> Content:
        """What the block's bytes are."""
        return tuple(int(word) for word in self.hash_of(block))

    def acquire(
        self, client: Client, chain: int, length: int, *, first: int = 0, reserve: int = 0, private: bool = False,
        stale_release: bool = False,
    ) -> Grant | None:  # fmt: skip
        """One request. `stale_release`: before it reads the answer, the client releases all that it had sealed."""
        blocks = self.chain(client, chain, length)
        first = min(first, len(blocks))
        hashes = np.array([self.hash_of(block) for block in blocks], dtype=np.uint64).reshape(-1, 2)
        self.next_grant += 1
        self.next_lease += 1
        self.now_ms += 1
        lease, grant_id = self.next_lease, self.next_grant
        if self.store._state.waits.of_session(client.id) >= self.limits.max_waiting_leases:
            self.cancel(client)
        grant = self._call(
            lambda: self.store.acquire(
                now_ms=self.now_ms, session=client.id, namespace=client.namespace, lease=lease, hashes=hashes,
                first=first, reserve=reserve, private_fill=private, grant_id=grant_id,
            )
        )  # fmt: skip
        if grant is None:
            return None
        assert isinstance(grant, Grant)
        if stale_release and not self._stale_release(client, grant):
            return None
        self._take_grant(client, grant, blocks[first:], lease)
        client.seen = grant_id
        return grant

    def _stale_release(self, client: Client, grant: Grant) -> bool:
        """Releases slots that the unread grant may name as well. False: the daemon died in it."""
        keys = [(Tier.HBM, slot) for slot in client.sealed]
        return self._step_release(client, keys)

    def _take_grant(self, client: Client, grant: Grant, blocks: list[int], lease: int) -> None:
        outcomes = grant.outcomes.tolist()
        order = [Outcome(each) for each in outcomes]
        hits = 0
        while hits < len(order) and order[hits] in (Outcome.HIT_HBM, Outcome.HIT_DRAM):
            hits += 1
        rest = set(order[hits:])
        waiting = {Outcome.PENDING, Outcome.PROMOTING, Outcome.LATER}
        assert rest <= {Outcome.MISS, Outcome.NO_SLOT} or rest <= waiting or rest <= {Outcome.NO_SLOT}
        assert not rest or rest != {Outcome.LATER}
        for i, outcome in enumerate(order):
            hbm, dram = int(grant.hbm_slots[i]), int(grant.dram_slots[i])
            if outcome is Outcome.HIT_HBM:
                assert self.read(Tier.HBM, hbm) == self.name(blocks[i]), "a hit has other bytes"
                client.held[Tier.HBM, hbm] = int(grant.hbm_generations[i])
            elif outcome is Outcome.HIT_DRAM:
                assert self.read(Tier.DRAM, dram) == self.name(blocks[i]), "a hit has other bytes"
                client.held[Tier.DRAM, dram] = int(grant.dram_generations[i])
                if client.device is not None:
                    self._own(client, (Tier.HBM, hbm), int(grant.hbm_generations[i]))
                    client.loads[hbm] = (dram, int(grant.dram_generations[i]))
            elif outcome is Outcome.MISS and client.device is not None:
                self._own(client, (Tier.HBM, hbm), int(grant.hbm_generations[i]))
                client.fills[Tier.HBM, hbm] = blocks[i]
            else:
                assert hbm == NONE
                assert dram == NONE
        for slot, generation in zip(
            grant.reserve_slots.tolist(), grant.reserve_generations.tolist(), strict=True
        ):
            self._own(client, (Tier.HBM, slot), generation)
            client.fills[Tier.HBM, slot] = -1
        if rest & (waiting | {Outcome.NO_SLOT}):
            client.waiting.add(lease)

    def _own(self, client: Client, key: Key, generation: int) -> None:
        """A slot to fill is nobody else's, not even of a session that is lost, nor of a mover."""
        for other in self.clients.values():
            assert key not in other.held, f"{key} is given to {client.id} and held by {other.id}"
        for move in self.in_flight + self.zombies:
            if move["kind"] == MoveKind.VERIFY:  # reads, holds nothing, and is not believed then
                continue
            assert key != (Tier.DRAM, int(move["dram_slot"])), "a mover still has this slot"
        client.held[key] = generation
        self.write(*key, f"session {client.id} writes")

    def top_up(self, client: Client) -> None:
        """Credit and room."""
        self.next_grant += 1
        grant_id = self.next_grant
        slots = self._call(lambda: self.store.top_up(client.id, grant_id))
        if slots is None:
            return
        for slot, generation in zip(slots.hbm_slots.tolist(), slots.hbm_generations.tolist(), strict=True):
            self._own(client, (Tier.HBM, slot), generation)
            client.fills[Tier.HBM, slot] = -1
        for slot, generation in zip(slots.dram_slots.tolist(), slots.dram_generations.tolist(), strict=True):
            self._own(client, (Tier.DRAM, slot), generation)
            client.room.add(slot)
        client.seen = grant_id

    def _step(self, client: Client, **parts: object) -> object | None:
        said: dict[str, object] = {
            "seals": np.empty(0, dtype=SEAL),
            "loads": np.empty(0, dtype=COPY),
            "stores": np.empty(0, dtype=COPY),
            "released_hbm": NO_SLOTS,
            "released_dram": NO_SLOTS,
            "want_slots": client.wants[0],
            "want_room": client.wants[1],
        }
        said.update(parts)
        self.now_ms += 1
        released = {(client.id, (Tier.HBM, int(slot))) for slot in said["released_hbm"]}  # type: ignore[attr-defined]
        released |= {(client.id, (Tier.DRAM, int(slot))) for slot in said["released_dram"]}  # type: ignore[attr-defined]
        return self._call(
            lambda: self.store.step(now_ms=self.now_ms, session=client.id, seen=client.seen, **said),  # type: ignore[arg-type]
            released,
        )

    def want(self, client: Client, slots: int, room: int) -> None:
        """Asks for credit."""
        client.wants = (slots, room)
        self._step(client)
        client.wants = (0, 0)

    def seal(self, client: Client, count: int, *, twice: bool = False) -> None:
        """Writes and seals some fills: HBM slots, or room where the session has no HBM."""
        tier = Tier.HBM
        if client.device is None:
            tier = Tier.DRAM
            client.fills |= {(tier, slot): -1 for slot in client.room if (tier, slot) not in client.fills}
        picks = [key[1] for key in sorted(client.fills) if key[1] not in client.loads][:count]
        for slot in picks:
            if client.fills[tier, slot] < 0:
                client.fills[tier, slot] = self.rng.choice(
                    self.chain(client, self.rng.randrange(4), self.BLOCKS)
                )
        blocks = [client.fills[tier, slot] for slot in picks]
        if not picks:
            return
        seals = self._seals(client, tier, picks, blocks)
        for _ in range(2 if twice else 1):
            answer = self._step(client, seals=seals)
            if answer is None:  # the client will say it again; here it gives up these slots' meaning
                return
            outcomes = answer.seal_outcomes.tolist()  # type: ignore[attr-defined]
            assert SealOutcome.STALE not in outcomes
            for slot, block, outcome in zip(picks, blocks, outcomes, strict=True):
                if outcome == SealOutcome.PUBLISHED:
                    client.fills.pop((tier, slot), None)
                    client.room.discard(slot)
                    if tier is Tier.HBM:
                        client.sealed[slot] = block

    def _seals(self, client: Client, tier: Tier, picks: list[int], blocks: list[int]) -> np.ndarray:
        """Writes the blocks, once, and says so."""
        seals = np.zeros(len(picks), dtype=SEAL)
        for i, (slot, block) in enumerate(zip(picks, blocks, strict=True)):
            if (tier, slot) not in client.said:
                self.write(tier, slot, self.name(block))
            client.said.add((tier, slot))
            seals[i]["slot"], seals[i]["generation"] = slot, client.held[tier, slot]
            seals[i]["namespace"], seals[i]["depth"] = client.namespace, block % self.BLOCKS
            seals[i]["hash"] = self.hash_of(block)
            if block % self.BLOCKS:
                seals[i]["parent"] = self.hash_of(block - 1)
        return seals

    def load(self, client: Client, count: int) -> None:
        """Copies DRAM → HBM and reports it."""
        picks = sorted(client.loads.items())[:count]
        copies = np.zeros(len(picks), dtype=COPY)
        for i, (hbm, (dram, generation)) in enumerate(picks):
            if (Tier.HBM, hbm) not in client.said:
                self.write(Tier.HBM, hbm, self.read(Tier.DRAM, dram))
            client.said.add((Tier.HBM, hbm))
            copies[i] = (dram, generation, hbm, client.held[Tier.HBM, hbm])
        if len(picks) and self._step(client, loads=copies) is not None:
            for hbm, _ in picks:
                del client.loads[hbm]

    def store_down(self, client: Client, count: int, *, release: bool) -> None:
        """Write-through: copies sealed HBM blocks into room."""
        pairs = list(zip(sorted(client.sealed), sorted(client.room), strict=False))[:count]
        if not pairs or client.device is None:
            return
        copies = np.zeros(len(pairs), dtype=COPY)
        for i, (hbm, dram) in enumerate(pairs):
            self.write(Tier.DRAM, dram, self.read(Tier.HBM, hbm))
            copies[i] = (hbm, client.held[Tier.HBM, hbm], dram, client.held[Tier.DRAM, dram])
            client.room.discard(dram)
        rooms = np.array([dram for _, dram in pairs] if release else [], dtype=np.uint32)
        if self._step(client, stores=copies, released_dram=rooms) is not None:
            for _, dram in pairs if release else ():
                self._forget(client, (Tier.DRAM, dram))

    def release(self, client: Client, count: int) -> None:
        """Lets go of some slots, whatever they are: aborted fills among them."""
        keys = sorted(client.held)
        self.rng.shuffle(keys)
        self._step_release(client, keys[:count])

    def _step_release(self, client: Client, keys: list[Key]) -> bool:
        hbm = np.array([slot for tier, slot in keys if tier is Tier.HBM], dtype=np.uint32)
        dram = np.array([slot for tier, slot in keys if tier is Tier.DRAM], dtype=np.uint32)
        # A load whose source is released is off.
        if self._step(client, released_hbm=hbm, released_dram=dram) is None:
            return False
        for key in keys:
            self._forget(client, key)
        for hbm_slot, (dram_slot, _) in list(client.loads.items()):
            if (Tier.DRAM, dram_slot) not in client.held:
                del client.loads[hbm_slot]
                if (Tier.HBM, hbm_slot) not in client.said:
                    client.fills[Tier.HBM, hbm_slot] = -1
        return True

    def lose(self, client: Client) -> None:
        """The stream breaks; the engine goes on writing into what it holds."""
        client.attached = False
        client.waiting.clear()
        self._call(lambda: self.store.lost(client.id, self.now_ms))
        self.late_write(client)

    def late_write(self, client: Client) -> None:
        """A stopped engine, or its DMA, writes into the slots that it was given to fill."""
        for key in (*client.fills, *((Tier.HBM, slot) for slot in client.loads)):
            if key not in client.said:
                self.write(*key, f"late write of {client.id}")

    def resume(self, client: Client) -> None:
        """Attaches again with a statement."""
        hbm = np.array([slot for tier, slot in client.held if tier is Tier.HBM], dtype=np.uint32)
        dram = np.array([slot for tier, slot in client.held if tier is Tier.DRAM], dtype=np.uint32)
        done = self._call(
            lambda: (
                self.store.resume(
                    now_ms=self.now_ms,
                    session=client.id,
                    hbm_slots=hbm,
                    hbm_gens=np.array([client.held[Tier.HBM, int(s)] for s in hbm], dtype=np.uint32),
                    dram_slots=dram,
                    dram_gens=np.array([client.held[Tier.DRAM, int(s)] for s in dram], dtype=np.uint32),
                ),
                True,
            )
        )
        if done is not None:
            client.attached = True
            client.waiting.clear()
            client.seen = self.next_grant
            client.namespace = self.store.open_namespace(client.id, bytes([client.model + 1]) * 32)

    def kill(self, client: Client) -> None:
        """Every process of the session is gone."""
        keys = {(client.id, key) for key in client.held} | {(client.id, (Tier.HBM, -1))}
        if self._call(lambda: (self.store.dead(client.id, self.now_ms), True), keys) is not None:
            del self.clients[client.id]

    def prefetch(self, client: Client, chain: int, length: int) -> None:
        """Promotion ahead."""
        blocks = self.chain(client, chain, length)
        hashes = np.array([self.hash_of(block) for block in blocks], dtype=np.uint64).reshape(-1, 2)
        self.next_lease += 1
        self._call(
            lambda: self.store.prefetch(
                now_ms=self.now_ms, session=client.id, namespace=client.namespace, lease=self.next_lease,
                hashes=hashes, deadline_ms=0,
            )
        )  # fmt: skip

    def cancel(self, client: Client) -> None:
        """Forgets all that waits, and the newest prefetch."""
        for lease in (*client.waiting, self.next_lease):
            self._call(lambda lease=lease: self.store.cancel(client.id, lease))  # type: ignore[misc]
        client.waiting.clear()

    # ------------------------------------------------------------ movers

    def take_moves(self, limit: int) -> None:
        """The mover asks for work; a new one starts only after the old one is known to be dead."""
        if not self.mover_known_dead:
            self.mover_ended()
        moves = self._call(lambda: self.store.take_moves(0, limit))
        if moves is not None:
            self.in_flight += list(moves)  # type: ignore[call-overload]

    def finish_moves(self, count: int, status: MoveStatus = MoveStatus.OK) -> None:
        """Some moves happen and are answered."""
        done, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        if not done:
            return
        moved = [self._move(move) if status is MoveStatus.OK else status for move in done]
        ids = np.array([move["id"] for move in done], dtype=np.uint64)
        sums = np.array([self._checksum(move) for move in done], dtype=np.uint64)

        def answered() -> None:
            statuses = np.array(moved, dtype=np.uint8)
            assert (self.store.watching.learn(0, ids, statuses, sums) == statuses).all(), "a write is doubted"
            self.store.moves_done(now_ms=self.now_ms, path=0, ids=ids, statuses=statuses)

        self._call(answered)
        assert self.store.stats().counters["wrong_blocks"] == self.reported, "a right block was called wrong"

    def _checksum(self, move: np.void) -> tuple[int, int]:
        """Of what is in DRAM."""
        dram = (int(move["dram_extent"]), int(move["dram_offset"]))
        word = hash(self.content.get(dram, (0, "nothing"))[1])
        return word & 0xFFFFFFFF, 7

    def _move(self, move: np.void) -> MoveStatus:
        """The mover's I/O, by the offsets in the move."""
        name: Content = tuple(int(word) for word in move["hash"])
        length = int(move["length"])
        dram = (int(move["dram_extent"]), int(move["dram_offset"]))
        nvme = (int(move["nvme_extent"]), int(move["nvme_offset"]))
        if move["kind"] == MoveKind.VERIFY:
            return MoveStatus.OK
        if move["kind"] == MoveKind.WRITE:
            content = self.content.get(dram, (0, "nothing"))[1]
            assert content == name, "a mover was writing other bytes than it was told"
            self._write_at(*nvme, length + PAGE, content)
            return MoveStatus.OK
        content = self.content.get(nvme, (0, "nothing"))[1]
        self._write_at(*dram, length, content)
        return MoveStatus.OK if content == name else MoveStatus.CORRUPT

    def zombie_move(self) -> None:
        """A mover whose daemon is gone still finishes something."""
        if self.zombies:
            self._move(self.zombies.pop(self.rng.randrange(len(self.zombies))))

    def mover_ended(self) -> None:
        """The mover has been reaped."""
        self.zombies.clear()
        self.in_flight.clear()
        if self._call(lambda: (self.store.mover_dead(0, self.now_ms), True)) is not None:
            self.mover_known_dead = True

    # ------------------------------------------------------------ the rest

    def tick(self) -> None:
        """Background."""
        self.now_ms += 50
        self._call(lambda: self.store.tick(self.now_ms))
        if (changed := self._call(self.store.take_changed)) is not None:
            for session, leases in changed:  # type: ignore[attr-defined]
                client = self.clients.get(session)
                assert client is not None
                client.waiting -= set(leases)

    def evict(self, tier: Tier) -> None:
        """A tier is needed for other things: all goes that may go."""
        evictor, pool = self.store._evictor, self.store._state.pool(tier)
        slots = np.arange(len(pool), dtype=np.uint32)
        self._call(lambda: evictor.evict(tier, slots[evictor.evictable(pool, slots)]))

    def find(self, client: Client, chain: int) -> None:
        """Another path comes into service, with a chain on its disk; a daemon that dies meanwhile starts over."""
        blocks = self.chain(client, chain, self.BLOCKS)
        hashes = np.array([self.hash_of(block) for block in blocks], dtype=np.uint64)
        parents = np.concatenate((np.zeros((1, 2), dtype=np.uint64), hashes[:-1]))
        slab = LoadSlab(slab=7, nbytes=2 * PAGE * (len(blocks) + 2), slot_bytes=PAGE)
        count = len(blocks)
        found = Blocks(
            hashes=hashes,
            parents=parents,
            namespaces=np.full(count, client.namespace, dtype=np.uint32),
            depths=np.arange(count, dtype=np.uint32),
            touches=np.full(count, (self.now_ms - 1) << 20, dtype=np.uint64),
            slots=np.arange(count, dtype=np.uint32),
            generations=np.ones(count, dtype=np.uint32),
        )

        def load() -> Loading:
            begun = self.store.begin_load(1, [slab], count)
            extent = begun.extents[7]
            for at, block in enumerate(blocks):
                self._write_at(extent, at * 2 * PAGE, PAGE, self.name(block))
            memory = memoryview(bytearray(prebuilt_bytes(begun.plan)))
            builder = Prebuilder(memory, begun.plan)
            builder.fill(np.arange(count), found, begun.plan.slabs[0])
            builder.finish()
            built = open_prebuilt(memory, begun.plan)
            for copy in begun.copies(built, FIRST_COLUMNS + LAST_COLUMNS):
                copy.target[:] = copy.source
            for _ in begun.turns(built):
                self.check()
            return begun

        while self._call(load) is None:
            for info in self.store.extents(Tier.NVME):
                if info.device == 1:
                    self.store.drop_extent(info.extent)
            self.check()

    def clear(self) -> None:
        """An administrator."""
        self._call(lambda: self.store.clear(None))

    def report(self, client: Client, chain: int, length: int) -> None:
        """A client says that these blocks are wrong: they are hits no more, and what is held of them stays held."""
        blocks = self.chain(client, chain, length)
        hashes = np.array([self.hash_of(block) for block in blocks], dtype=np.uint64)
        self._call(lambda: self.store.watching.report(client.namespace, hashes, "they differ"))
        self.reported = self.store.stats().counters["wrong_blocks"]

    def pin(self, client: Client, chain: int) -> None:
        """An administrator."""
        blocks = self.chain(client, chain, 3)
        hashes = np.array([self.hash_of(block) for block in blocks], dtype=np.uint64)
        self._call(
            lambda: self.store.pin(now_ms=self.now_ms, namespace=client.namespace, hashes=hashes, ttl_ms=200)
        )

    def check(self) -> None:
        """Store and model agree; every complete slot has the bytes of its block."""
        faults = self.store.check_integrity()
        assert not faults, faults
        columns = self.store._state.columns
        for tier in Tier:
            pool = self.store._state.pool(tier)
            sealed = np.flatnonzero(states(pool.state) == SlotState.SEALED)
            for slot in sealed.tolist():
                wanted = tuple(int(word) for word in columns.hash[pool.row[slot]])
                assert self.read(tier, slot) == wanted, (
                    f"{tier.name} slot {slot} has other bytes than its row says"
                )
        for client in self.clients.values():
            for tier in (Tier.HBM, Tier.DRAM):
                pool = self.store._state.pool(tier)
                held = set(pool.held_by(np.uint64(1 << client.id)).tolist())
                mine = {slot for each, slot in client.held if each is tier}
                assert mine <= held, f"session {client.id} lost {tier.name} slots {mine - held}"
                if client.attached:
                    assert held == mine, f"session {client.id} leaks {tier.name} slots {held - mine}"
            for slot, block in client.sealed.items():
                assert self.read(Tier.HBM, slot) == self.name(block), "a held block was overwritten"
