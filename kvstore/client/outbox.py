"""What a session sends: messages in order, those sent but not answered kept for a resume.

Steps are not queued but merged: while one waits to be sent, whatever comes later joins it, so a slow or absent daemon
costs a bounded amount of memory and an engine never waits. Not thread-safe: the session's lock covers it.

After a resume everything unanswered is sent again, in order, under new ids; seals and copies may be repeated, and a
release names only slots that were not granted again (CONTRACT C of ARCHITECTURE.md, "Resume").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.client.copied import COPIED, put_copies
from kvstore.client.decision import Decision, TierChange
from kvstore.client.grant import PendingGrant
from kvstore.client.retain import Retain
from kvstore.wire.packed import SEAL
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["Cancel", "Hint", "Item", "Outbox", "Prefetch", "Step", "StepBuffer"]

_MAX_UNANSWERED_STEPS = 1024
_NO_SLOTS: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)


@dataclass(slots=True)
class Step:
    """One step as it was sent. `seen` is the newest message that had been read when its releases were chosen."""

    seen: int
    seals: NDArray[np.void]
    loads: NDArray[np.void]  # COPIED
    stores: NDArray[np.void]  # COPIED
    released_hbm: NDArray[np.uint32]
    released_dram: NDArray[np.uint32]
    want_slots: int
    want_room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """A prefetch to send."""

    namespace: int
    lease: int
    hashes: NDArray[np.uint64]
    deadline_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A lease to forget."""

    lease: int


@dataclass(frozen=True, slots=True)
class _StepDue:
    """Place in the queue where the merged step leaves."""


Hint = Prefetch | Cancel | Decision | TierChange | Retain
"""What holds nothing and is not answered."""
Item = PendingGrant | Step | Hint


@dataclass(slots=True)
class StepBuffer:
    """What the next step will say, merged over calls."""

    seals: list[NDArray[np.void]] = field(default_factory=list)
    loads: list[NDArray[np.void]] = field(default_factory=list)
    stores: list[NDArray[np.void]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.seals or self.loads or self.stores)

    def take(self, limit: int) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void]]:
        """Seals, loads and stores, at most `limit` of each; the rest stays."""
        return (
            _take(self.seals, limit, SEAL),
            _take(self.loads, limit, COPIED),
            _take(self.stores, limit, COPIED),
        )


def _take(parts: list[NDArray[np.void]], limit: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    if not parts:
        return np.empty(0, dtype=dtype)
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    parts[:] = [whole[limit:]] if len(whole) > limit else []
    return whole[:limit]


class Outbox:
    """The queue towards the daemon. `compose` writes the merged step at the moment it leaves."""

    __slots__ = ("_compose", "_next_id", "_queue", "_sent", "_step_due", "_unanswered_steps")

    def __init__(self, compose: Callable[[], Step | None]) -> None:
        self._compose = compose
        self._queue: deque[Item | _StepDue] = deque()
        self._sent: deque[tuple[int, Item]] = deque()
        self._next_id = 1
        self._step_due = False
        self._unanswered_steps = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: PendingGrant | Hint) -> None:
        """Appends a message."""
        self._queue.append(item)

    def step_due(self) -> None:
        """Something for a step is there: it leaves behind what is queued now, or with the step that is queued."""
        if not self._step_due:
            self._step_due = True
            self._queue.append(_StepDue())

    def next(self, now: float) -> pb.ClientMessage | None:
        """The next message to send, or None when there is none. Remembers it until it is answered."""
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, _StepDue):
                self._step_due = False
                step = self._compose()
                if step is None:
                    continue
                item = step
            elif isinstance(item, PendingGrant):
                if item.abandoned:
                    continue
                item.sent_at = now
            return self._remember(item)
        return None

    def answered(self, message_id: int) -> Item | None:
        """The message that an answer names; those before it are done too, since the stream is ordered."""
        while self._sent and self._sent[0][0] <= message_id:
            sent_id, item = self._sent.popleft()
            self._unanswered_steps -= isinstance(item, Step)
            if sent_id == message_id:
                return item
        return None

    def rewind(self, held_hbm: NDArray[np.bool_], held_dram: NDArray[np.bool_]) -> None:
        """A new stream begins: everything unanswered is to be sent again, before what is queued."""
        self._queue.extendleft(item for _, item in reversed(self._sent))
        self._sent.clear()
        self._unanswered_steps = 0
        self._next_id = 1
        for item in self._queue:  # also those that an earlier, shorter stream was to send again
            if isinstance(item, Step):
                item.seen = (
                    0  # of the new stream: whatever is granted on it before this arrives is not released
                )
                item.released_hbm = item.released_hbm[~held_hbm[item.released_hbm]]
                item.released_dram = item.released_dram[~held_dram[item.released_dram]]

    def forget(self) -> list[Item]:
        """The session is gone: takes everything out, sent or not, and returns it."""
        items: list[Item] = [item for _, item in self._sent]
        items += [item for item in self._queue if not isinstance(item, _StepDue)]
        self._sent.clear()
        self._queue.clear()
        self._step_due = False
        self._unanswered_steps = 0
        self._next_id = 1
        return items

    def unanswered_releases(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """HBM and DRAM slots that unanswered steps have released: a statement names them, so their copies count."""
        steps = [item for item in (*(item for _, item in self._sent), *self._queue) if isinstance(item, Step)]
        if not steps:
            return _NO_SLOTS, _NO_SLOTS
        return (
            np.concatenate([step.released_hbm for step in steps]),
            np.concatenate([step.released_dram for step in steps]),
        )

    def waits_for_answers(self) -> bool:
        """Whether an acquire or a seal is unsent or unanswered."""
        return any(
            isinstance(item, PendingGrant) or (isinstance(item, Step) and len(item.seals))
            for item in (*self._queue, *(item for _, item in self._sent))
        )

    def oldest_acquire(self) -> float | None:
        """When the oldest unanswered acquire was sent; None without any."""
        for _, item in self._sent:
            if isinstance(item, PendingGrant):
                return item.sent_at
        return None

    def _remember(self, item: Item) -> pb.ClientMessage:
        message_id = self._next_id
        self._next_id += 1
        if isinstance(item, Step):
            self._unanswered_steps += 1
            if self._unanswered_steps > _MAX_UNANSWERED_STEPS:
                self._forget_oldest_step()
        if not isinstance(item, Cancel | Decision | TierChange | Retain):
            self._sent.append((message_id, item))
        return _encode(message_id, item)

    def _forget_oldest_step(self) -> None:
        """Bounds memory where nothing is answered for long: a step without seals only loses its copies on a resume."""
        for position, (_, item) in enumerate(self._sent):
            if isinstance(item, Step) and not len(item.seals):
                del self._sent[position]
                self._unanswered_steps -= 1
                return


def _encode(message_id: int, item: Item) -> pb.ClientMessage:
    if isinstance(item, PendingGrant):
        return pb.ClientMessage(
            id=message_id,
            acquire=pb.Acquire(
                namespace=item.namespace.handle,
                lease=item.lease,
                hashes=item.hashes.tobytes(),
                first=item.first,
                reserve_slots=item.reserve,
                private_fill=item.private_fill,
            ),
        )
    if isinstance(item, Decision | TierChange | Retain):
        return item.encode(message_id)
    if isinstance(item, Step):
        return pb.ClientMessage(id=message_id, step=_encode_step(item))
    if isinstance(item, Prefetch):
        prefetch = pb.Prefetch(
            namespace=item.namespace,
            lease=item.lease,
            hashes=item.hashes.tobytes(),
            deadline_ms=item.deadline_ms,
        )
        return pb.ClientMessage(id=message_id, prefetch=prefetch)
    return pb.ClientMessage(id=message_id, cancel=pb.Cancel(lease=item.lease))


def _encode_step(step: Step) -> pb.Step:
    message = pb.Step(
        seals=step.seals.tobytes(),
        released_hbm=step.released_hbm.astype("<u4", copy=False).tobytes(),
        released_dram=step.released_dram.astype("<u4", copy=False).tobytes(),
        seen=step.seen,
        want_slots=step.want_slots,
        want_room=step.want_room,
    )
    put_copies(message, step.loads, step.stores)
    return message
