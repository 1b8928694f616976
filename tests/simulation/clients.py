"""Engines of the simulated machine: what they hold, what they do next, and what they were given that was wrong.

One without HBM of its own fills DRAM slots, seals them and reads hits in place. One with HBM fills and seals there,
copies down into room and copies hits up. All of them live through deaths of the daemon and resume with what they hold;
memory is gone when everything dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvstore.layout import Tier
from kvstore.moves import Grant, Outcome, SealOutcome
from kvstore.wire.packed import COPY, SEAL
from tests.simulation.machine import Machine
from tests.simulation.oracle import Key, address, key_of, payload
from tests.simulation.shape import SLOT_BYTES, Wrong

NAMESPACES, CHAINS, BLOCKS = 2, 5, 12
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_SUMS = np.empty((0, 2), dtype=np.uint64)
_NO_SEALS, _NO_COPIES = np.empty(0, dtype=SEAL), np.empty(0, dtype=COPY)
_GARBAGE = b"\xa5" * SLOT_BYTES
_TIERS = (Tier.HBM, Tier.DRAM)
_MOST_QUEUED = 6  # requests of an engine
Slot = tuple[Tier, int]


@dataclass
class Held:
    """A slot that a client holds."""

    generation: int
    key: Key | None = None
    """The block in it; None: it is the client's to fill."""


@dataclass
class Client:
    """One engine."""

    id: int
    namespace: int
    which: int
    """Namespace in the world's counting."""
    device: int | None
    compares: bool = False
    """It says the checksums of what it stores, and holds what it loads against them."""
    held: dict[Slot, Held] = field(default_factory=dict)
    queued: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Chains that it has announced or asked for and was not given in full, by lease."""
    loads: list[tuple[Slot, Slot]] = field(default_factory=list)
    """(from, to) that it was given and has not copied yet."""
    seen: int = 0

    def slots(self, tier: Tier, *, filled: bool) -> list[int]:
        """Its slots of a tier that hold a block, or that it may fill."""
        loading = {target for _, target in self.loads}
        return [
            slot[1]
            for slot, held in self.held.items()
            if slot[0] is tier and (held.key is not None) is filled and slot not in loading
        ]


def chains() -> np.ndarray:
    """[namespace, chain, block, 2] hashes; the first blocks of a namespace's chains are the same."""
    hashes = np.random.default_rng(11).integers(1, 2**63, (NAMESPACES, CHAINS, BLOCKS, 2), dtype=np.uint64)
    hashes[:, :, :3] = hashes[:, :1, :3]
    return hashes


class Clients:
    """All engines; `act` lets one of them do something."""

    def __init__(self, machine: Machine, *, most: int = 3) -> None:
        self.machine = machine
        self.rng = random.Random(machine.rng.random())
        self.hashes = chains()
        self.all: dict[int, Client] = {}
        self.sealed: Callable[[Key], None] = lambda key: None
        """Told of every block that is about to be published."""
        self._most = most
        self._grant = 1
        self._lease = 1
        self._tokens = 0

    # ------------------------------------------------------------ what one does

    def act(self) -> None:
        """One engine does something."""
        if len(self.all) < self._most and (not self.all or self.rng.random() < 0.2):
            self.attach()
            return
        client = self.rng.choice(list(self.all.values()))
        if client.loads and self.rng.random() < 0.5:
            self.load(client)
            return
        acts = (self.fill, self.acquire, self.copy_down, self.release, self.prefetch, self.cancel, self.leave)
        weights = (8, 5, 0, 6, 2, 1, 0.3) if client.device is None else (2, 6, 5, 6, 2, 1, 0.3)
        self.rng.choices(acts, weights)[0](client)

    def attach(self) -> None:
        """A new engine."""
        self._tokens += 1
        store = self.machine.life.store
        which = self.rng.randrange(NAMESPACES)
        device = 0 if self.machine.shape.hbm_slots and self.rng.random() < 0.4 else None
        compares = bool(self.machine.shape.comparing) and self.rng.random() < self.machine.shape.comparing
        if compares:
            device = self.rng.randrange(self.machine.shape.devices)
        session = store.attach(
            now_ms=self._now_ms(),
            name="sim",
            token_digest=self._tokens.to_bytes(16, "little"),
            device=device,
            slot_bytes=SLOT_BYTES,
            members=1,
        )
        store.activate(session)
        store.sharing.verifies(session, compares)
        namespace = store.open_namespace(session, bytes([which + 1]) * 32)
        self.all[session] = Client(
            id=session, namespace=namespace, which=which, device=device, compares=compares
        )
        self.machine.note(f"session {session} attaches for namespace {which}, device {device}")

    def fill(self, client: Client) -> None:
        """Takes slots ahead for some blocks of a chain, writes the blocks and seals them."""
        chain = self.rng.randrange(CHAINS)
        first = self.rng.choice((0, 0, 0, self.rng.randrange(BLOCKS)))
        count = self.rng.randrange(1, BLOCKS - first + 1)
        tier = Tier.DRAM if client.device is None else Tier.HBM
        self._take_ahead(client, tier, count)
        room = client.slots(tier, filled=False)[:count]
        if room:
            blocks = self.hashes[client.which, chain, first : first + len(room)]
            self._seal(client, chain, first, [(tier, slot) for slot in room], blocks)

    def acquire(self, client: Client) -> None:
        """Asks for a chain and reads what it is given; with HBM, also loads hits and fills what is missing.

        Often for one that it has announced, or that it was not given in full.
        """
        if client.queued and self.rng.random() < 0.6:
            lease, chain, hashes = self.rng.choice(
                [(lease, chain, hashes) for lease, (chain, hashes) in client.queued.items()]
            )
        else:
            self._lease += 1
            lease, chain = self._lease, self.rng.randrange(CHAINS)
            hashes = self.hashes[client.which, chain, : self.rng.randrange(1, BLOCKS + 1)]
        self._grant += 1
        grant = self.machine.life.store.acquire(
            now_ms=self._now_ms(),
            session=client.id,
            namespace=client.namespace,
            lease=lease,
            hashes=hashes,
            first=0,
            reserve=0,
            private_fill=False,
            grant_id=self._grant,
        )
        client.seen = self._grant
        client.queued.pop(lease, None)
        if not grant.complete and len(client.queued) < _MOST_QUEUED:
            client.queued[lease] = chain, hashes
        loads, fills = self._take_grant(client, grant, hashes)
        self.machine.life.owner.settle_soon()
        if client.compares and self.rng.random() < 0.5:
            client.loads += loads  # others may find some of it wrong before it looks
        elif loads:
            self._copy(client, loads)
        if fills and self.rng.random() < 0.8:
            count = self.rng.randrange(1, len(fills) + 1)
            first = fills[0][0]
            slots: list[Slot] = [(Tier.HBM, slot) for _, slot in fills[:count]]
            self._seal(client, chain, first, slots, hashes[first : first + count])

    def _take_grant(
        self, client: Client, grant: Grant, hashes: np.ndarray
    ) -> tuple[list[tuple[Slot, Slot]], list[tuple[int, int]]]:
        """What is to be loaded (from, to), and what is to be filled (position, HBM slot), without a gap."""
        loads: list[tuple[Slot, Slot]] = []
        fills: list[tuple[int, int]] = []
        for at, outcome in enumerate(grant.outcomes.tolist()):
            key = key_of(hashes[at])
            hbm, dram = int(grant.hbm_slots[at]), int(grant.dram_slots[at])
            if outcome == Outcome.HIT_HBM:
                self._serve(client, (Tier.HBM, hbm), int(grant.hbm_generations[at]), key)
            elif outcome == Outcome.HIT_DRAM:
                self._serve(client, (Tier.DRAM, dram), int(grant.dram_generations[at]), key)
                if client.device is not None:
                    self._own(client, (Tier.HBM, hbm), int(grant.hbm_generations[at]))
                    loads.append(((Tier.DRAM, dram), (Tier.HBM, hbm)))
            elif outcome == Outcome.MISS and client.device is not None:
                self._own(client, (Tier.HBM, hbm), int(grant.hbm_generations[at]))
                fills.append((at, hbm))
        return loads, fills

    def load(self, client: Client) -> None:
        """Copies what it was given some time ago, as far as it has that still."""
        loads = [pair for pair in client.loads if all(slot in client.held for slot in pair)]
        client.loads = []
        if loads:
            self._copy(client, loads)

    def copy_down(self, client: Client) -> None:
        """Copies some of its blocks from HBM into room."""
        filled = client.slots(Tier.HBM, filled=True)
        if not filled:
            return
        self._take_ahead(client, Tier.DRAM, self.rng.randrange(1, 6))
        room = client.slots(Tier.DRAM, filled=False)
        pairs: list[tuple[Slot, Slot]] = [
            ((Tier.HBM, hbm), (Tier.DRAM, dram)) for hbm, dram in zip(filled, room, strict=False)
        ]
        if pairs:
            self._copy(client, pairs)

    def release(self, client: Client) -> None:
        """Lets go of some of what it holds, also of what it was filling."""
        copying = {slot for pair in client.loads for slot in pair}
        idle = sorted(client.held.keys() - copying)
        slots = self.rng.sample(idle, self.rng.randrange(len(idle) + 1))
        self._step(client, released=slots)
        for slot in slots:
            del client.held[slot]

    def prefetch(self, client: Client) -> None:
        """Announces a request for a chain, to be made at some time."""
        self._lease += 1
        chain, now_ms = self.rng.randrange(CHAINS), self._now_ms()
        hashes = self.hashes[client.which, chain, : self.rng.randrange(1, BLOCKS + 1)]
        self.machine.life.store.prefetch(
            now_ms=now_ms,
            session=client.id,
            namespace=client.namespace,
            lease=self._lease,
            hashes=hashes,
            deadline_ms=self.rng.choice((0, now_ms + self.rng.randrange(500))),
        )
        if len(client.queued) < _MOST_QUEUED:
            client.queued[self._lease] = chain, hashes
        self.machine.life.owner.settle_soon()

    def cancel(self, client: Client) -> None:
        """Wants one of its requests no more."""
        lease = self.rng.choice(list(client.queued) or [self._lease])
        client.queued.pop(lease, None)
        self.machine.life.store.cancel(client.id, lease)

    def leave(self, client: Client) -> None:
        """Its process ends."""
        self.machine.life.store.dead(client.id, self._now_ms())
        del self.all[client.id]
        self.machine.life.owner.settle_soon()

    # ------------------------------------------------------------ deaths of others

    def resume(self) -> None:
        """A new daemon over the same memory: everybody states what it holds."""
        store = self.machine.life.store
        alive = {session.session for session in store.stats().sessions}
        for client in list(self.all.values()):
            if client.id not in alive:  # it was leaving, or coming
                del self.all[client.id]
                continue
            self._forget_lost(client)
            stated = {tier: self._stated(client, tier) for tier in _TIERS}
            store.resume(
                now_ms=self._now_ms(),
                session=client.id,
                hbm_slots=stated[Tier.HBM][0],
                hbm_gens=stated[Tier.HBM][1],
                dram_slots=stated[Tier.DRAM][0],
                dram_gens=stated[Tier.DRAM][1],
            )
            store.sharing.verifies(client.id, client.compares)
            client.namespace = store.open_namespace(client.id, bytes([client.which + 1]) * 32)
            client.seen = self._grant
        for session in alive - set(self.all):
            store.dead(session, self._now_ms())

    def _stated(self, client: Client, tier: Tier) -> tuple[np.ndarray, np.ndarray]:
        held = [(slot, held.generation) for (of, slot), held in sorted(client.held.items()) if of is tier]
        packed = np.array(held, dtype=np.uint32).reshape(-1, 2)
        return packed[:, 0].copy(), packed[:, 1].copy()

    def _forget_lost(self, client: Client) -> None:
        """What it was letting go of when the daemon died may be gone."""
        for (tier, slot), held in list(client.held.items()):
            pool = self.machine.life.store._state.pool(tier)
            has = int(pool.holders[slot]) >> client.id & 1
            if not has or int(pool.generations(np.array([slot], dtype=np.uint32))[0]) != held.generation:
                del client.held[tier, slot]

    def vanish(self) -> None:
        """Everything died."""
        self.all.clear()

    def check(self) -> None:
        """Each holds in the tables what it believes, and what it was given has its bytes still."""
        for client in self.all.values():
            for (tier, slot), held in client.held.items():
                if not int(self.machine.life.store._state.pool(tier).holders[slot]) >> client.id & 1:
                    raise Wrong(f"session {client.id} lost {tier.name} slot {slot}")
                if held.key is not None and not (client.compares and self._may_differ((tier, slot))):
                    self._compare((tier, slot), held.key)

    # ------------------------------------------------------------ inside

    def _now_ms(self) -> int:
        return self.machine.life.owner.now_ms()

    def _take_ahead(self, client: Client, tier: Tier, count: int) -> None:
        """Asks for slots to fill, as far as it has none."""
        wanted = max(0, count - len(client.slots(tier, filled=False)))
        if tier is Tier.HBM:
            self._step(client, want_slots=wanted)
        else:
            self._step(client, want_room=wanted)
        self._grant += 1
        given = self.machine.life.store.top_up(client.id, self._grant)
        if given is None:
            return
        client.seen = self._grant
        for of, slots, generations in (
            (Tier.HBM, given.hbm_slots, given.hbm_generations),
            (Tier.DRAM, given.dram_slots, given.dram_generations),
        ):
            for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                self._own(client, (of, slot), generation)

    def _seal(
        self, client: Client, chain: int, first: int, slots: Sequence[Slot], blocks: np.ndarray
    ) -> None:
        """Writes blocks, which follow each other in the chain, and says that they are complete."""
        seals = np.zeros(len(slots), dtype=SEAL)
        for at, (slot, words) in enumerate(zip(slots, blocks, strict=True)):
            depth = first + at
            self._write(slot, payload(key_of(words)))
            seals[at]["slot"], seals[at]["generation"] = slot[1], client.held[slot].generation
            seals[at]["namespace"], seals[at]["depth"], seals[at]["hash"] = client.namespace, depth, words
            if depth:
                seals[at]["parent"] = self.hashes[client.which, chain, depth - 1]
            client.held[slot].key = key_of(words)  # said, perhaps unanswered: never written again
            self.sealed(key_of(words))
        outcomes = self._step(client, seals=seals).tolist()
        for slot, outcome in zip(slots, outcomes, strict=True):
            if outcome == SealOutcome.STALE:
                raise Wrong(f"a seal of slot {slot} is stale")
            if outcome != SealOutcome.PUBLISHED:
                client.held[slot].key = None
        self.machine.note(
            f"session {client.id} seals {len(slots)} of chain {client.which}.{chain} from {first}"
        )

    def _copy(self, client: Client, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Copies blocks between HBM and DRAM, all in one direction, and reports it."""
        copies = np.zeros(len(pairs), dtype=COPY)
        for at, (source, target) in enumerate(pairs):
            key = client.held[source].key
            assert key is not None
            self._write(target, self._read(source))
            copies[at] = (
                *(source[1], client.held[source].generation),
                *(target[1], client.held[target].generation),
            )
            client.held[target].key = key
        if pairs[0][1][0] is Tier.HBM:
            self._say_loaded(client, pairs, copies)
        else:
            for source, _ in pairs:
                key = client.held[source].key
                assert key is not None
                self.sealed(key)
            sums = [self._checksum(target) for _, target in pairs] if client.compares else []
            self._step(client, stores=copies, sums=np.array(sums, dtype=np.uint64).reshape(-1, 2))
        self.machine.note(f"session {client.id} copies {len(pairs)} to {pairs[0][1][0].name}")

    def _say_loaded(self, client: Client, pairs: Sequence[tuple[Slot, Slot]], copies: np.ndarray) -> None:
        """Reports loads; who compares uses nothing that differs, and gives it back."""
        differs = np.zeros(len(pairs), dtype=np.bool_)
        if client.compares:
            table = self.machine.life.store._state.checksums
            sources = copies["source"].astype(np.uint32)
            found = np.array([self._checksum(target) for _, target in pairs], dtype=np.uint64)
            differs = table.known(sources) & (found != table.of(sources)).any(axis=1)
            if (differs & ~table.unread(sources)).any():
                raise Wrong(f"session {client.id} finds blocks wrong that were stored or looked at")
        wrong = [slot for pair, bad in zip(pairs, differs.tolist(), strict=True) if bad for slot in pair]
        for slot in wrong:  # used no more, also where the daemon dies before it has heard of it
            client.held.pop(slot, None)
        self._step(client, loads=copies[~differs], wrong=copies[differs], released=wrong)
        self.machine.counts["differed"] += int(differs.sum())
        for (source, target), bad in zip(pairs, differs.tolist(), strict=True):
            if not bad:  # it is used now
                key = client.held[source].key
                assert key is not None
                if self._read(target) != payload(key):
                    raise Wrong(f"block {key} was loaded from {source} with other bytes")

    def _checksum(self, slot: Slot) -> tuple[int, int]:
        """xxh3-128, low half first."""
        both = xxhash.xxh3_128_intdigest(self._read(slot))
        return both & 0xFFFFFFFFFFFFFFFF, both >> 64

    def _may_differ(self, slot: Slot) -> bool:
        """Whether nobody has looked at a slot, or somebody has, and found other bytes: nothing of it is used."""
        if slot[0] is not Tier.DRAM:
            return False
        state, at = self.machine.life.store._state, np.array([slot[1]], dtype=np.uint32)
        return bool(state.checksums.unread(at)[0] or state.dram.distrusted(at)[0])

    def _serve(self, client: Client, slot: Slot, generation: int, key: Key) -> None:
        """A block is given to an engine."""
        if not (client.compares and self._may_differ(slot)):
            self._compare(slot, key)
        client.held[slot] = Held(generation, key)
        self.machine.counts["served"] += 1

    def _compare(self, slot: Slot, key: Key) -> None:
        if self._read(slot) != payload(key):
            raise Wrong(f"{slot[0].name} slot {slot[1]} was served as block {key} with other bytes")

    def _own(self, client: Client, slot: Slot, generation: int) -> None:
        """A slot to fill is nobody else's; garbage is in it at once."""
        for other in self.all.values():
            if slot in other.held:
                raise Wrong(f"slot {slot} is given to {client.id} and held by {other.id}")
        client.held[slot] = Held(generation)
        self._write(slot, _GARBAGE)

    def _read(self, slot: Slot) -> bytes:
        extent, at = address(self.machine.life, *slot)
        return bytes(self.machine.memory(slot[0])[extent][at : at + SLOT_BYTES])

    def _write(self, slot: Slot, data: bytes) -> None:
        extent, at = address(self.machine.life, *slot)
        self.machine.memory(slot[0])[extent][at : at + SLOT_BYTES] = data

    def _step(
        self,
        client: Client,
        *,
        seals: np.ndarray = _NO_SEALS,
        loads: np.ndarray = _NO_COPIES,
        stores: np.ndarray = _NO_COPIES,
        sums: np.ndarray = _NO_SUMS,
        wrong: np.ndarray = _NO_COPIES,
        released: Sequence[Slot] = (),
        want_slots: int = 0,
        want_room: int = 0,
    ) -> np.ndarray:
        gone = {
            tier: np.array([slot for of, slot in released if of is tier], dtype=np.uint32) for tier in _TIERS
        }
        answer = self.machine.life.store.step(
            now_ms=self._now_ms(),
            session=client.id,
            seals=seals,
            loads=loads,
            stores=stores,
            store_checksums=sums,
            wrong_loads=wrong,
            released_hbm=gone[Tier.HBM],
            released_dram=gone[Tier.DRAM],
            seen=client.seen,
            want_slots=want_slots,
            want_room=want_room,
        )
        self.machine.life.owner.settle_soon()
        return answer.seal_outcomes


__all__ = ["BLOCKS", "CHAINS", "NAMESPACES", "Client", "Clients", "Held", "chains"]
