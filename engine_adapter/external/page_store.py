"""Blocks by name, for an engine that keeps them in host memory of its own and asks for them from threads that may wait.

A block's name comes from an id that its engine made out of all tokens up to the block's end; here it is keyed with the
namespace, so nobody without the key can tell what is cached. What is copied lies in DRAM slots that are held meanwhile,
and is believed only if the slot's state is the same before and after. No daemon, no room, no answer in time: a miss.
What may be done with the cache is asked at each call; a dry run has each lookup counted, and answers it with nothing.

    hash = BLAKE2b-128 keyed with the namespace's key over the engine's id

Any thread may call; a load and a store run beside each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_adapter.external.link import Identity, StoreLink
from kvstore.cache_use import Access
from kvstore.client import Client, Listener, Namespace, SealResult, Session, SlotRun
from kvstore.errors import KvstoreError, NotFound, Unavailable
from kvstore.hash_chain import HASH_BYTES
from kvstore.layout import State, Tier, states
from kvstore.moves import Outcome, SealOutcome
from kvstore.wire.packed import SEAL
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Copy", "PageStore", "Patience", "Run"]

_LOG = logging.getLogger("kvstore.engine")
_MAX_PREFETCHED = 256
"""Portions that were asked for ahead and not loaded yet; the oldest is given up."""
_ASK_AGAIN_S = 0.2
"""While a disk is waited for: a promotion that came to nothing is asked for again."""

U64 = NDArray[np.uint64]
Marks: TypeAlias = NDArray[np.bool_]
Copy: TypeAlias = Callable[[int, int], None]
"""Copies one block of a run: (its place in `Run.ids`, address of its DRAM slot)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks that follow each other. `before`: the ids of all blocks before them, where the engine tells them."""

    ids: Sequence[bytes]
    before: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a thread of the engine waits for the store, in seconds."""

    load_s: float = 2.0  # for the next block of a load: it may be on a disk
    store_s: float = 1.0  # for DRAM to store into, and for the answer to what was stored
    answer_s: float = 1.0  # for an acquire


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """A run in one namespace. `names` has the blocks before it too, and it begins at `first`."""

    session: Session
    identity: Identity
    namespace: Namespace
    names: U64  # [n, 2]
    first: int

    @property
    def own(self) -> U64:
        return self.names[self.first :]

    @property
    def may(self) -> Access:
        return self.session.may(self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """So many blocks were copied; whether those behind them are there, or on their way."""

    blocks: int
    more_comes: bool


class PageStore(Listener):
    """See the module. The caller closes the link, once nobody calls any more."""

    def __init__(
        self, link: StoreLink, *, payload_bytes: int, portion: int = 128, patience: Patience | None = None
    ) -> None:
        """`payload_bytes` of a block. `portion`: most blocks that the engine loads in one call."""
        self._link = link
        self._payload_bytes = payload_bytes
        self._portion = portion
        self._patience = patience or Patience()
        self._leases = count(1)
        self._lock = threading.Lock()
        self._prefetched: OrderedDict[bytes, int] = OrderedDict()  # name of a portion's first block → lease
        self._listened: Session | None = None
        self._answers = threading.Condition()
        self._awaited: dict[tuple[int, int], SealOutcome | None] = {}  # by slot and generation
        self._identity = Identity()
        link.namespace(self._identity)  # opens it as soon as there is a session

    @property
    def ready(self) -> bool:
        """Whether there is a store just now; else everything is a miss."""
        return self._chain(Run(ids=())) is not None

    # ------------------------------------------------------------ looking

    def cached(self, run: Run) -> int:
        """Leading blocks that some tier has, by the mapped tables. What only a disk has begins to come. Never waits."""
        chain = self._chain(run)
        if chain is None:
            return 0
        session, names = chain.session, chain.own
        if not chain.may & Access.READS:
            self._count(chain)
            return 0
        tiers = session.match(chain.namespace, names).tiers
        for begin in range(0, len(tiers), self._portion):
            if (tiers[begin : begin + self._portion] == Tier.NVME).any():
                end = min(begin + self._portion, len(tiers))
                lease = self._prefetch_lease(session, names[begin])
                session.prefetch(chain.namespace, lease, names[begin:end])
        return len(tiers)

    def _count(self, chain: _Chain) -> None:
        """Has the store count what it would have given, where it is asked to."""
        names = chain.names[-chain.session.max_message_blocks :]
        first = len(names) - len(chain.own)
        if chain.may & Access.COUNTS and len(chain.own) and first >= 0:
            chain.session.poll()  # news is for nobody here, and is not to pile up
            chain.session.acquire(chain.namespace, next(self._leases), names, first=first)

    # ------------------------------------------------------------ loading

    def load(self, run: Run, copy: Copy) -> Marks:
        """[n] blocks that were copied: the leading ones. Waits for a disk, as `Patience` says.

        Where the first block that is not marked was to go there may be anything.
        """
        loaded = np.zeros(len(run.ids), dtype=np.bool_)
        chain = self._chain(run)
        if chain is None or not len(loaded) or not chain.may & Access.READS:
            return loaded
        lease = self._taken_lease(chain.own[0])
        at, last_s = 0, time.monotonic()
        try:
            while True:
                ready = self._load_ready(chain, lease, at, copy)
                loaded[at : at + ready.blocks] = True
                at += ready.blocks
                if ready.blocks:
                    last_s = time.monotonic()
                if at == len(loaded) or not ready.more_comes:
                    break
                if time.monotonic() > last_s + self._patience.load_s:
                    break
                self._await_block(chain, at)
        except KvstoreError as error:
            _LOG.info("a load ends early: %s", error)
        finally:
            chain.session.cancel(lease)
        return loaded

    def _load_ready(self, chain: _Chain, lease: int, at: int, copy: Copy) -> _Ready:
        """Copies the leading blocks from `at` on that are in DRAM, and has the next ones brought there."""
        session = chain.session
        session.poll()  # news is for nobody here, and is not to pile up
        end = min(chain.first + at + self._portion, len(chain.names))
        begin = max(0, end - session.max_message_blocks)
        names = chain.names[begin:end]
        grant = session.acquire(chain.namespace, lease, names, first=chain.first + at - begin)
        try:
            answer = grant.result(self._patience.answer_s)
        except KvstoreError:
            grant.abandon()
            raise
        hit = answer.outcomes == Outcome.HIT_DRAM
        hits = len(hit) if hit.all() else int(hit.argmin())
        slots = answer.dram_slots[:hits]
        states_of = session.tables.tables.columns.pool(Tier.DRAM).state
        before = states_of[slots]
        try:
            for place, address in enumerate(session.dram.address_of(slots).tolist(), at):
                copy(place, address)
            same = states_of[slots] == before
        finally:
            session.step(dropped_dram=answer.dram_slots[hit])
        if not same.all():
            return _Ready(blocks=int(same.argmin()), more_comes=False)
        comes = hits == len(hit) or answer.outcomes[hits] in (Outcome.PROMOTING, Outcome.PENDING)
        return _Ready(blocks=hits, more_comes=bool(comes))

    def _await_block(self, chain: _Chain, at: int) -> None:
        """Returns when the block at `at` is in DRAM or nowhere, and now and then."""
        name = chain.own[at : at + 1]

        def settled() -> bool:
            tiers = chain.session.match(chain.namespace, name).tiers
            return not len(tiers) or bool(tiers[0] == Tier.DRAM)

        chain.session.wait_until(settled, _ASK_AGAIN_S)

    # ------------------------------------------------------------ storing

    def store(self, run: Run, copy: Copy) -> Marks:
        """[n] blocks that the store has: it had them, or they were copied and sealed. Waits as `Patience` says."""
        chain = self._chain(run)
        if chain is None:
            return np.zeros(len(run.ids), dtype=np.bool_)
        stored = self._known(chain)
        wanted = np.flatnonzero(~stored) if chain.may & Access.WRITES else np.empty(0, dtype=np.intp)
        until_s = time.monotonic() + self._patience.store_s
        while len(wanted):
            room = self._take_room(chain.session, len(wanted), until_s)
            if room is None:
                break
            places, wanted = wanted[: len(room)], wanted[len(room) :]
            stored[places] = self._fill(chain, room, places, copy)
            if not stored[places].any():
                break
            until_s = time.monotonic() + self._patience.store_s
        return stored

    def _known(self, chain: _Chain) -> Marks:
        """[n] blocks that some tier has, wherever they stand in the run."""
        tables = chain.session.tables.tables
        rows = tables.index.find(chain.own)
        there = rows < tables.columns.shape.max_rows
        safe = np.where(there, rows, 0)
        known: Marks = there & (states(tables.columns.state[safe]) == State.SEALED)
        known &= tables.columns.namespace[safe] == chain.namespace.handle
        return known

    def _take_room(self, session: Session, wanted: int, until_s: float) -> SlotRun | None:
        """DRAM slots to fill, at most `wanted`; None where none come in time."""
        while session.available:
            room = session.take_room(min(wanted, max(1, session.room_in_hand)))
            if room is not None:
                return room
            session.step()  # asks for more
            if not session.wait_until(lambda: session.room_in_hand > 0, max(0.0, until_s - time.monotonic())):
                return None
        return None

    def _fill(self, chain: _Chain, room: SlotRun, places: NDArray[np.intp], copy: Copy) -> Marks:
        """[n] of these places, whose blocks were copied into the slots and published, or were there by then."""
        session, filled = chain.session, False
        rest = session.geometry.slot_bytes - self._payload_bytes
        try:
            for place, address in zip(
                places.tolist(), session.dram.address_of(room.slots).tolist(), strict=True
            ):
                copy(place, address)
                if rest:  # else bytes of whatever was in the slot before would reach disk and exports
                    ctypes.memset(address + self._payload_bytes, 0, rest)
            filled = True
        except NotFound:  # the session was lost
            return np.zeros(len(places), dtype=np.bool_)
        finally:
            if not filled:
                session.step(dropped_dram=room.slots)
        return self._seal(chain, room, chain.first + places)

    def _seal(self, chain: _Chain, room: SlotRun, depths: NDArray[np.intp]) -> Marks:
        """[n] slots of the blocks at these places of the chain that are published, or were there by then."""
        keys = list(zip(room.slots.tolist(), room.generations.tolist(), strict=True))
        self._listen(chain.session)
        with self._lock:
            if chain.identity is not self._identity:  # of before a clear: nobody will answer
                chain.session.step(dropped_dram=room.slots)
                return np.zeros(len(room), dtype=np.bool_)
            with self._answers:
                self._awaited.update(dict.fromkeys(keys))
            chain.session.step(seals=_seals(chain, room, depths), dropped_dram=room.slots)
        with self._answers:
            self._answers.wait_for(
                lambda: all(self._awaited[key] is not None for key in keys), self._patience.store_s
            )
            outcomes = [self._awaited.pop(key) for key in keys]
        return np.array([outcome in (SealOutcome.PUBLISHED, SealOutcome.DUPLICATE) for outcome in outcomes])

    def sealed(self, result: SealResult) -> None:
        """The stream's thread: the answer to seals."""
        slots, generations = result.seals["slot"].tolist(), result.seals["generation"].tolist()
        with self._answers:
            for slot, generation, outcome in zip(slots, generations, result.outcomes.tolist(), strict=True):
                if (slot, generation) in self._awaited:
                    self._awaited[slot, generation] = SealOutcome(outcome)
            self._answers.notify_all()

    def _listen(self, session: Session) -> None:
        with self._lock:
            if self._listened is not session:
                session.listen(self)
                self._listened = session

    # ------------------------------------------------------------ the session

    def clear(self, client: Client) -> int:
        """Forgets every block of the namespace for good; how many. `client` is of the same daemon.

        Nothing from before is read, or stored, from here on, whatever becomes of the call: the engine's weights may be
        others now. So what is stored afterwards has a name of its own, which ends with this process.

        Raises Unavailable where there is no store now: blocks from before will be there for a next process.
        """
        old = self._chain(Run(ids=()))
        with self._lock:
            self._identity = Identity(epoch=secrets.token_hex(16))
        self._link.namespace(self._identity)
        if old is None or not old.session.drain(self._patience.answer_s):
            raise Unavailable("the store cannot be reached: nothing is forgotten", retry_after_s=1.0)
        reply: pb.ClearReply = client.call(
            "Clear", pb.ClearRequest(namespace=old.namespace.handle), service="admin"
        )
        return reply.removed_blocks

    def _chain(self, run: Run) -> _Chain | None:
        """The run's names; None while there is no store."""
        session, identity = self._link.session, self._identity
        namespace = self._link.namespace(identity)
        if session is None or namespace is None:
            return None
        names = _names(namespace, [*run.before, *run.ids])
        return _Chain(
            session=session, identity=identity, namespace=namespace, names=names, first=len(run.before)
        )

    def _prefetch_lease(self, session: Session, first: U64) -> int:
        """For a portion that begins with this block; the same when it is asked for again."""
        key = first.tobytes()
        with self._lock:
            lease = self._prefetched.get(key) or next(self._leases)
            self._prefetched[key] = lease
            self._prefetched.move_to_end(key)
            old = self._prefetched.popitem(last=False)[1] if len(self._prefetched) > _MAX_PREFETCHED else None
        if old is not None:
            session.cancel(old)
        return lease

    def _taken_lease(self, first: U64) -> int:
        """That of the portion that was prefetched and begins with this block, or a new one."""
        with self._lock:
            return self._prefetched.pop(first.tobytes(), None) or next(self._leases)


def _names(namespace: Namespace, ids: Sequence[bytes]) -> U64:
    """[n, 2]"""
    keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=namespace.key)
    packed = bytearray()
    for id_ in ids:
        state = keyed.copy()
        state.update(id_)
        packed += state.digest()
    return np.frombuffer(bytes(packed), dtype="<u8").reshape(-1, 2)


def _seals(chain: _Chain, room: SlotRun, depths: NDArray[np.intp]) -> NDArray[np.void]:
    """SEAL[n] of the blocks at these places of the chain."""
    seals = np.zeros(len(room), dtype=SEAL)
    seals["slot"], seals["generation"] = room.slots, room.generations
    seals["namespace"], seals["depth"] = chain.namespace.handle, depths
    seals["hash"] = chain.names[depths]
    later = depths > 0
    seals["parent"][later] = chain.names[depths[later] - 1]
    return seals
