"""The session stream: decodes and checks each message, calls the store, queues the answer.

Nothing here waits: a message is handled in one go on the owner loop, so everything that changes what a session holds
happens in the order it was sent. A message that is refused (bad size, foreign namespace, old id) changes nothing and is
answered by a StreamError; the stream goes on. Its end for any reason makes the session LOST, unless a newer stream has
taken its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from eviction.base import Stop
from kvstore.daemon.handlers import Malformed
from kvstore.daemon.log import Log
from kvstore.daemon.owner import Owner
from kvstore.daemon.rpc import Context, abort, stream_error
from kvstore.daemon.session import TOKEN_BYTES, Outbox, Session, StreamOutbox, token_digest
from kvstore.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvstoreError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from kvstore.faults import fault
from kvstore.moves import U32, U64, Grant, NamespaceId
from kvstore.wire.packed import COPY, SEAL, hashes_of, records_of, u32_of, u64_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["QUEUED_MESSAGES", "SessionStreams"]

TOKEN_METADATA = "kvstore-token-bin"  # noqa: S105 (the name of a header)
QUEUED_MESSAGES = 8
"""Of the largest size: what may wait for one stream, in bytes."""
_CANCEL_S = 1.0
_STOPS = {pb.STOP_REASON_TOOL_USE: Stop.TOOL_USE, pb.STOP_REASON_END_TURN: Stop.END_TURN}
_LOG = Log("stream")


class SessionStreams:
    """Runs the streams of all sessions."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._store = owner.store
        self._limits = owner.config.limits
        self._bodies = {
            "acquire": self._acquire,
            "step": self._step,
            "prefetch": self._prefetch,
            "cancel": self._cancel,
            "retain": self._retain,
            "decision": owner.decisions.decided,
            "tier_change": owner.decisions.tier_changed,
        }

    async def serve(self, requests: AsyncIterator[pb.ClientMessage | Malformed], context: Context) -> None:
        """One stream from its first to its last message."""
        # Not with the first answer: grpc sends it twice where that answer was cancelled midway, and then no status.
        await context.send_initial_metadata(())
        outbox = Outbox(
            max_messages=self._limits.session_queue_messages,
            max_bytes=QUEUED_MESSAGES * self._limits.message_bytes,
        )
        try:
            metadata = dict(context.invocation_metadata() or ())
            session = await self.open(metadata.get(TOKEN_METADATA, b""), outbox)
        except KvstoreError as error:
            self._owner.counters.add("calls_failed_total")
            await abort(context, error)
        work = (self._read(session, outbox, requests), self._write(outbox, context), outbox.failed())
        tasks = [asyncio.ensure_future(part) for part in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close(session, outbox)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_S)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # how a stream broke does not matter: it is over
        if outbox.failure is not None:
            self.count_failure(outbox.failure)
            await abort(context, outbox.failure)

    async def open(self, token: str | bytes, outbox: StreamOutbox) -> Session:
        """The session of a token, whose answers go to `outbox` from now on. Raises: as the token deserves."""
        if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise Unauthenticated(
                f"a stream must name its session: {TOKEN_METADATA} carries the token of Attach"
            )
        session = self._owner.require_session(token_digest(token))
        try:
            await asyncio.wait_for(session.all_here.wait(), self._limits.session_lost_s)
        except TimeoutError:
            raise FailedPrecondition("the session's members have not presented themselves") from None
        if self._owner.sessions.get(session.id) is not session:
            raise Unauthenticated("the session has ended: attach again")
        if session.lost or session.outbox is not None:
            raise FailedPrecondition(
                "the session has another stream, or has not resumed: Attach(resume) first"
            )
        session.outbox = outbox
        self._owner.counters.add("streams_total")
        return session

    def close(self, session: Session, outbox: StreamOutbox) -> None:
        """The stream is over: nothing new for this session until it resumes; what it holds stays held."""
        if session.outbox is not outbox:
            return  # a resume has ended this stream and told the store
        session.outbox = None
        session.wants = False
        if self._owner.sessions.get(session.id) is session:
            session.lost = True
            self._store.lost(session.id, self._owner.now_ms())
            self._owner.counters.add("sessions_lost_total")
            _LOG.info("stream lost", session=session.id, name=session.name)
            self._owner.settle_soon()

    def count_failure(self, failure: KvstoreError) -> None:
        """A stream was ended from this side."""
        if isinstance(failure, ResourceExhausted):
            self._owner.counters.add("streams_overflowed_total")

    async def _write(self, outbox: Outbox, context: Context) -> None:
        while True:
            await context.write(await outbox.take())

    async def _read(
        self, session: Session, outbox: Outbox, requests: AsyncIterator[pb.ClientMessage | Malformed]
    ) -> None:
        newest = 0
        async for message in requests:
            if session.outbox is not outbox:
                # Resumed elsewhere, or ended: what was sent here before must not undo what was granted since.
                return
            if isinstance(message, Malformed):
                outbox.fail(message.error)
                return
            newest = self.take(session, message, newest)

    def take(self, session: Session, message: pb.ClientMessage, newest: int) -> int:
        """Handles one message of the session's own stream; `newest` is the highest id before it. The highest id now."""
        self._owner.counters.add("messages_total")
        try:
            if message.id <= newest:
                raise InvalidArgument(f"message id {message.id} is not above {newest}")
            newest = message.id
            self._handle(session, message)
        except KvstoreError as error:
            self._owner.counters.add("messages_refused_total")
            session.post(error=stream_error(message.id, error))
        except Exception:  # noqa: BLE001 (a stream's boundary: a fault in one message must not end the daemon)
            self._owner.counters.add("internal_errors_total")
            _LOG.fault("message failed", session=session.id, body=message.WhichOneof("body"))
            session.post(error=stream_error(message.id, KvstoreError("the daemon failed at this message")))
        self._owner.settle_soon()
        return newest

    def _handle(self, session: Session, message: pb.ClientMessage) -> None:
        body = message.WhichOneof("body")
        if body is None:
            raise InvalidArgument("the message has no body that this daemon knows")
        self._bodies[body](session, message)

    def _acquire(self, session: Session, message: pb.ClientMessage) -> None:
        request = message.acquire
        namespace = self._namespace(session, request.namespace)
        hashes = self._chain(request.hashes)
        if request.first > len(hashes):
            raise InvalidArgument(f"first is {request.first}, but the chain has {len(hashes)} blocks")
        if request.reserve_slots > self._limits.chain_blocks:
            raise InvalidArgument(f"at most {self._limits.chain_blocks} slots can be reserved at once")
        now_ms = self._owner.now_ms()
        grant = self._store.acquire(
            now_ms=now_ms,
            session=session.id,
            namespace=namespace,
            lease=request.lease,
            hashes=hashes,
            first=request.first,
            reserve=request.reserve_slots,
            private_fill=request.private_fill,
            grant_id=session.next_id(),
        )
        fault("grant.commit")
        session.post(grant=_grant_message(message.id, grant))
        fault("grant.sent")
        if self._store.sharing.allowed(session.id, namespace).counts:
            # The answer leaves when this turn of the loop ends: what nobody waits for comes behind it.
            note = self._note_asked
            asyncio.get_running_loop().call_soon(note, session, namespace, request.lease, hashes, now_ms)

    def _note_asked(
        self, session: Session, namespace: NamespaceId, lease: int, hashes: U64, now_ms: int
    ) -> None:
        if self._owner.sessions.get(session.id) is session:
            self._owner.requests.asked(session, namespace, lease, hashes, now_ms)

    def _step(self, session: Session, message: pb.ClientMessage) -> None:
        request = message.step
        seals = self._records(request.seals, SEAL)
        if not session.namespaces.keys() >= set(seals["namespace"].tolist()):
            raise PermissionDenied("a seal names a namespace that this session has not opened")
        released_hbm, released_dram = u32_of(request.released_hbm), u32_of(request.released_dram)
        answer = self._store.step(
            now_ms=self._owner.now_ms(),
            session=session.id,
            seals=seals,
            loads=self._records(request.loads, COPY),
            stores=self._records(request.stores, COPY),
            store_checksums=_checksums_of(request),
            wrong_loads=self._records(request.wrong_loads, COPY),
            released_hbm=released_hbm,
            released_dram=released_dram,
            seen=min(request.seen, session.last_sent),
            want_slots=request.want_slots,
            want_room=request.want_room,
        )
        session.wants = bool(request.want_slots or request.want_room)
        if request.seals:
            fault("seal.commit")
            outcomes = answer.seal_outcomes.tobytes()
            session.post(step_result=pb.StepResult(id=message.id, seal_outcomes=outcomes))

    def _prefetch(self, session: Session, message: pb.ClientMessage) -> None:
        request = message.prefetch
        namespace = self._namespace(session, request.namespace)
        hashes = self._chain(request.hashes)
        now_ms = self._owner.now_ms()
        self._store.prefetch(
            now_ms=now_ms,
            session=session.id,
            namespace=namespace,
            lease=request.lease,
            hashes=hashes,
            deadline_ms=now_ms + request.deadline_ms if request.deadline_ms else 0,
        )

    def _retain(self, session: Session, message: pb.ClientMessage) -> None:
        request = message.retain
        hashes = self._chain(request.hashes)
        self._store.hints.retain(
            now_ms=self._owner.now_ms(),
            session=session.id,
            namespace=self._namespace(session, request.namespace),
            hashes=hashes,
            first=request.first,
            last=request.last or len(hashes),
            stop=_STOPS.get(request.stop, Stop.UNKNOWN),
            priority=request.priority,
            ttl_ms=request.ttl_ms,
        )

    def _cancel(self, session: Session, message: pb.ClientMessage) -> None:
        self._store.cancel(session.id, message.cancel.lease)

    def _namespace(self, session: Session, handle: int) -> NamespaceId:
        namespace = session.namespaces.get(handle)
        if namespace is None:
            raise PermissionDenied(f"this session has not opened a namespace {handle}")
        return namespace

    def _chain(self, packed: bytes) -> U64:
        hashes = hashes_of(packed)
        if len(hashes) > self._limits.chain_blocks:
            raise InvalidArgument(
                f"a chain has at most {self._limits.chain_blocks} blocks, not {len(hashes)}"
            )
        return hashes

    def _records(self, packed: bytes, dtype: np.dtype[np.void]) -> np.typing.NDArray[np.void]:
        records = records_of(packed, dtype)
        if len(records) > self._limits.chain_blocks:
            raise InvalidArgument(
                f"one message names at most {self._limits.chain_blocks} blocks, not {len(records)}"
            )
        return records


def _checksums_of(step: pb.Step) -> U64:
    """[n, 2] of its stores, or none. Raises: InvalidArgument."""
    sums = u64_of(step.store_checksums)
    if len(sums) and len(step.store_checksums) != len(step.stores):  # 16 bytes each
        raise InvalidArgument("there are as many checksums of two words as stores, or none")
    return sums.reshape(-1, 2)


def _grant_message(message_id: int, grant: Grant) -> pb.Grant:
    return pb.Grant(
        id=message_id,
        outcomes=grant.outcomes.tobytes(),
        hbm_slots=_packed(grant.hbm_slots),
        hbm_generations=_packed(grant.hbm_generations),
        dram_slots=_packed(grant.dram_slots),
        dram_generations=_packed(grant.dram_generations),
        reserve_slots=_packed(grant.reserve_slots),
        reserve_generations=_packed(grant.reserve_generations),
    )


def _packed(values: U32) -> bytes:
    return values.astype("<u4", copy=False).tobytes()
