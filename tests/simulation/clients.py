"""Engines of the simulated machine: what they hold, what they do next, and what they were given that was wrong.

An engine without HBM of its own fills DRAM slots, seals them, reads hits in place and lets go. It lives through
deaths of the daemon and resumes with what it holds; its memory is gone when everything dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import KvstoreError
from kvstore.layout import NONE, Tier
from kvstore.moves import Outcome, SealOutcome
from kvstore.wire.packed import COPY, SEAL
from tests.simulation.machine import SLOT_BYTES, Machine, Wrong
from tests.simulation.oracle import Key, address, key_of, payload

NAMESPACES, CHAINS, BLOCKS = 2, 5, 12
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_GARBAGE = b"\xa5" * SLOT_BYTES


@dataclass
class Held:
    """A DRAM slot that a client holds."""

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
    held: dict[int, Held] = field(default_factory=dict)
    seen: int = 0


def chains() -> np.ndarray:
    """[namespace, chain, block, 2] hashes; the first blocks of a namespace's chains are the same."""
    hashes = np.random.default_rng(11).integers(1, 2**63, (NAMESPACES, CHAINS, BLOCKS, 2), dtype=np.uint64)
    hashes[:, :, :3] = hashes[:, :1, :3]
    return hashes


class Clients:
    """All engines. Every method of `moves` is one thing that an engine does."""

    def __init__(self, machine: Machine, *, most: int = 3) -> None:
        self.machine = machine
        self.rng = random.Random(machine.rng.random())
        self.hashes = chains()
        self.all: dict[int, Client] = {}
        self.sealed: Callable[[Key], None] = lambda key: None
        """Told of every block that was published."""
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
        act = self.rng.choices(
            (self.fill, self.acquire, self.release, self.prefetch, self.cancel, self.leave),
            (8, 5, 6, 2, 1, 0.3),
        )[0]
        act(client)

    def attach(self) -> None:
        """A new engine."""
        self._tokens += 1
        store = self.machine.life.store
        which = self.rng.randrange(NAMESPACES)
        session = store.attach(
            now_ms=self.machine.life.owner.now_ms(),
            name="sim",
            token_digest=self._tokens.to_bytes(16, "little"),
            device=None,
            slot_bytes=SLOT_BYTES,
            members=1,
        )
        store.activate(session)
        namespace = store.open_namespace(session, bytes([which + 1]) * 32)
        self.all[session] = Client(id=session, namespace=namespace, which=which)
        self.machine.note(f"session {session} attaches for namespace {which}")

    def fill(self, client: Client) -> None:
        """Takes room for some blocks of a chain, writes them and seals them."""
        chain = self.rng.randrange(CHAINS)
        first = self.rng.choice((0, 0, 0, self.rng.randrange(BLOCKS)))
        count = self.rng.randrange(1, BLOCKS - first + 1)
        room = [slot for slot, held in client.held.items() if held.key is None]
        self._step(client, want_room=max(0, count - len(room)))
        self._grant += 1
        slots = self.machine.life.store.top_up(client.id, self._grant)
        if slots is not None:
            client.seen = self._grant
            for slot, generation in zip(
                slots.dram_slots.tolist(), slots.dram_generations.tolist(), strict=True
            ):
                self._own(client, slot, generation)
                room.append(slot)
        blocks = self.hashes[client.which, chain, first : first + min(count, len(room))]
        if not len(blocks):
            return
        seals = np.zeros(len(blocks), dtype=SEAL)
        for at, (slot, words) in enumerate(zip(room, blocks, strict=False)):
            self._write(slot, payload(key_of(words)))
            depth = first + at
            seals[at]["slot"], seals[at]["generation"] = slot, client.held[slot].generation
            seals[at]["namespace"], seals[at]["depth"], seals[at]["hash"] = client.namespace, depth, words
            if depth:
                seals[at]["parent"] = self.hashes[client.which, chain, depth - 1]
            client.held[slot].key = key_of(words)  # said, perhaps unanswered: never written again
            self.sealed(key_of(words))
        outcomes = self._step(client, seals=seals).tolist()
        for slot, outcome in zip(room, outcomes, strict=False):
            if outcome == SealOutcome.STALE:
                raise Wrong(f"a seal of slot {slot} is stale")
            if outcome != SealOutcome.PUBLISHED:
                client.held[slot].key = None
        self.machine.note(
            f"session {client.id} seals {len(blocks)} of chain {client.which}.{chain} from {first}"
        )

    def acquire(self, client: Client) -> None:
        """Asks for a chain and reads what it is given."""
        chain = self.rng.randrange(CHAINS)
        hashes = self.hashes[client.which, chain, : self.rng.randrange(1, BLOCKS + 1)]
        self._grant += 1
        self._lease += 1
        grant = self.machine.life.store.acquire(
            now_ms=self.machine.life.owner.now_ms(),
            session=client.id,
            namespace=client.namespace,
            lease=self._lease,
            hashes=hashes,
            first=0,
            reserve=0,
            private_fill=False,
            grant_id=self._grant,
        )
        client.seen = self._grant
        hits = 0
        for at, outcome in enumerate(grant.outcomes.tolist()):
            if outcome == Outcome.HIT_DRAM:
                slot, key = int(grant.dram_slots[at]), key_of(hashes[at])
                self.serve(slot, key)
                client.held[slot] = Held(int(grant.dram_generations[at]), key)
                hits += 1
        self.machine.counts["served"] += hits
        self.machine.life.owner.settle_soon()

    def serve(self, slot: int, key: Key) -> None:
        """A block is given to an engine. Raises Wrong where it is not that block."""
        extent, at = address(self.machine.life, Tier.DRAM, slot)
        if bytes(self.machine.dram[extent][at : at + SLOT_BYTES]) != payload(key):
            raise Wrong(f"slot {slot} was served as block {key} with other bytes")

    def release(self, client: Client) -> None:
        """Lets go of some of what it holds, also of what it was filling."""
        slots = self.rng.sample(sorted(client.held), self.rng.randrange(len(client.held) + 1))
        self._step(client, released=np.array(slots, dtype=np.uint32))
        for slot in slots:
            del client.held[slot]

    def prefetch(self, client: Client) -> None:
        """Has a chain brought up."""
        self._lease += 1
        self.machine.life.store.prefetch(
            now_ms=self.machine.life.owner.now_ms(),
            session=client.id,
            namespace=client.namespace,
            lease=self._lease,
            hashes=self.hashes[client.which, self.rng.randrange(CHAINS)],
            deadline_ms=0,
        )
        self.machine.life.owner.settle_soon()

    def cancel(self, client: Client) -> None:
        """Forgets the newest of its leases."""
        self.machine.life.store.cancel(client.id, self._lease)

    def leave(self, client: Client) -> None:
        """Its process ends."""
        self.machine.life.store.dead(client.id, self.machine.life.owner.now_ms())
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
            slots = sorted(client.held)
            store.resume(
                now_ms=self.machine.life.owner.now_ms(),
                session=client.id,
                hbm_slots=_NO_SLOTS,
                hbm_gens=_NO_SLOTS,
                dram_slots=np.array(slots, dtype=np.uint32),
                dram_gens=np.array([client.held[slot].generation for slot in slots], dtype=np.uint32),
            )
            client.namespace = store.open_namespace(client.id, bytes([client.which + 1]) * 32)
            client.seen = self._grant
        for session in alive - set(self.all):
            store.dead(session, self.machine.now_ms())

    def _forget_lost(self, client: Client) -> None:
        """What it was letting go of when the daemon died may be gone."""
        pool = self.machine.life.store._state.dram
        for slot, held in list(client.held.items()):
            has = int(pool.holders[slot]) >> client.id & 1
            if not has or int(pool.generations(np.array([slot], dtype=np.uint32))[0]) != held.generation:
                del client.held[slot]

    def vanish(self) -> None:
        """Everything died."""
        self.all.clear()

    def check(self) -> None:
        """Each holds in the tables what it believes, and what it was given has its bytes still."""
        pool = self.machine.life.store._state.dram
        for client in self.all.values():
            for slot, held in client.held.items():
                if not int(pool.holders[slot]) >> client.id & 1:
                    raise Wrong(f"session {client.id} lost slot {slot}")
                if held.key is not None:
                    self.serve(slot, held.key)

    # ------------------------------------------------------------ inside

    def _own(self, client: Client, slot: int, generation: int) -> None:
        """A slot to fill is nobody else's; garbage is in it at once."""
        for other in self.all.values():
            if slot in other.held:
                raise Wrong(f"slot {slot} is given to {client.id} and held by {other.id}")
        client.held[slot] = Held(generation)
        self._write(slot, _GARBAGE)

    def _write(self, slot: int, data: bytes) -> None:
        extent, at = address(self.machine.life, Tier.DRAM, slot)
        self.machine.dram[extent][at : at + SLOT_BYTES] = data

    def _step(
        self,
        client: Client,
        *,
        seals: np.ndarray | None = None,
        released: np.ndarray = _NO_SLOTS,
        want_room: int = 0,
    ) -> np.ndarray:
        answer = self.machine.life.store.step(
            now_ms=self.machine.life.owner.now_ms(),
            session=client.id,
            seals=np.empty(0, dtype=SEAL) if seals is None else seals,
            loads=np.empty(0, dtype=COPY),
            stores=np.empty(0, dtype=COPY),
            released_hbm=_NO_SLOTS,
            released_dram=released,
            seen=client.seen,
            want_slots=0,
            want_room=want_room,
        )
        self.machine.life.owner.settle_soon()
        return answer.seal_outcomes


__all__ = ["BLOCKS", "CHAINS", "NAMESPACES", "NONE", "Client", "Clients", "Held", "KvstoreError", "chains"]
