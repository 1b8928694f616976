"""Engines of the world: what they ask, write, seal, copy and let go of, and what must be true of each answer."""

import numpy as np

from kvstore.layout import NONE, Tier
from kvstore.moves import Grant, MoveKind, Outcome, SealOutcome
from kvstore.wire.packed import COPY, SEAL
from tests.simulation.ground import NO_SLOTS, PAGE, Client, Content, Ground, Key


class Engines(Ground):
    """Every public method is one operation of an engine."""

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
