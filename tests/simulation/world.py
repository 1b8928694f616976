"""A small machine around the store: engines, movers and memory whose bytes are known, and crashes at any write.

The naive model is in plain dicts: what each piece of memory really contains, who holds what, what movers have in
hand. After every operation it is compared with the store: each slot that the store calls complete must really contain
its row's block, and the store's holders must be the model's.
"""

import numpy as np

from kvstore.layout import Tier
from kvstore.moves import MoveKind, MoveStatus
from kvstore.tables.prebuilt import Blocks, Prebuilder, open_prebuilt, prebuilt_bytes
from kvstore.tiering.loading import FIRST_COLUMNS, LAST_COLUMNS, Loading, LoadSlab
from tests.simulation.engines import Engines
from tests.simulation.ground import PAGE, Client, Content


class World(Engines):
    """The machine. Every public method is one operation, after which `check` holds."""

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
