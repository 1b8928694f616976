"""One attached engine: local match, acquire, step, prefetch, credit, and the memory it maps.

The engine's thread calls; nothing here waits for the daemon but `open_namespace`, `PendingGrant.result` and `wait`, so
a decode step never does. A thread of its own keeps the session attached through lost streams and restarts.

Slots are counted: every slot that a grant, `take_credit` or `take_room` gives has one local reference; `share_*` adds
one, `drop_*` gives one back, and the last one back lets the next `step` release the slot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client.credit import SlotRun
from kvstore.client.descriptors import Descriptors, MappedMemory
from kvstore.client.events import Event
from kvstore.client.grant import PendingGrant
from kvstore.client.memory import DramMemory, HbmMemory
from kvstore.client.outbox import Cancel, Prefetch
from kvstore.client.rpc import Rpc
from kvstore.client.state import Listener, SessionState, Targets
from kvstore.client.stream import Stream
from kvstore.errors import FailedPrecondition, InvalidArgument, KvstoreError
from kvstore.geometry import Geometry
from kvstore.identity import HashChain, namespace_digest
from kvstore.layout import GENERATION_SHIFT, Tier
from kvstore.match import MatchResult, match
from kvstore.wire.descriptors import descriptor_path
from kvstore.wire.packed import COPY, SEAL
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["DeviceSpec", "Namespace", "Session"]

_LOG = logging.getLogger("kvstore.client")
_PROTOCOL_VERSION = 1
_MAP_TIMEOUT_S = 2.0

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_NO_SEALS: NDArray[np.void] = np.empty(0, dtype=SEAL)
_NO_COPIES: NDArray[np.void] = np.empty(0, dtype=COPY)
_NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The owned HBM of a session. `hbm_bytes` is its budget on that device, in bytes."""

    hbm_bytes: int
    index: int = 0
    kind: str = "twin"
    uuid: str = ""


class Namespace:
    """All that makes KV interchangeable, opened in one session. `handle` may change when a session is renewed."""

    __slots__ = ("block_tokens", "handle", "key", "parts")

    def __init__(self, parts: Mapping[str, bytes], block_tokens: int, handle: int, key: bytes) -> None:
        self.parts = dict(parts)
        self.block_tokens = block_tokens
        self.handle = handle
        self.key = key

    def chain(self, token_ids: Sequence[int] | NDArray[np.integer] = ()) -> HashChain:
        """The hash chain of a prompt in this namespace; it can be extended."""
        return HashChain(self.key, self.block_tokens, token_ids)


class Session:
    """See the module. Made by `Client.attach`; also a context manager that closes it."""

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        geometry: Geometry,
        device: DeviceSpec | None,
        targets: Targets | None,
        timeout_s: float,
    ) -> None:
        """Attaches. Raises: Unavailable, InvalidArgument, ResourceExhausted, … as the daemon answers."""
        self.name = name
        self.geometry = geometry
        self.device = device
        self._rpc = rpc
        self._timeout_s = timeout_s
        self._namespaces: dict[bytes, Namespace] = {}
        self._opening = threading.Lock()
        self._closed = False
        self._reply = self._attach(None)
        self._descriptors = self._open_descriptors(None)
        try:
            self._memory: MappedMemory = self._descriptors.open()
            shape = self._memory.tables.columns.shape
            targets = targets or Targets.for_pages(self._memory.hbm.num_pages if self._memory.hbm else 0)
            self._state = SessionState(shape, self._reply.max_message_blocks, targets)
            self._stream = Stream(rpc, self._state, self)
        except BaseException:
            self._descriptors.close()
            self._detach()
            raise
        self._stream.start()

    # ------------------------------------------------------------ memory

    @property
    def hbm(self) -> HbmMemory:
        """The mapped HBM. Raises: FailedPrecondition for a session without any."""
        if self._memory.hbm is None:
            raise FailedPrecondition("this session owns no HBM")
        return self._memory.hbm

    @property
    def dram(self) -> DramMemory:
        """The mapped DRAM."""
        return self._memory.dram

    @property
    def tables(self) -> MappedMemory:
        """Everything that is mapped, the read-only tables among it."""
        return self._memory

    # ------------------------------------------------------------ identity and lookup

    def open_namespace(self, parts: Mapping[str, bytes]) -> Namespace:
        """One call for each distinct `parts` (kvstore/identity.py names the tags); then from memory."""
        digest = namespace_digest(parts)
        with self._opening:
            namespace = self._namespaces.get(digest)
            if namespace is None:
                reply = self._open(parts)
                namespace = Namespace(parts, self.geometry.block_tokens, reply.namespace, reply.key)
                self._namespaces[digest] = namespace
            return namespace

    def match(self, namespace: Namespace, hashes: U64) -> MatchResult:
        """The leading blocks that are cached, looked up in the mapped tables: no call, no side effect, only a hint."""
        tables = self._memory.tables
        device = None if self.device is None else self.device.index
        return match(tables.columns, tables.index, namespace.handle, hashes, device=device)

    # ------------------------------------------------------------ what changes leases

    def acquire(
        self,
        namespace: Namespace,
        lease: int,
        hashes: U64,
        *,
        first: int = 0,
        reserve: int = 0,
        private_fill: bool = False,
    ) -> PendingGrant:
        """Asks for the blocks of a chain from `first` on and for `reserve` slots beyond it. Never waits.

        While the daemon does not answer, the grant fails at once with Unavailable. Raises: InvalidArgument for a chain
        that is longer than one message may name.
        """
        limit = self._state.max_message_blocks
        if len(hashes) > limit or reserve > limit:
            raise InvalidArgument(f"an acquire names at most {limit} blocks, not {max(len(hashes), reserve)}")
        grant = PendingGrant(
            self,
            namespace=namespace,
            lease=lease,
            hashes=hashes,
            first=first,
            reserve=reserve,
            private_fill=private_fill,
        )
        self._state.acquire(grant)
        return grant

    def stage(
        self,
        *,
        seals: NDArray[np.void] = _NO_SEALS,
        loads: NDArray[np.void] = _NO_COPIES,
        stores: NDArray[np.void] = _NO_COPIES,
        dropped_hbm: U32 = _NO_SLOTS,
        dropped_dram: U32 = _NO_SLOTS,
    ) -> None:
        """Adds to the next step: seals SEAL[], completed copies COPY[], and slots that one local user lets go of.

        Nothing that is dropped here is released before the daemon has the seals and copies given here.
        """
        self._state.stage(seals, loads, stores, dropped_hbm, dropped_dram)

    def step(
        self,
        *,
        seals: NDArray[np.void] = _NO_SEALS,
        loads: NDArray[np.void] = _NO_COPIES,
        stores: NDArray[np.void] = _NO_COPIES,
        dropped_hbm: U32 = _NO_SLOTS,
        dropped_dram: U32 = _NO_SLOTS,
    ) -> None:
        """As `stage`, and sends all that was staged: one message, none where there is nothing to say. Never waits."""
        self._state.step(seals, loads, stores, dropped_hbm, dropped_dram)

    def prefetch(self, namespace: Namespace, lease: int, hashes: U64, *, deadline_ms: int = 0) -> None:
        """Starts promotions for a request that waits. A hint: nothing is held, nothing is answered."""
        hashes = hashes[: self._state.max_message_blocks]
        self._state.put(
            Prefetch(namespace=namespace.handle, lease=lease, hashes=hashes, deadline_ms=deadline_ms)
        )

    def cancel(self, lease: int) -> None:
        """Forgets what a lease waits for or prefetches."""
        self._state.put(Cancel(lease=lease))

    # ------------------------------------------------------------ slots

    def take_credit(self, count: int) -> SlotRun | None:
        """`count` HBM slots to fill from those in hand; None where there are fewer."""
        return self._state.take_credit(count)

    def take_room(self, count: int) -> SlotRun | None:
        """`count` DRAM slots to fill from those in hand; None where there are fewer."""
        return self._state.take_room(count)

    @property
    def credit_in_hand(self) -> int:
        """HBM slots to fill that nobody uses yet."""
        return self._state.hbm.in_hand

    @property
    def room_in_hand(self) -> int:
        """DRAM slots to fill that nobody uses yet."""
        return self._state.dram.in_hand

    @property
    def max_message_blocks(self) -> int:
        """Most blocks that one message may name."""
        return self._state.max_message_blocks

    def want_credit(self, count: int) -> None:
        """Has the next `step` ask for at least `count` slots in hand, until they were taken once."""
        self._state.want_credit(count)

    def pause_credit(self) -> None:
        """Gives the credit in hand back and asks for none, so that an acquire that found no slot may find some."""
        self._state.pause_credit()

    def resume_credit(self) -> None:
        """Asks for credit again, from the next `step` on."""
        self._state.resume_credit()

    def share_hbm(self, slots: U32) -> None:
        """One more local user."""
        self._state.share(self._state.hbm, slots)

    def share_dram(self, slots: U32) -> None:
        """One more local user."""
        self._state.share(self._state.dram, slots)

    def drop_hbm(self, slots: U32) -> None:
        """One local user less; the next `step` releases what nobody uses."""
        self._state.drop(self._state.hbm, slots)

    def drop_dram(self, slots: U32) -> None:
        """One local user less; the next `step` releases what nobody uses."""
        self._state.drop(self._state.dram, slots)

    def abandon(self, grant: PendingGrant) -> None:
        """See PendingGrant.abandon."""
        self._state.abandon(grant)

    def generations_of(self, tier: Tier, slots: U32) -> U32:
        """[n] generations under which the session holds these slots."""
        pool = self._state.hbm if tier is Tier.HBM else self._state.dram
        generations: U32 = pool.generations[slots]
        return generations

    # ------------------------------------------------------------ news

    def listen(self, listener: Listener) -> None:
        """Has `listener` called on the stream's thread; at most one."""
        self._state.listener = listener

    def poll(self) -> list[Event]:
        """Events since the last call."""
        return self._state.poll()

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until there is news that `poll` has not seen; False: the time is over."""
        return self._state.wait(timeout_s)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Sleeps until `ready()`, asked again at every news; False: the time is over."""
        return self._state.wait_until(ready, timeout_s)

    def notify(self) -> None:
        """Wakes `wait`: for a copier of this process."""
        self._state.notify()

    @property
    def available(self) -> bool:
        """False once the daemon has been away or silent for a while: go on as if there were no cache."""
        return self._state.available

    @property
    def connected(self) -> bool:
        """Whether the stream is open now."""
        return self._state.connected

    @property
    def sent_messages(self) -> int:
        """Messages sent on streams so far."""
        return self._state.sent_messages

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Detaches: nothing of this process touches a slot any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stream.stop(self._timeout_s)
        self._detach()
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------ for the stream's thread

    @property
    def token(self) -> bytes:
        """Names the session on the stream."""
        return self._reply.token

    def resume(self) -> None:
        """Attaches again, states what is held, and notes what the daemon does not hold for this session."""
        held = self._state.statement()
        statement = pb.Resume(
            token=self._reply.token,
            hbm_slots=held.hbm.slots.tobytes(),
            hbm_generations=held.hbm.generations.tobytes(),
            dram_slots=held.dram.slots.tobytes(),
            dram_generations=held.dram.generations.tobytes(),
        )
        self._reply = self._attach(statement)
        if self._descriptors.closed:
            self._descriptors.close()
            self._descriptors = self._open_descriptors(None)
            self._descriptors.open(self._memory)
        self._state.lose(self._missing(Tier.HBM, held.hbm), self._missing(Tier.DRAM, held.dram))
        self._reopen()

    def renew(self) -> None:
        """Attaches as a new session: other tables, other extents behind the same pages."""
        self._descriptors.close()
        old = self._memory
        self._reply = self._attach(None)
        self._descriptors = self._open_descriptors(old.hbm)
        self._memory = self._descriptors.open()
        old.dram.close()
        self._state.renew(self._memory.tables.columns.shape, self._reply.max_message_blocks)
        self._reopen()

    def wait_mapped(self, dram_slots: U32) -> None:
        """See Connection.wait_mapped: a second hello fetches the whole set where a push did not come."""
        if self._memory.dram.mapped(dram_slots):
            return
        if not self._descriptors.wait_mapped(self._memory, dram_slots, _MAP_TIMEOUT_S):
            raise FailedPrecondition("the descriptor of a DRAM extent did not come: resuming")

    def _missing(self, tier: Tier, stated: SlotRun) -> U32:
        """Stated slots that the tables do not show as this session's, under that generation."""
        pool = self._memory.tables.columns.pool(tier)
        ours = (pool.holders[stated.slots] >> np.uint64(self._reply.session)) & np.uint64(1) != 0
        same = (pool.state[stated.slots] >> GENERATION_SHIFT).astype(np.uint32) == stated.generations
        missing: U32 = stated.slots[~(ours & same)]
        return missing

    def _attach(self, resume: pb.Resume | None) -> pb.AttachReply:
        groups = [
            pb.LayerGroup(
                rule=int(group.rule),  # type: ignore[arg-type]
                window_tokens=group.window_tokens,
                layers=group.layers,
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
                block_tokens=group.block_tokens,
            )
            for group in self.geometry.groups
        ]
        request = pb.AttachRequest(
            protocol_version=_PROTOCOL_VERSION,
            name=self.name,
            groups=groups,
            dtype=self.geometry.dtype,
            device=_device(self.device),
            hbm_bytes=0 if self.device is None else self.device.hbm_bytes,
            members=1,
            resume=resume,
        )
        reply: pb.AttachReply = self._rpc.call("Attach", request, self._timeout_s)
        return reply

    def _open_descriptors(self, hbm_range: HbmMemory | None) -> Descriptors:
        return Descriptors(
            self._reply.descriptor_socket or descriptor_path(self._rpc.socket_path),
            self._reply.token,
            slot_bytes=self._reply.slot_bytes,
            hbm_bytes=0 if self.device is None else self.device.hbm_bytes,
            timeout_s=self._timeout_s,
            hbm_range=hbm_range,
        )

    def _open(self, parts: Mapping[str, bytes]) -> pb.OpenNamespaceReply:
        request = pb.OpenNamespaceRequest(
            token=self._reply.token,
            parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in parts.items()],
        )
        reply: pb.OpenNamespaceReply = self._rpc.call("OpenNamespace", request, self._timeout_s)
        return reply

    def _reopen(self) -> None:
        """Opens every namespace again: a restarted daemon does not know which ones this session may use."""
        with self._opening:
            for namespace in self._namespaces.values():
                namespace.handle = self._open(namespace.parts).namespace

    def _detach(self) -> None:
        try:
            self._rpc.call("Detach", pb.DetachRequest(token=self._reply.token), self._timeout_s)
        except KvstoreError as error:  # the daemon sees the process end instead
            _LOG.info("detach: %s", error)


def _device(spec: DeviceSpec | None) -> pb.Device | None:
    if spec is None:
        return None
    if spec.kind != "twin":
        raise InvalidArgument(f"device kind {spec.kind!r} is not built yet: use 'twin'")
    return pb.Device(kind=pb.DEVICE_KIND_TWIN, index=spec.index, uuid=spec.uuid)
