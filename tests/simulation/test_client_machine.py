"""The client's real state against the real store, in one thread: lost streams, crashes at any write, any interleaving.

Memory is a plain array of "what it contains". After every action: whatever a client holds, the store holds for it under
that generation (so nothing in use can be given away), and whatever a grant calls a hit contains that block. At the end
everything comes back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from eviction.lru import Lru
from kvstore.client import Listener, Namespace, PendingGrant, SealResult, Session, SlotRun, Targets
from kvstore.client.outbox import Cancel
from kvstore.client.state import SessionState
from kvstore.layout import GENERATION_SHIFT, TableShape, Tier, table_bytes
from kvstore.moves import Grant, Outcome, SealOutcome, StoreLimits
from kvstore.store import Store
from kvstore.wire.packed import COPY, SEAL, hashes_of, records_of, u32_of
from kvstore.wire.v1 import kvstore_pb2 as pb

U32 = NDArray[np.uint32]
SLOT_BYTES = 4096
SHAPE = TableShape(
    max_rows=80, hbm_slots=32, dram_slots=24, nvme_slots=1, max_extents=4, max_sessions=4, max_namespaces=4
)
LIMITS = StoreLimits(ghosts=16, victim_batch=4, reserve_slots=1)
NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)
NO_SEALS: NDArray[np.void] = np.empty(0, dtype=SEAL)
NO_COPIES: NDArray[np.void] = np.empty(0, dtype=COPY)


class Crash(Exception):
    """The daemon died between two writes."""


class Daemon:
    """The store with a thin shell, as `kvstore.daemon.stream` is one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.memory = memoryview(bytearray(table_bytes(SHAPE)))
        self.now_ms = 1_700_000_000_000
        self.crash_in = 0  # fault points until death; 0: never
        self.store = Store.create(self.memory, SHAPE, LIMITS, Lru(), fault=self._fault)
        self.store.add_extent(tier=Tier.HBM, device=0, nbytes=32 * SLOT_BYTES, slot_bytes=SLOT_BYTES)
        self.store.add_extent(tier=Tier.DRAM, device=0, nbytes=24 * SLOT_BYTES)
        self.newest: dict[int, int] = {}
        self.to: dict[int, deque[pb.ServerMessage]] = {}

    def _fault(self, _name: str) -> None:
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                raise Crash

    def tick(self) -> int:
        self.now_ms += 1
        return self.now_ms

    def restart(self) -> None:
        self.crash_in = 0
        self.to = {}
        while True:
            try:
                self.crash_in = self._rng.choice([0, 0, self._rng.randrange(1, 6)])
                self.store = Store.recover(self.memory, LIMITS, Lru(), now_ms=self.tick(), fault=self._fault)
            except Crash:
                continue
            self.crash_in = 0
            return

    def post(self, session: int, **body: object) -> None:
        self.newest[session] += 1
        if session in self.to:
            self.to[session].append(pb.ServerMessage(id=self.newest[session], **body))  # type: ignore[arg-type]

    def handle(self, session: int, message: pb.ClientMessage) -> None:
        body = message.WhichOneof("body")
        if body == "acquire":
            self._acquire(session, message.id, message.acquire)
        elif body == "step":
            self._step(session, message.id, message.step)
        else:
            self.store.cancel(session, message.cancel.lease)
        self.settle()

    def _acquire(self, session: int, message_id: int, request: pb.Acquire) -> None:
        grant = self.store.acquire(
            now_ms=self.tick(),
            session=session,
            namespace=request.namespace,
            lease=request.lease,
            hashes=hashes_of(request.hashes),
            first=request.first,
            reserve=request.reserve_slots,
            private_fill=request.private_fill,
            grant_id=self.newest[session] + 1,
        )
        names = Grant.__dataclass_fields__
        self.post(session, grant=pb.Grant(id=message_id, **{n: getattr(grant, n).tobytes() for n in names}))

    def _step(self, session: int, message_id: int, request: pb.Step) -> None:
        answer = self.store.step(
            now_ms=self.tick(),
            session=session,
            seals=records_of(request.seals, SEAL),
            loads=records_of(request.loads, COPY),
            stores=records_of(request.stores, COPY),
            released_hbm=u32_of(request.released_hbm),
            released_dram=u32_of(request.released_dram),
            seen=min(request.seen, self.newest[session]),
            want_slots=request.want_slots,
            want_room=request.want_room,
        )
        if request.seals:
            outcomes = answer.seal_outcomes.tobytes()
            self.post(session, step_result=pb.StepResult(id=message_id, seal_outcomes=outcomes))

    def settle(self) -> None:
        for session, leases in self.store.take_changed():
            self.post(session, changed=pb.Changed(leases=leases))
        for session in list(self.to):
            slots = self.store.top_up(session, self.newest[session] + 1)
            if slots is not None:
                names = ("hbm_slots", "hbm_generations", "dram_slots", "dram_generations")
                self.post(session, slots=pb.Slots(**{name: getattr(slots, name).tobytes() for name in names}))


class Engine(Listener):
    """A client that does what engines do, at random, and knows what each slot must contain."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._rng = world.rng
        self.number = number
        self.session = world.daemon.store.attach(
            now_ms=world.daemon.tick(),
            name=f"e{number}",
            token_digest=bytes([number + 1]) * 16,
            device=0,
            slot_bytes=SLOT_BYTES,
            members=1,
        )
        world.daemon.store.activate(self.session)
        world.daemon.newest[self.session] = world.daemon.now_ms << 20
        self.state = SessionState(SHAPE, 64, Targets(credit=4, room=4))
        self.state.listener = self
        self.namespace = Namespace({}, 1, 0, bytes(32))
        self.lease = 0
        self.asked: list[tuple[PendingGrant, list[int]]] = []
        self.reads: list[tuple[SlotRun, list[int]]] = []  # slots in use, and the blocks they must contain
        self.fills: list[tuple[SlotRun, list[int]]] = []  # slots in use that nobody else may touch
        self.published: list[SlotRun] = []
        self.connect()

    def connect(self) -> None:
        self.namespace.handle = self._world.daemon.store.open_namespace(self.session, b"n" * 32)
        self._world.daemon.to[self.session] = deque()
        self.state.open_stream()

    def resume(self) -> None:
        statement = self.state.statement()
        self._world.daemon.store.resume(
            now_ms=self._world.daemon.tick(),
            session=self.session,
            hbm_slots=statement.hbm.slots,
            hbm_gens=statement.hbm.generations,
            dram_slots=statement.dram.slots,
            dram_gens=statement.dram.generations,
        )
        self.connect()

    # -- what an engine does

    def act(self) -> None:
        often = [self.ask, self.take, self.fill]
        seldom = [
            self.read,
            self.let_go,
            self.abandon,
            self.decode,
            self.store_down,
            self.state_step,
            self.pause,
        ]
        self._rng.choice([*often, *often, *seldom])()

    def state_step(self) -> None:
        self.state.step(NO_SEALS, NO_COPIES, NO_COPIES, NO_SLOTS, NO_SLOTS)

    def ask(self) -> None:
        chain = self._world.chain()
        self.lease += 1
        grant = PendingGrant(
            cast(Session, self.state),
            namespace=self.namespace,
            lease=self.lease,
            hashes=self._world.hashes(chain),
            first=0,
            reserve=self._rng.randrange(3),
            private_fill=self._rng.random() < 0.2,
        )
        self.state.acquire(grant)
        self.asked.append((grant, chain))

    def abandon(self) -> None:
        if self.asked:
            grant, _ = self.asked.pop(self._rng.randrange(len(self.asked)))
            self.state.abandon(grant)
            self.state.put(Cancel(lease=grant.lease))

    def take(self) -> None:
        """Uses a grant that has come."""
        done = [item for item in self.asked if item[0].done()]
        if not done:
            return
        item = self._rng.choice(done)
        self.asked.remove(item)
        pending, chain = item
        if pending.error is not None:
            return
        grant = pending.result(0)
        if (grant.outcomes >= Outcome.PROMOTING).any():
            self.state.abandon(pending)
            return
        for outcome, use in ((Outcome.HIT_HBM, self.reads), (Outcome.MISS, self.fills)):
            at = np.flatnonzero(grant.outcomes == outcome)
            run = SlotRun(slots=grant.hbm_slots[at], generations=grant.hbm_generations[at])
            use.append((run, [chain[i] for i in at]))
        reserve = SlotRun(slots=grant.reserve_slots, generations=grant.reserve_generations)
        self.fills.append((reserve, [-1] * len(reserve)))
        self._load(grant, chain)

    def _load(self, grant: Grant, chain: list[int]) -> None:
        at = np.flatnonzero(grant.outcomes == Outcome.HIT_DRAM)
        if not len(at):
            return
        sources = SlotRun(slots=grant.dram_slots[at], generations=grant.dram_generations[at])
        targets = SlotRun(slots=grant.hbm_slots[at], generations=grant.hbm_generations[at])
        blocks = [chain[i] for i in at]
        assert self._world.dram[sources.slots].tolist() == blocks
        self._world.hbm[targets.slots] = self._world.dram[sources.slots]
        self.state.step(NO_SEALS, _copies(sources, targets), NO_COPIES, NO_SLOTS, sources.slots)
        self.reads.append((targets, blocks))

    def decode(self) -> None:
        run = self.state.take_credit(self._rng.randrange(1, 3))
        if run is not None:
            self.fills.append((run, [-1] * len(run)))

    def fill(self) -> None:
        """Writes blocks and seals them."""
        if not self.fills:
            return
        run, blocks = self.fills.pop(self._rng.randrange(len(self.fills)))
        blocks = [block if block >= 0 else self._rng.randrange(World.BLOCKS) for block in blocks]
        self._world.hbm[run.slots] = blocks
        seals = np.zeros(len(run), dtype=SEAL)
        seals["slot"], seals["generation"], seals["namespace"] = (
            run.slots,
            run.generations,
            self.namespace.handle,
        )
        seals["hash"] = self._world.hashes(blocks)
        seals["depth"] = [self._world.depth(block) for block in blocks]
        self.state.stage(seals, NO_COPIES, NO_COPIES, NO_SLOTS, NO_SLOTS)
        if self._rng.random() < 0.8:
            self.state_step()
        self.reads.append((run, blocks))

    def read(self) -> None:
        """What is in use contains what it must."""
        for run, blocks in self.reads:
            assert self._world.hbm[run.slots].tolist() == blocks

    def let_go(self) -> None:
        use = self._rng.choice([self.reads, self.reads, self.fills])
        if use:
            run, blocks = use.pop(self._rng.randrange(len(use)))
            if use is self.reads:
                assert self._world.hbm[run.slots].tolist() == blocks
            self.state.stage(NO_SEALS, NO_COPIES, NO_COPIES, run.slots, NO_SLOTS)
            if self._rng.random() < 0.7:
                self.state_step()

    def pause(self) -> None:
        if self._rng.random() < 0.3:
            self.state.pause_credit()
        self.state.resume_credit()

    # -- write-through

    def sealed(self, result: SealResult) -> None:
        run = result.seals[result.outcomes == SealOutcome.PUBLISHED]
        self.state.share(self.state.hbm, run["slot"])
        self.published.append(SlotRun(slots=run["slot"].copy(), generations=run["generation"].copy()))

    def store_down(self) -> None:
        if not self.published:
            return
        run = self.published.pop(0)
        room = self.state.take_room(len(run))
        if room is None:
            self.state.step(NO_SEALS, NO_COPIES, NO_COPIES, run.slots, NO_SLOTS)
            return
        self._world.dram[room.slots] = self._world.hbm[run.slots]
        self.state.step(NO_SEALS, NO_COPIES, _copies(run, room), run.slots, room.slots)

    # -- the end

    def finish(self) -> None:
        for grant, _ in self.asked:
            self.state.abandon(grant)
        for run, _ in (*self.reads, *self.fills):
            self.state.stage(NO_SEALS, NO_COPIES, NO_COPIES, run.slots, NO_SLOTS)
        self.asked, self.reads, self.fills = [], [], []
        while self.published:
            self.store_down()
        self.state_step()


def _copies(sources: SlotRun, targets: SlotRun) -> NDArray[np.void]:
    records = np.zeros(len(sources), dtype=COPY)
    records["source"], records["source_generation"] = sources.slots, sources.generations
    records["target"], records["target_generation"] = targets.slots, targets.generations
    return records


class World:
    """Two engines, a daemon, and memory whose contents are block numbers."""

    CHAINS, LENGTH = 4, 6
    BLOCKS = CHAINS * LENGTH

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.hbm = np.full(SHAPE.hbm_slots, -1)
        self.dram = np.full(SHAPE.dram_slots, -1)
        words = np.random.default_rng(seed)
        self._hashes = words.integers(1, 1 << 63, size=(self.BLOCKS, 2), dtype=np.uint64)
        self.daemon = Daemon(self.rng)
        self.engines = [Engine(self, number) for number in range(2)]
        self.crashes = self.losses = 0

    def chain(self) -> list[int]:
        start = self.rng.randrange(self.CHAINS) * self.LENGTH
        return list(range(start, start + self.rng.randrange(1, self.LENGTH + 1)))

    def depth(self, block: int) -> int:
        return block % self.LENGTH

    def hashes(self, blocks: list[int]) -> NDArray[np.uint64]:
        return self._hashes[np.array(blocks, dtype=np.intp)]

    def step(self) -> None:
        engine = self.rng.choice(self.engines)
        action = self.rng.random()
        if action < 0.45:
            engine.act()
        elif action < 0.70:
            self._guarded(lambda: self.send(engine))
        elif action < 0.96:
            self.receive(engine)
        elif action < 0.98:
            self.lose(engine)
        elif action < 0.985:
            self._guarded(lambda: self.daemon.store.tick(self.daemon.tick()))
        elif action < 0.99:
            self.daemon.crash_in = self.rng.randrange(1, 30)
        self.check()

    def send(self, engine: Engine) -> None:
        """One message of a client goes all the way: what is composed and not sent is lost only with its stream."""
        if engine.session in self.daemon.to:
            message = engine.state._outbox.next(0.0)
            if message is not None:
                self.daemon.handle(engine.session, message)

    def receive(self, engine: Engine) -> None:
        waiting = self.daemon.to.get(engine.session)
        if waiting:
            engine.state.apply(waiting.popleft())

    def lose(self, engine: Engine) -> None:
        """The stream breaks: some of what the daemon said arrives, the rest does not; perhaps a message is lost too."""
        waiting = self.daemon.to.pop(engine.session, deque())
        for message in list(waiting)[: self.rng.randrange(len(waiting) + 1)]:
            engine.state.apply(message)
        while self.rng.random() < 0.5 and engine.state._outbox.next(0.0) is not None:
            pass  # composed, and lost on its way
        engine.state.close_stream()
        self.losses += 1
        for _ in range(self.rng.randrange(4)):
            engine.act()
        self._guarded(lambda: self._resume(engine))

    def _resume(self, engine: Engine) -> None:
        self.daemon.store.lost(engine.session, self.daemon.tick())
        engine.resume()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs it; where the daemon dies meanwhile, another takes over and every client resumes."""
        try:
            action()
        except Crash:
            self._crash()

    def _crash(self) -> None:
        self.crashes += 1
        for engine in self.engines:
            waiting = self.daemon.to.pop(engine.session, deque())
            for message in list(waiting)[: self.rng.randrange(len(waiting) + 1)]:
                engine.state.apply(message)
            engine.state.close_stream()
        self.daemon.restart()
        for engine in self.rng.sample(self.engines, len(self.engines)):
            for _ in range(self.rng.randrange(3)):
                engine.act()
            self._guarded(engine.resume)
        for engine in self.engines:  # a crash while the other resumed
            if engine.session not in self.daemon.to:
                self._guarded(engine.resume)

    def check(self) -> None:
        columns = self.daemon.store._state.columns
        for engine in self.engines:
            for tier, held in ((Tier.HBM, engine.state.hbm), (Tier.DRAM, engine.state.dram)):
                pool = columns.pool(tier)
                slots = np.flatnonzero(held.held)
                ours = (pool.holders[slots] >> np.uint64(engine.session)) & np.uint64(1) != 0
                same = (pool.state[slots] >> GENERATION_SHIFT).astype(np.uint32) == held.generations[slots]
                taken = slots[~(ours & same)]
                assert not len(taken), (
                    f"{tier.name} slots {taken.tolist()} were taken from engine {engine.number}"
                )
                assert (held.references[slots] >= 0).all()
            engine.read()

    def settle(self) -> None:
        for _ in range(200):
            for engine in self.engines:
                self.send(engine)
                self.receive(engine)
                while engine.published:
                    engine.store_down()

    def end(self) -> None:
        """Everything comes back."""
        self.daemon.crash_in = 0
        for engine in self.engines:
            engine.finish()
        self.settle()
        columns = self.daemon.store._state.columns
        for engine in self.engines:
            assert not engine.state.hbm.references.any()
            assert not engine.state.dram.references.any()
            for tier, held in ((Tier.HBM, engine.state.hbm), (Tier.DRAM, engine.state.dram)):
                bits = (columns.pool(tier).holders >> np.uint64(engine.session)) & np.uint64(1) != 0
                assert np.flatnonzero(bits).tolist() == np.flatnonzero(held.held).tolist()
                assert int(bits.sum()) == held.in_hand
        assert self.daemon.store.check_integrity() == []


@pytest.mark.parametrize("seed", range(24))
def test_nothing_in_use_is_ever_given_away(seed: int) -> None:
    """Repeated releases, lost answers and restarts gave slots away under their readers."""
    world = World(seed)
    for _ in range(1500):
        world.step()
    assert world.crashes + world.losses > 5
    world.end()
