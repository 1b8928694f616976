"""One attached engine: local match, acquire, step, prefetch, credit, and the memory it maps.

The engine's thread calls; nothing here waits for the daemon but `open_namespace`, `PendingGrant.result` and `wait`, so
a decode step never does. A thread of its own keeps the session attached through lost streams and restarts.

Slots are counted: every slot that a grant, `take_credit` or `take_room` gives has one local reference; `share_*` adds
one, `drop_*` gives one back, and the last one back lets the next `step` release the slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.cache_use import Access, CacheUse
from kvstore.client.attachment import Attachment
from kvstore.client.copied import COPIED, Compares, checksums_of, widened
from kvstore.client.credit import SlotRun
from kvstore.client.decision import Decision, TierChange
from kvstore.client.descriptors import MappedMemory
from kvstore.client.device import DeviceSpec
from kvstore.client.events import Event
from kvstore.client.grant import PendingGrant
from kvstore.client.group import Group
from kvstore.client.memory import DramListener, DramMemory, HbmMemory
from kvstore.client.namespace import Namespace
from kvstore.client.outbox import Cancel, Prefetch
from kvstore.client.retain import Retain, StopReason
from kvstore.client.rpc import Rpc
from kvstore.client.state import Listener, SessionState, Targets
from kvstore.client.stream import Stream
from kvstore.errors import FailedPrecondition, InvalidArgument, KvstoreError
from kvstore.geometry import Geometry
from kvstore.layout import Tier
from kvstore.match import MatchResult, match
from kvstore.wire.packed import SEAL
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Session"]

_LOG = logging.getLogger("kvstore.client")
_PROTOCOL_VERSION = 1
_MAP_TIMEOUT_S = 2.0

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_DRAIN_S = 2.0
_NO_SEALS: NDArray[np.void] = np.empty(0, dtype=SEAL)
_NO_COPIES: NDArray[np.void] = np.empty(0, dtype=COPIED)
_NO_SLOTS: U32 = np.empty(0, dtype=np.uint32)
_NO_HASHES: U64 = np.empty((0, 2), dtype=np.uint64)


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
        listener: DramListener | None = None,
        group: Group | None = None,
        use: CacheUse = CacheUse.ON,
        compares: Compares = Compares.NOTHING,
    ) -> None:
        """Attaches. Raises: Unavailable, InvalidArgument, ResourceExhausted, … as the daemon answers."""
        self.name = name
        self.geometry = geometry
        self.device = device
        self.use = use
        self.compares = compares
        self._timeout_s = timeout_s
        self._closed = False
        dram_bytes = 0 if targets else _dram_bytes(rpc, timeout_s)  # before there is anything to leave behind
        self._attachment = Attachment(rpc, name, geometry, device, timeout_s, listener, group, use, compares)
        memory = self._attachment.memory
        pages = memory.hbm.num_pages if memory.hbm else 0
        targets = targets or Targets.for_pages(pages, memory.free_pages(), dram_bytes // geometry.slot_bytes)
        self._state = SessionState(
            memory.tables.columns.shape,
            self._attachment.max_message_blocks,
            targets,
            seals=Tier.DRAM if device is None else Tier.HBM,
        )
        self._stream = Stream(rpc, self._state, self._attachment)
        self._stream.start()

    # ------------------------------------------------------------ memory

    @property
    def hbm(self) -> HbmMemory:
        """The mapped HBM. Raises: FailedPrecondition for a session without any."""
        if self._attachment.memory.hbm is None:
            raise FailedPrecondition("this session owns no HBM")
        return self._attachment.memory.hbm

    @property
    def dram(self) -> DramMemory:
        """The mapped DRAM."""
        return self._attachment.memory.dram

    @property
    def tables(self) -> MappedMemory:
        """Everything that is mapped, the read-only tables among it."""
        return self._attachment.memory

    # ------------------------------------------------------------ identity and lookup

    def open_namespace(self, parts: Mapping[str, bytes]) -> Namespace:
        """One call for each distinct `parts` (kvstore/identity.py names the tags); then from memory."""
        return self._attachment.open_namespace(parts)

    def match(self, namespace: Namespace, hashes: U64) -> MatchResult:
        """The leading blocks that are cached, looked up in the mapped tables: no call, no side effect, only a hint.

        None for a session that does not read, nor where the service gives no hits.
        """
        if not self.may(namespace) & Access.READS:
            hashes = hashes[:0]
        return self.match_all(namespace, hashes)

    def match_all(self, namespace: Namespace, hashes: U64) -> MatchResult:
        """As `match`, whatever may be read: what is there need not be stored again."""
        tables = self._attachment.memory.tables
        device = None if self.device is None else self.device.index
        return match(tables.columns, tables.index, namespace.handle, hashes, device=device)

    def may(self, namespace: Namespace) -> Access:
        """What a request of this session may do with a namespace now, by the mapped tables: a hint, as `match`."""
        forbidden = self._attachment.memory.tables.columns.forbidden
        taken = int(forbidden[0])
        if namespace.handle + 1 < len(forbidden):
            taken |= int(forbidden[namespace.handle + 1])
        return self.use.access & ~Access(taken) if taken else self.use.access

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
        """Adds to the next step: seals SEAL[], completed copies (COPY[], COPIED[]), slots that a local user lets go of.

        Nothing that is dropped here is released before the daemon has the seals and copies given here.
        """
        self._state.stage(seals, widened(loads), widened(stores), dropped_hbm, dropped_dram)

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
        self._state.step(seals, widened(loads), widened(stores), dropped_hbm, dropped_dram)

    def prefetch(self, namespace: Namespace, lease: int, hashes: U64, *, deadline_ms: int = 0) -> None:
        """Starts promotions for a request that waits. A hint: nothing is held, nothing is answered."""
        hashes = hashes[: self._state.max_message_blocks]
        self._state.put(
            Prefetch(namespace=namespace.handle, lease=lease, hashes=hashes, deadline_ms=deadline_ms)
        )

    def cancel(self, lease: int) -> None:
        """Forgets what a lease waits for or prefetches."""
        self._state.put(Cancel(lease=lease))

    def retain(
        self,
        namespace: Namespace,
        hashes: U64,
        *,
        first: int = 0,
        last: int = 0,
        stop: StopReason = StopReason.UNKNOWN,
        priority: int = 0,
        ttl_ms: int = 0,
    ) -> None:
        """Says what is known of the next use of blocks [first, last) of a chain ([n, 2]); `last` 0: to its end.

        A hint: nothing is held, nothing is answered, and blocks that are not cached are passed over. `priority` (1 to
        100) puts them above every block of less for `ttl_ms`, and above what the daemon predicts; 0 ends that.
        """
        hashes = hashes[: self._state.max_message_blocks]
        self._state.put(
            Retain(
                namespace=namespace.handle,
                hashes=hashes,
                first=min(first, len(hashes)),
                last=min(last, len(hashes)),
                stop=stop,
                priority=priority,
                ttl_ms=ttl_ms,
            )
        )

    def decided(self, what: Decision | TierChange) -> None:
        """Tells the daemon what was decided here, for status, explain and the recorder. A hint, nothing is answered."""
        self._state.put(what)

    def report_wrong(self, namespace: Namespace, hashes: U64, detail: str) -> int:
        """Says that these blocks ([n, 2]) are not what their tokens give: they end in every tier, and a person is told.

        Waits for the answer, how many were known; 0 where the daemon does not answer, which is logged.
        """
        return self._attachment.report_wrong(namespace, hashes, detail)

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

    def checksums_of(self, dram_slots: U32) -> U64:
        """[n, 2] what blocks in DRAM slots that the session holds are to be; zeros where that is not known.

        All zeros for a session that compares nothing.
        """
        if self.compares is Compares.NOTHING:
            return np.zeros((len(dram_slots), 2), dtype=np.uint64)
        return checksums_of(self._attachment.memory.tables.columns, dram_slots)

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

    def drain(self, timeout_s: float) -> bool:
        """Sends all that was staged and dropped and waits until the daemon has applied it. False: no answer in time."""
        namespace = self._attachment.any_namespace()
        if namespace is None:  # then nothing can have been staged
            self.step()
            return True
        # The stream is ordered: an answer to the last message is an answer to all. But slots are released only behind
        # the answer to their seals, so one asking brings out what the next one is to cover.
        deadline = time.monotonic() + timeout_s
        for asked in count():
            self.step()
            nothing_left = self._state.quiet()
            try:
                self.acquire(namespace, 0, _NO_HASHES).result(deadline - time.monotonic())
            except KvstoreError:
                return False
            if asked and nothing_left:
                break
        return True

    def quiet(self) -> bool:
        """Whether everything given to `step` was sent, and every seal and acquire answered."""
        return self._state.quiet()

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
    def silence_s(self) -> float:
        """For how long the daemon has been away, or has owed the answer to an acquire; 0: neither."""
        return self._state.silence_s

    @property
    def streams(self) -> int:
        """Streams opened so far: one more than before, the daemon may be another."""
        return self._state.streams

    @property
    def sent_messages(self) -> int:
        """Messages sent on streams so far."""
        return self._state.sent_messages

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Tells what is left to tell and detaches: nothing here touches a slot any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.drain(min(self._timeout_s, _DRAIN_S))
        self._stream.stop(self._timeout_s)
        self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _dram_bytes(rpc: Rpc, timeout_s: float) -> int:
    """The size of DRAM, of which a service that has only started has a part by now. Raises KvstoreError."""
    stats: pb.StatsReply = rpc.call("Stats", pb.StatsRequest(), timeout_s)
    return next((tier.capacity_bytes for tier in stats.tiers if tier.tier == "dram"), 0)
