"""The state of one session in this process, under one lock: what it holds, what it sends, what it was told.

The engine's thread, the copier's and the stream's all come here; every method is short and none waits for the daemon.
A slot is given back when its last local user lets go; a release is decided at the moment its message is written, with
the newest grant applied, so it can never undo a grant that was read before (`seen` covers those that were not).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.client.credit import HeldSlots, SlotRun
from kvstore.client.decode import grant_of, refusal_of, slots_of
from kvstore.client.events import Changed, Event, Lost, SealResult
from kvstore.client.grant import PendingGrant, given
from kvstore.client.outbox import Hint, Outbox, Step, StepBuffer
from kvstore.errors import Aborted, ResourceExhausted, Unavailable
from kvstore.layout import TableShape, Tier
from kvstore.moves import Grant
from kvstore.wire.packed import u8_of
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Listener", "SessionState", "Statement", "Targets"]

_LOG = logging.getLogger("kvstore.client")
_MAX_QUEUED = 8192
_LOOK_AGAIN_S = 5.0  # no wait without a bound, though every change wakes this one
_MAX_EVENTS = 65536
_KEPT_SLOTS, _KEPT_SHARE = 8, 32  # at least what the store keeps free of a pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Slots that a session likes to have in hand; it asks again below half."""

    credit: int
    room: int
    first_credit: int | None = None
    """HBM slots before the first prompt was asked for: what is cached there does not make way for what nobody uses yet.
    None: as many as `credit`."""
    breaker_s: float = 1.0
    """An acquire unanswered, or a daemon away, for this long makes the session unavailable: "no cache"."""

    @classmethod
    def for_pages(cls, pages: int, free: int, dram_slots: int) -> Targets:
        """What suits a pool of so many HBM pages: seconds of decoding; most of it and of DRAM is left to prompts.

        `free` pages held nothing when the session began. The store keeps some free at all times, so no more than
        those beyond come without putting anything out.
        """
        credit = min(256, max(4, pages // 16)) if pages else 0
        first = min(credit, max(0, free - min(pages // 4, max(_KEPT_SLOTS, pages // _KEPT_SHARE))))
        room = max(16, min(512, pages // 4, dram_slots // 8))
        return cls(credit=credit, room=room, first_credit=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a resume says is held."""

    hbm: SlotRun
    dram: SlotRun


class Listener:
    """Called on the stream's thread, without the lock; must not wait. The base does nothing."""

    def sealed(self, result: SealResult) -> None:
        """Seals were answered; their slots keep a local reference until this returns."""

    def room(self) -> None:
        """Slots to fill have come."""


class SessionState:
    """See the module. `sendable` wakes whoever composes messages, `news` whoever waits for answers."""

    def __init__(
        self, shape: TableShape, max_message_blocks: int, targets: Targets, *, seals: Tier = Tier.HBM
    ) -> None:
        """`seals`: whose slots are sealed; DRAM's where the session owns no HBM."""
        self.lock = threading.Lock()
        self.sendable = threading.Condition(self.lock)
        self.news = threading.Condition(self.lock)
        self.hbm = HeldSlots(shape.hbm_slots)
        self.dram = HeldSlots(shape.dram_slots)
        self._sealed = self.hbm if seals is Tier.HBM else self.dram
        self.listener = Listener()
        self.max_message_blocks = max_message_blocks
        self.sent_messages = 0
        self._targets = targets
        self._outbox = Outbox(self._compose)
        self._buffer = StepBuffer()
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._fresh_news = False
        self._wanting = [False, False]
        self._asked = (0, 0)
        self._credit_floor = 0  # ask for that many at least
        self._credit_paused = False
        self._asked_for_prompt = False  # until then the first credit is enough
        self._seen = 0
        self._stream = 0  # number of the stream that may take messages; 0: none
        self.streams = 0  # opened so far
        self._away_since: float | None = time.monotonic()

    # ------------------------------------------------------------ the engine's side

    def acquire(self, grant: PendingGrant) -> None:
        """Queues an acquire; fails it at once while the session is unavailable."""
        with self.lock:
            if self._silence_s() >= self._targets.breaker_s:
                grant.fail(Unavailable("the daemon is away or does not answer", retry_after_s=0.1))
            elif len(self._outbox) >= _MAX_QUEUED:
                grant.fail(ResourceExhausted("too many messages wait for the daemon", retry_after_s=0.1))
            else:
                # A prompt, which names its full blocks and has to fill at least one: not a warm-up, nor an adoption.
                self._asked_for_prompt |= bool(len(grant.hashes)) and grant.reserve > 0
                self._outbox.put(grant)
                self.sendable.notify()

    def abandon(self, grant: PendingGrant) -> None:
        """See PendingGrant.abandon."""
        with self.lock:
            if grant.abandoned:
                return
            grant.abandoned = True
            if grant.done() and grant.error is None:
                self._drop_grant(grant.result(0))

    def put(self, item: Hint) -> None:
        """Queues a message; it is let go of where too many wait, since all kinds are hints."""
        with self.lock:
            if len(self._outbox) < _MAX_QUEUED:
                self._outbox.put(item)
                self.sendable.notify()

    def stage(
        self,
        seals: NDArray[np.void],
        loads: NDArray[np.void],
        stores: NDArray[np.void],
        dropped_hbm: NDArray[np.uint32],
        dropped_dram: NDArray[np.uint32],
    ) -> None:
        """Adds to the next step. What is dropped here is released behind the seals and copies given here."""
        with self.lock:
            self._stage(seals, loads, stores, dropped_hbm, dropped_dram)

    def step(
        self,
        seals: NDArray[np.void],
        loads: NDArray[np.void],
        stores: NDArray[np.void],
        dropped_hbm: NDArray[np.uint32],
        dropped_dram: NDArray[np.uint32],
    ) -> None:
        """As `stage`, and the step leaves where there is anything to say."""
        with self.lock:
            self._stage(seals, loads, stores, dropped_hbm, dropped_dram)
            self._send_step()

    def take_credit(self, count: int) -> SlotRun | None:
        """See Session.take_credit."""
        with self.lock:
            taken = self.hbm.take(count)
            if taken is not None:
                self._credit_floor = 0
            return taken

    def want_credit(self, count: int) -> None:
        """See Session.want_credit."""
        with self.lock:
            self._credit_floor = max(self._credit_floor, count)
            self._asked_for_prompt = True

    def pause_credit(self) -> None:
        """Gives the HBM credit back and asks for none: an acquire finds no slot, and nothing decodes."""
        with self.lock:
            self._credit_paused = True
            self.hbm.give_back()
            self._send_step()

    def resume_credit(self) -> None:
        """Asks for credit again."""
        with self.lock:
            self._credit_paused = False

    def take_room(self, count: int) -> SlotRun | None:
        """See Session.take_room."""
        with self.lock:
            return self.dram.take(count)

    def share(self, pool: HeldSlots, slots: NDArray[np.uint32]) -> None:
        """One more local user of these slots."""
        with self.lock:
            pool.share(slots)

    def drop(self, pool: HeldSlots, slots: NDArray[np.uint32]) -> None:
        """One local user lets go of these slots; the next step names those that nobody uses."""
        with self.lock:
            pool.drop(slots)

    def poll(self) -> list[Event]:
        """Events since the last call."""
        if not self._fresh_news:  # without the lock, once a step: what comes now is seen by the next call
            return []
        with self.lock:
            events, self._events = list(self._events), deque(maxlen=_MAX_EVENTS)
            self._fresh_news = False
            return events

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until there is news that `poll` has not seen; False: the time is over."""
        with self.lock:
            return self.news.wait_for(lambda: self._fresh_news, timeout_s)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Sleeps until `ready()`; asked again at every news."""
        with self.lock:
            return self.news.wait_for(ready, timeout_s)

    def quiet(self) -> bool:
        """See Session.quiet."""
        with self.lock:
            leaving = self.hbm.leaving or self.dram.leaving
            return not (self._buffer or leaving or self._outbox.waits_for_answers())

    def notify(self) -> None:
        """Somebody else (the copier) has news for whoever waits."""
        with self.lock:
            self._announce()

    @property
    def available(self) -> bool:
        """False: the daemon is away or does not answer; an engine goes on as if there were no cache."""
        return self.silence_s < self._targets.breaker_s

    @property
    def silence_s(self) -> float:
        """See Session.silence_s."""
        with self.lock:
            return self._silence_s()

    @property
    def connected(self) -> bool:
        """Whether a stream is open."""
        return self._stream != 0

    # ------------------------------------------------------------ the stream's side

    def next_message(self, stream: int) -> pb.ClientMessage | None:
        """Waits for the next message of this stream; None when the stream is no longer the current one."""
        with self.lock:
            while self._stream == stream:
                message = self._outbox.next(time.monotonic())
                if message is not None:
                    self.sent_messages += 1
                    return message
                self.sendable.wait(_LOOK_AGAIN_S)
            return None

    def open_stream(self) -> int:
        """A stream begins: what was not answered is sent again on it. Returns its number."""
        with self.lock:
            self._seen = 0
            self._outbox.rewind(self.hbm.held, self.dram.held)
            self.streams += 1
            self._stream = self.streams
            self._away_since = None
            self._asked = (0, 0)
            self._send_step()
            self._announce()
            return self._stream

    def close_stream(self) -> None:
        """The stream is gone; messages wait."""
        with self.lock:
            if self._stream:
                self._away_since = time.monotonic()
            self._stream = 0
            self.sendable.notify_all()
            self._announce()

    def statement(self) -> Statement:
        """What a resume says is held. No stream is open."""
        with self.lock:
            hbm, dram = self._outbox.unanswered_releases()
            return Statement(hbm=self.hbm.statement(hbm), dram=self.dram.statement(dram))

    def lose(self, hbm: NDArray[np.uint32], dram: NDArray[np.uint32]) -> None:
        """The daemon does not hold these for the session."""
        with self.lock:
            lost = Lost(hbm_slots=self.hbm.lose(hbm), dram_slots=self.dram.lose(dram))
            if len(lost.hbm_slots) or len(lost.dram_slots):
                self._events.append(lost)
                self._announce()

    def forget(self, why: str) -> None:
        """The session is unknown to the daemon: everything is lost, every pending grant fails."""
        with self.lock:
            for item in self._outbox.forget():
                if isinstance(item, PendingGrant):
                    item.fail(Aborted(why, retry_after_s=0.1))
                elif isinstance(item, Step):
                    self._sealed.drop(item.seals["slot"])
            for seals in self._buffer.seals:
                self._sealed.drop(seals["slot"])
            self._buffer = StepBuffer()
            every = np.flatnonzero(self.hbm.held).astype(np.uint32), np.flatnonzero(self.dram.held)
            lost = Lost(
                hbm_slots=self.hbm.lose(every[0]), dram_slots=self.dram.lose(every[1].astype(np.uint32))
            )
            self._events.append(lost)
            self._announce()

    def idle(self) -> bool:
        """Whether no local user has any slot: then another session may take this one's place."""
        with self.lock:
            return not self.hbm.references.any() and not self.dram.references.any()

    def renew(self, shape: TableShape, max_message_blocks: int) -> None:
        """Another session takes this one's place; nothing is in use."""
        with self.lock:
            self.hbm.__init__(shape.hbm_slots)  # type: ignore[misc]
            self.dram.__init__(shape.dram_slots)  # type: ignore[misc]
            self._buffer = StepBuffer()
            self.max_message_blocks = max_message_blocks

    def apply(self, message: pb.ServerMessage, *, reachable: bool = True) -> None:
        """One message of the daemon, in order. What is not `reachable` (mapped by this process) goes back at once."""
        kind = message.WhichOneof("body")
        if kind == "grant":
            self._apply_grant(message.id, message.grant, reachable)
        elif kind == "slots":
            self._apply_slots(message.id, message.slots, reachable)
        elif kind == "step_result":
            self._apply_step_result(message.id, message.step_result)
        elif kind == "error":
            self._apply_error(message.id, message.error)
        else:
            with self.lock:
                self._seen = message.id
                if kind == "changed":
                    self._events.append(Changed(leases=tuple(message.changed.leases)))
                self._announce()

    def _apply_grant(self, message_id: int, answer: pb.Grant, reachable: bool) -> None:
        grant = grant_of(answer)
        with self.lock:
            self._seen = message_id
            item = self._outbox.answered(answer.id)
            hbm, dram = given(grant.hbm_slots), given(grant.dram_slots)
            self.hbm.granted(grant.hbm_slots[hbm], grant.hbm_generations[hbm])
            self.hbm.granted(grant.reserve_slots, grant.reserve_generations)
            self.dram.granted(grant.dram_slots[dram], grant.dram_generations[dram])
            if not isinstance(item, PendingGrant) or item.abandoned or not reachable:
                self._drop_grant(grant)
                if isinstance(item, PendingGrant):
                    item.fail(Aborted("the grant was abandoned, or lies in memory that is not mapped"))
            else:
                item.resolve(grant)
            self._announce()

    def _apply_slots(self, message_id: int, answer: pb.Slots, reachable: bool) -> None:
        slots = slots_of(answer)
        with self.lock:
            self._seen = message_id
            self.hbm.credited(slots.hbm_slots, slots.hbm_generations)
            self.dram.credited(slots.dram_slots, slots.dram_generations)
            if not reachable:
                _LOG.warning("slots in hand lie in memory that is not mapped: given back")
                self.hbm.give_back()
                self.dram.give_back()
                self._send_step()
            self._wants()  # full again, perhaps: then nothing is asked for until half is used
            self._announce()
        self.listener.room()

    def _apply_step_result(self, message_id: int, answer: pb.StepResult) -> None:
        with self.lock:
            self._seen = message_id
            item = self._outbox.answered(answer.id)
        if not isinstance(item, Step):
            return
        result = SealResult(seals=item.seals, outcomes=u8_of(answer.seal_outcomes))
        self.listener.sealed(result)
        with self.lock:
            if type(self.listener) is Listener:  # nobody else was told
                self._events.append(result)
            if self._sealed.drop(item.seals["slot"]):
                self._outbox.step_due()
                self.sendable.notify()
            self._announce()

    def _apply_error(self, message_id: int, answer: pb.StreamError) -> None:
        error = refusal_of(answer)
        with self.lock:
            self._seen = message_id
            item = self._outbox.answered(answer.id)
            if isinstance(item, PendingGrant):
                item.fail(error)
            elif isinstance(item, Step):
                _LOG.error("the daemon refused a step: %s", error)
                self._sealed.drop(item.seals["slot"])
            self._announce()

    # ------------------------------------------------------------ under the lock

    def _stage(
        self,
        seals: NDArray[np.void],
        loads: NDArray[np.void],
        stores: NDArray[np.void],
        dropped_hbm: NDArray[np.uint32],
        dropped_dram: NDArray[np.uint32],
    ) -> None:
        # What was lost meanwhile is not reported: nobody would answer. Most steps say nothing, and are to cost nothing.
        seals = seals[self._sealed.held[seals["slot"]]] if len(seals) else seals
        loads = loads[self.hbm.held[loads["target"]]] if len(loads) else loads
        stores = stores[self.dram.held[stores["target"]]] if len(stores) else stores
        for part, buffer in (
            (seals, self._buffer.seals),
            (loads, self._buffer.loads),
            (stores, self._buffer.stores),
        ):
            if len(part):
                buffer.append(part)
        self._sealed.share(seals["slot"])  # until answered: a slot is never released under its seal
        self.hbm.drop(dropped_hbm)
        self.dram.drop(dropped_dram)

    def _send_step(self) -> None:
        if self._buffer or self.hbm.leaving or self.dram.leaving or self._wants() != self._asked:
            self._outbox.step_due()
            self.sendable.notify()

    def _compose(self) -> Step | None:
        """The merged step, cut to what one message may name; releases only once all else is said."""
        limit = self.max_message_blocks
        seals, loads, stores = self._buffer.take(limit)
        no_slots = np.empty(0, dtype=np.uint32)
        more = bool(self._buffer)
        released_hbm = no_slots if more else self.hbm.take_leaving(limit)
        released_dram = no_slots if more else self.dram.take_leaving(limit)
        if more or self.hbm.leaving or self.dram.leaving:
            self._outbox.step_due()
        wants = self._wants()
        said = (seals, loads, stores, released_hbm, released_dram)
        if wants == self._asked and not any(len(part) for part in said):
            return None
        self._asked = wants
        return Step(
            seen=self._seen,
            seals=seals,
            loads=loads,
            stores=stores,
            released_hbm=released_hbm,
            released_dram=released_dram,
            want_slots=wants[0],
            want_room=wants[1],
        )

    def _wants(self) -> tuple[int, int]:
        """HBM and DRAM slots to ask for. Hysteresis: from below half of the target until it is full."""
        wished = self._targets.credit
        if not self._asked_for_prompt and self._targets.first_credit is not None:
            wished = self._targets.first_credit
        credit = 0 if self._credit_paused else max(wished, self._credit_floor)
        levels, wants = ((self.hbm.in_hand, credit), (self.dram.in_hand, self._targets.room)), [0, 0]
        for i, (in_hand, target) in enumerate(levels):
            if in_hand * 2 < target or in_hand < self._credit_floor * (i == 0):
                self._wanting[i] = True
            elif in_hand >= target:
                self._wanting[i] = False
            wants[i] = target - in_hand if self._wanting[i] else 0
        return wants[0], wants[1]

    def _drop_grant(self, grant: Grant) -> None:
        dropped = self.hbm.drop(grant.hbm_slots[given(grant.hbm_slots)])
        dropped |= self.hbm.drop(grant.reserve_slots)
        dropped |= self.dram.drop(grant.dram_slots[given(grant.dram_slots)])
        if dropped:
            self._outbox.step_due()
            self.sendable.notify()

    def _silence_s(self) -> float:
        since = self._outbox.oldest_acquire() if self._away_since is None else self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def _announce(self) -> None:
        self._fresh_news = True
        self.news.notify_all()
