"""The store: the state machine that decides where every block lives, over shared memory that the caller gives.

Pure: the time is an argument, decisions come out as data (`take_changed`, `top_up`, `take_moves`), completions go back
in. One owner: no call may overlap another. Errors are raised before anything is changed. Files beside hold the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from eviction.base import EvictionPolicy
from kvstore import reporting
from kvstore.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from kvstore.layout import (
    NONE,
    ExtentState,
    SessionState,
    TableShape,
    Tier,
    open_columns,
    read_shape,
    table_bytes,
    write_header,
)
from kvstore.leases.acquiring import Acquiring, Request, note_grant
from kvstore.leases.attaching import Attaching
from kvstore.leases.crediting import Crediting
from kvstore.leases.sealing import NO_CHECKSUMS, NO_COPIES, Sealing
from kvstore.leases.sessions import Session
from kvstore.leases.sharing import Sharing
from kvstore.moves import (
    U8,
    U32,
    U64,
    ClearResult,
    Explanation,
    ExtentId,
    ExtentInfo,
    FlushLeft,
    FlushMark,
    Grant,
    NamespaceId,
    SessionId,
    Slots,
    StepAnswer,
    StoreLimits,
    StoreStats,
)
from kvstore.state import StoreState, no_fault
from kvstore.tables.recovering import reconcile
from kvstore.tiering.admission import WriteBudget
from kvstore.tiering.health import PathHealth
from kvstore.tiering.index_changes import IndexChanges
from kvstore.tiering.loading import Loading, LoadSlab
from kvstore.tiering.moving import ALL, Moving
from kvstore.tiering.paths import Paths
from kvstore.tiering.prefetching import Prefetching
from kvstore.trust import integrity
from kvstore.victims import clearing, resizing
from kvstore.victims.evicting import Evictor
from kvstore.victims.hints import Hints
from kvstore.victims.leaving import Leaving, slots_for
from kvstore.victims.pinning import Pins

__all__ = ["Store"]


class Store:
    """See the module. `fault(name)` is called between writes: tests raise there."""

    __slots__ = (
        "_acquiring",
        "_attaching",
        "_crediting",
        "_evictor",
        "_leaving",
        "_moving",
        "prefetching",
        "_sealing",
        "_state",
        "hints",
        "index_changes",
        "paths",
        "pins",
        "sharing",
        "watching",
    )

    def __init__(self, state: StoreState) -> None:
        """For `create` and `recover`."""
        self._state = state
        self.hints = Hints(state)
        self._evictor = Evictor(state)
        self._leaving = Leaving(state, self._evictor)
        self._moving = Moving(state, self._evictor)
        self.index_changes = IndexChanges(state)
        self._acquiring = Acquiring(state, self._evictor, self._moving.promoting)
        self._sealing = Sealing(state)
        self._crediting = Crediting(state, self._evictor)
        self.pins = Pins(state)
        self.prefetching = Prefetching(state, self._evictor, self._moving.promoting)
        self._attaching = Attaching(state, self.prefetching)
        self.paths = Paths(state, self._moving.promoting)
        self.sharing = Sharing(state)
        self.watching = self._moving.watching  # the canary
        for tier in Tier:
            for extent in state.extents.of(tier, None, ExtentState.READY):
                state.pool(tier).open_extent(extent)

    @classmethod
    def create(
        cls,
        memory: memoryview,
        shape: TableShape,
        limits: StoreLimits,
        policy: EvictionPolicy,
        *,
        fault: Callable[[str], None] = no_fault,
    ) -> Store:
        """A store without anything in it, over memory that is all zeros, of at least `table_bytes(shape)` bytes."""
        if len(memory) < table_bytes(shape):
            raise InvalidArgument(f"the tables need {table_bytes(shape)} bytes, not {len(memory)}")
        columns = open_columns(memory, shape)
        for pointers in (columns.hbm, columns.dram, columns.nvme, columns.parent, columns.rows):
            pointers.fill(NONE)
        for pool in columns.pools:
            pool.row.fill(NONE)
        columns.extent_slot_base.fill(NONE)
        write_header(memory, shape)
        return cls(StoreState(columns, limits, policy, fault))

    @classmethod
    def recover(
        cls,
        memory: memoryview,
        limits: StoreLimits,
        policy: EvictionPolicy,
        *,
        now_ms: int,
        fault: Callable[[str], None] = no_fault,
    ) -> Store:
        """The store over the tables of a daemon that died at any point. Sessions are LOST until they resume.

        What a mover may still touch stays out of use until `mover_dead` is called for its path; a path counts as down
        until its first `take_moves`. Raises: FailedPrecondition when the memory is no table of this version.
        """
        columns = open_columns(memory, read_shape(memory))
        reconcile(columns, fault)
        store = cls(StoreState(columns, limits, policy, fault))
        store._moving.promoting.all_down()
        columns.nvme_changed[columns.nvme_changed != 0] = 1  # taken or not, the durable index may be behind
        store._state.counters["recovered_blocks"] = store._state.table.used
        store.tick(now_ms)
        return store

    # ------------------------------------------------------------ memory

    def add_extent(
        self,
        *,
        tier: Tier,
        device: int,
        nbytes: int,
        slot_bytes: int = 0,
        extent: int | None = None,
        identity: int = 0,
    ) -> ExtentId:
        """New memory of a tier. `device`: HBM device, NVMe path, 0 in DRAM. `slot_bytes` 0: a class takes it on demand.

        `extent` asks for that very position in the table; `identity` is the digest of an HBM device. Raises:
        InvalidArgument, ResourceExhausted.
        """
        return resizing.add_extent(self._state, tier, device, nbytes, slot_bytes, extent, identity)

    def forget_blocks(self, extent: int) -> int:
        """Ends the blocks of an HBM extent whose bytes are not to be believed. See resizing.forget_blocks."""
        return resizing.forget_blocks(self._state, extent)

    def disown_extent(self, extent: int, identity: int) -> None:
        """Notes that an extent's blocks are of another device than was stated: no later session gets them.

        Raises: NotFound.
        """
        self._state.extents.require(extent)
        self._state.columns.extent_identity[extent] = identity

    def drop_extent(self, extent: int) -> None:
        """The memory of an extent is gone, with all blocks in it. See resizing.drop_extent.

        Raises: FailedPrecondition while a mover is at work in it, too.
        """
        self._moving.leave_extent(extent)
        resizing.drop_extent(self._state, extent)
        self._evictor.leaving.discard(extent)

    def leaving(self, tier: Tier, device: int) -> list[ExtentId]:
        """Extents that leave because their tier, or path, becomes smaller."""
        return self._leaving.of(tier, device)

    def leave(self, tier: Tier, device: int, excess_bytes: int, cost: Callable[[int], int]) -> None:
        """Has extents that cost `excess_bytes` or more leave. See Leaving.choose."""
        self._leaving.choose(tier, device, excess_bytes, cost)

    def empty_extent(self, extent: int) -> str:
        """Takes blocks out of an extent that leaves; why it cannot be dropped yet, empty when it can.

        Raises: NotFound.
        """
        return self._leaving.empty(self._state.extents.require(extent), extent)

    def slots_for(self, tier: Tier, nbytes: int, smallest_bytes: int) -> tuple[int, int]:
        """(slot ids left, ids that so much more memory needs). See leaving.slots_for."""
        return slots_for(self._state, tier, nbytes, smallest_bytes)

    def extents(self, tier: Tier) -> list[ExtentInfo]:
        """Extents of a tier."""
        return [reporting.extent_info(self._state, extent) for extent in self._state.extents.of(tier)]

    # ------------------------------------------------------------ sessions

    def attach(
        self,
        *,
        now_ms: int,
        name: str,
        token_digest: bytes,
        device: int | None,
        slot_bytes: int,
        members: int,
        identity: int = 0,
    ) -> SessionId:
        """A new session, ATTACHING until `activate`. Raises: ResourceExhausted, InvalidArgument."""
        self._state.tell_time(now_ms)
        return self._state.sessions.attach(
            now_ms=now_ms,
            name=name,
            token_digest=token_digest,
            device=device,
            slot_bytes=slot_bytes,
            members=members,
            identity=identity,
        ).id

    def find_session(self, token_digest: bytes) -> SessionId | None:
        """The session of a token digest, in whatever state."""
        return self._state.sessions.find(token_digest)

    def activate(self, session: int) -> None:
        """Its members are there. Raises: NotFound, FailedPrecondition when it is not ATTACHING."""
        self._attaching.activate(session)

    def resume(
        self, *, now_ms: int, session: int, hbm_slots: U32, hbm_gens: U32, dram_slots: U32, dram_gens: U32
    ) -> None:
        """The session is ATTACHED and holds what it states, as far as it did; all else that it held comes back.

        It opens its namespaces anew and acquires anew what it waited for. Raises: NotFound, FailedPrecondition.
        """
        self._state.tell_time(now_ms)
        self._attaching.resume(session, {Tier.HBM: (hbm_slots, hbm_gens), Tier.DRAM: (dram_slots, dram_gens)})

    def lost(self, session: int, now_ms: int) -> None:
        """Its stream is gone: what it holds stays held, what it was filling is nobody's to wait for."""
        self._state.tell_time(now_ms)
        self._attaching.lost(session, SessionState.LOST)

    def dying(self, session: int, now_ms: int) -> None:
        """Some of its processes are dead, others may live: as `lost`, and it can not resume."""
        self._state.tell_time(now_ms)
        self._attaching.lost(session, SessionState.DYING)

    def detach(self, session: int, now_ms: int) -> int:
        """The client's word that nothing touches its slots any more. Returns how many it held."""
        return self.dead(session, now_ms)

    def dead(self, session: int, now_ms: int) -> int:
        """All its processes are gone: everything it held comes back, sealed blocks stay. Returns slots held."""
        self._state.tell_time(now_ms)
        return self._attaching.dead(session)

    def open_namespace(self, session: int, digest: bytes) -> NamespaceId:
        """Handle of a namespace, which the session may name from now on. Raises: NotFound, ResourceExhausted."""
        found = self._state.sessions.get(session)
        handle = self._attaching.intern_namespace(digest)
        found.namespaces.add(handle)
        return handle

    def intern_namespace(self, digest: bytes) -> NamespaceId:
        """Handle of a namespace without a session: for blocks that are found on disk. Raises: ResourceExhausted."""
        return self._attaching.intern_namespace(digest)

    # ------------------------------------------------------------ the stream

    def acquire(
        self,
        *,
        now_ms: int,
        session: int,
        namespace: int,
        lease: int,
        hashes: U64,
        first: int,
        reserve: int,
        private_fill: bool,
        grant_id: int,
    ) -> Grant:
        """Matches a chain ([n, 2]), holds what is cached and gives slots for what is not; blocks before `first` are
        only touched. `grant_id` is the id of the message that will carry the answer.

        Raises: NotFound, FailedPrecondition, InvalidArgument, ResourceExhausted; then nothing was done. O(n).
        """
        state, limits = self._state, self._state.limits
        found = self._check_chain(session, namespace, hashes)
        if not 0 <= first <= len(hashes) or not 0 <= reserve <= limits.max_reserve:
            raise InvalidArgument(
                f"first {first} of {len(hashes)} blocks, {reserve} in reserve (≤ {limits.max_reserve})"
            )
        if state.waits.of_session(session) >= limits.max_waiting_leases:
            raise ResourceExhausted(f"{limits.max_waiting_leases} leases wait already", retry_after_s=0.1)
        state.tell_time(now_ms)
        allowed = state.uses.of(found.use, namespace)
        rows = self._acquiring.find(hashes, namespace, allowed)
        request = Request(
            session=found,
            namespace=namespace,
            lease=lease,
            hashes=hashes[first:],
            first=first,
            parent=int(rows[first - 1]) if first else NONE,
            reserve=reserve,
            private_fill=private_fill,
            allowed=allowed,
            now_ms=now_ms,
        )
        grant = self._acquiring.acquire(request, rows[first:])
        self.prefetching.answered(found, lease, grant, reserve, rows)
        state.rankings.served(session, lease, rows, grant)
        note_grant(found, grant, grant_id, limits.max_unseen_grants)
        return grant

    def step(
        self,
        *,
        now_ms: int,
        session: int,
        seals: NDArray[np.void],
        loads: NDArray[np.void],
        stores: NDArray[np.void],
        store_checksums: U64 = NO_CHECKSUMS,
        wrong_loads: NDArray[np.void] = NO_COPIES,
        released_hbm: U32,
        released_dram: U32,
        seen: int,
        want_slots: int,
        want_room: int,
    ) -> StepAnswer:
        """What a client did, in this order: seals, loads, stores, wrong loads, releases. Every part may be said twice.

        A slot that was copied stays held until it is released. `want_slots` and `want_room`: what the client lacks,
        having read all messages up to `seen`. Raises: NotFound, FailedPrecondition. O(n).
        """
        state, limits = self._state, self._state.limits
        found = state.sessions.attached(session)
        state.tell_time(now_ms)
        outcomes = self._sealing.seal(found, seals, now_ms) if len(seals) else np.empty(0, dtype=np.uint8)
        self._sealing.loads(found, loads)
        self._sealing.stores(found, stores, store_checksums)
        self.watching.loads_differed(self._sealing.wrong_loads(found, wrong_loads))
        found.seen(seen)
        self._sealing.release(found, released_hbm, released_dram)
        found.wants(min(want_slots, limits.max_want_slots), min(want_room, limits.max_want_room))
        self._moving.queue_came()
        return StepAnswer(seal_outcomes=outcomes)

    def prefetch(
        self, *, now_ms: int, session: int, namespace: int, lease: int, hashes: U64, deadline_ms: int
    ) -> None:
        """A request waits that will ask for this chain, at about `deadline_ms`, a time; 0: unknown. See Prefetching.

        Raises: NotFound, FailedPrecondition, InvalidArgument.
        """
        found = self._check_chain(session, namespace, hashes)
        self._state.tell_time(now_ms)
        if self._state.uses.of(found.use, namespace).reads:
            self.prefetching.prefetch(found, namespace, lease, hashes, deadline_ms)

    def cancel(self, session: int, lease: int) -> None:
        """Forgets what a lease waits for or prefetches. Raises: NotFound."""
        self.prefetching.cancel(self._state.sessions.get(session), lease)
        self._state.waits.cancel(session, lease)

    def _check_chain(self, session: int, namespace: int, hashes: U64) -> Session:
        found = self._state.sessions.attached(session)
        if namespace not in found.namespaces:
            raise FailedPrecondition(f"this session has not opened namespace {namespace}")
        self._check_blocks(hashes)
        return found

    def _check_blocks(self, hashes: U64) -> None:
        if len(hashes) > (most := self._state.limits.max_message_blocks):
            raise InvalidArgument(f"one message names at most {most} blocks, not {len(hashes)}")

    # ------------------------------------------------------------ decisions out, completions in

    def take_changed(self) -> list[tuple[SessionId, list[int]]]:
        """Leases to tell that all they waited for has come or failed, by session."""
        self._crediting.wake()
        self.prefetching.pump()
        return self._state.waits.take_changed()

    def top_up(self, session: int, grant_id: int) -> Slots | None:
        """Slots ahead that are due to this session, under the id of the message that will carry them; None: none."""
        found = self._state.sessions.get(session)
        if self._state.sessions.state(session) is not SessionState.ATTACHED:
            return None
        slots = self._crediting.top_up(found)
        if slots is not None:
            limit = self._state.limits.max_unseen_grants
            found.granted(grant_id, slots.hbm_slots, slots.dram_slots, ahead=True, limit=limit)
        return slots

    def take_moves(self, path: int, limit: int, writes: int = ALL, early: int = ALL) -> NDArray[np.void]:
        """MOVE[] for a path's mover, reads first; its slots are held until `moves_done`. See Moving.take."""
        return self._moving.take(path, limit, writes, early)

    def moves_done(self, *, now_ms: int, path: int, ids: U64, statuses: U8) -> None:
        """What became of moves (MoveStatus). Ids that are not in flight on this path are passed over."""
        self._state.tell_time(now_ms)
        self._moving.done(path, ids, statuses)

    def health(self, path: int) -> PathHealth:
        """Whether the path's disk does what it is asked for; not to be changed by the caller."""
        return self._moving.promoting.health[path]

    def budget(self, path: int) -> WriteBudget:
        """What a path may write today. The caller restores it, promises, and spends what is not a block's."""
        return self._moving.budget(path)

    def mover_dead(self, path: int, now_ms: int) -> None:
        """The path's mover is gone, reaped: its moves fail, and what it may have touched is free again."""
        self._state.tell_time(now_ms)
        self._moving.mover_dead(path)

    def flush(self) -> FlushMark:
        """Queues every block that is in DRAM and not in storage; `left_of` tells how many are still to come."""
        return self._moving.flush()

    def left_of(self, mark: FlushMark) -> FlushLeft:
        """What is left of a flush; queues again what was dropped."""
        return self._moving.left_of(mark)

    def tick(self, now_ms: int) -> None:
        """The background's turn: pins that end, a reserve of free slots in each class, extents that change class."""
        self._state.tell_time(now_ms)
        self.pins.expire(self._state.now_ms)
        self._evictor.keep_reserves()
        self._moving.catch_up()
        self.prefetching.tick(self._moving.queued_writes)
        self.index_changes.tick()
        clearing.sweep(self._state)

    # ------------------------------------------------------------ storage that is found, administration, reports

    def begin_load(self, path: int, slabs: Sequence[LoadSlab], blocks: int) -> Loading:
        """Puts extents and rows aside for blocks that storage has: see kvstore.tiering.loading."""
        return Loading(self._state, path, slabs, blocks)

    def pin(self, *, now_ms: int, namespace: int, hashes: U64, ttl_ms: int, owner: str = "") -> int:
        """Keeps the cached leading run of a chain from losing its last copies; returns its blocks.

        Raises: InvalidArgument, ResourceExhausted.
        """
        self._check_blocks(hashes)
        self._state.tell_time(now_ms)
        return self.pins.pin(namespace, hashes, now_ms + ttl_ms, owner)

    def unpin(self, *, namespace: int, hashes: U64, owner: str = "") -> int:
        """Takes an owner's pins of a chain back, of no owner everybody's; returns how many blocks were pinned."""
        self._check_blocks(hashes)
        return self.pins.unpin(namespace, hashes, owner)

    def clear(self, namespace: int | None) -> ClearResult:
        """Removes every block of a namespace (None: of all) that nobody holds."""
        return clearing.clear(self._state, namespace)

    def explain(self, *, namespace: int, hashes: U64) -> Explanation:
        """Why a chain is no hit from some block on. Raises: InvalidArgument."""
        self._check_blocks(hashes)
        return reporting.explain(self._state, namespace, hashes)

    def stats(self) -> StoreStats:
        """Gauges and counters. O(slots × sessions)."""
        return reporting.stats(self._state, self._moving)

    def check_integrity(self) -> list[str]:
        """Broken invariants in words; empty when the store is sound. O(rows + slots)."""
        return integrity.check(self._state)
