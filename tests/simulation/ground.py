"""What the world of the store stands on: its memory with known contents, who holds what, a daemon that may die.

The naive model is in plain dicts: what each piece of memory really contains, who holds what, what movers have in
hand. `check` compares it with the store.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from eviction.lru import Lru
from eviction.reuse_ages import ReuseAges
from kvstore.layout import SlotState, TableShape, Tier, states, table_bytes
from kvstore.moves import StoreLimits
from kvstore.store import Store
from kvstore.tenant import Tenant
from kvstore.tiering.next_turns import CLASSES, NextTurns

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


class Ground:
    """The machine without what happens in it."""

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
