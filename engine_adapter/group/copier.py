"""The copier of a group: every process copies its part of each block, and a batch is complete when all have.

The scheduling process gives a batch to its own copier and tells the members which blocks it is of; each computes its
own addresses. What was taken cannot be taken back: a member may have begun.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier, CopyBatch, Direction, complete, give_up
from engine_adapter.group.link import MAX_COPY_BLOCKS, Computing, Copy
from kvstore.errors import Unavailable

__all__ = ["MAX_GROUP_BLOCKS", "GroupCopier", "Members"]

MAX_GROUP_BLOCKS = 16384
"""Most blocks of one direction that are not complete in all processes; a batch that finds none is always taken."""


class Members(Protocol):
    """The other processes (`engine_adapter.group.members.MemberGroup`)."""

    @property
    def members(self) -> int:
        """Processes, this one included."""
        ...

    def tell(self, message: Copy | Computing) -> None:
        """Sends to each. Raises: Unavailable where one has gone."""
        ...


@dataclass(slots=True, eq=False)
class _Under:
    """A batch under way, and how many of its parts have yet to complete."""

    batch: CopyBatch
    parts: int
    failed: bool = False  # said so: parts that come all the same count no more


class GroupCopier:
    """Copier over this process's own and those of the members; `copied` is to be told what a member completes."""

    def __init__(self, own: Copier, group: Members) -> None:
        self._own = own
        self._group = group
        self._others = group.members - 1
        self._numbers = count()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._order = tuple(threading.Lock() for _ in Direction)  # all processes get batches in one order
        self._told: dict[
            int, list[_Under]
        ] = {}  # number of a message → its batch, once for each answer to come
        self._waiting = [0, 0]
        self._computing = False
        self._batches = 0
        self._closing = False

    def takes_sums(self, nbytes: int) -> bool:
        """See Copier. Nobody has a whole block."""
        del nbytes
        return False

    def submit(self, batch: CopyBatch) -> bool:
        """See Copier. Raises: Unavailable where a member has gone: nothing completes any more."""
        assert batch.hbm_slots is not None
        assert batch.dram_slots is not None
        assert batch.groups == 1, "members say when they have copied whole blocks"
        blocks = len(batch.sources)
        starts = range(0, blocks, MAX_COPY_BLOCKS)
        under = _Under(batch, 1 + len(starts) * self._others)
        with self._order[batch.direction]:
            if not self._take(batch.direction, blocks):
                return False
            if not self._own.submit(self._part(batch, under)):
                self._leave(batch)
                return False
            for start in starts:
                part = slice(start, start + MAX_COPY_BLOCKS)
                self._tell(under, batch.hbm_slots[part], batch.dram_slots[part])
        return True

    def cancel(self, batch: CopyBatch) -> bool:  # noqa: ARG002 (the contract's)
        """See Copier. Always too late."""
        return False

    def computing(self, steps: int) -> None:
        """See Copier. One thread. Members, each with a copier of its own, hear where it begins or ends to be any."""
        self._own.computing(steps)
        if self._computing != (steps > 0):
            self._computing = steps > 0
            with contextlib.suppress(Unavailable):  # whoever submits or steps next hears of it
                self._group.tell(Computing(steps=steps))

    def copied(self, number: int) -> None:
        """A member has completed its part of a message's blocks."""
        with self._lock:
            answers = self._told[number]
            under = answers.pop()
            if not answers:
                del self._told[number]
        self._part_done(under)

    def close(self, timeout_s: float) -> None:
        """See Copier. Waits for the members' parts too; where one has gone, they never come."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
        self._own.close(timeout_s)
        with self._ended:
            self._ended.wait_for(lambda: not self._batches, max(0.0, deadline - time.monotonic()))

    def _part(self, batch: CopyBatch, under: _Under) -> CopyBatch:
        """This process's."""
        done, failed = partial(self._part_done, under), partial(self._part_failed, under)
        return replace(batch, done=done, failed=failed, sums=None)

    def _take(self, direction: Direction, blocks: int) -> bool:
        with self._lock:
            waiting = self._waiting[direction]
            if self._closing or (waiting and waiting + blocks > MAX_GROUP_BLOCKS):
                return False
            self._waiting[direction] += blocks
            self._batches += 1
            return True

    def _leave(self, batch: CopyBatch) -> None:
        with self._ended:
            self._waiting[batch.direction] -= len(batch.sources)
            self._batches -= 1
            self._ended.notify_all()

    def _tell(self, under: _Under, hbm_slots: NDArray[np.uint32], dram_slots: NDArray[np.uint32]) -> None:
        number = next(self._numbers)
        with self._lock:
            self._told[number] = [under] * self._others
        self._group.tell(
            Copy(number=number, direction=under.batch.direction, hbm_slots=hbm_slots, dram_slots=dram_slots)
        )

    def _part_done(self, under: _Under) -> None:
        with self._lock:
            under.parts -= 1
            if under.parts or under.failed:
                return
        self._leave(under.batch)
        complete(under.batch)

    def _part_failed(self, under: _Under) -> None:
        with self._lock:
            under.failed = True
        self._leave(under.batch)
        give_up(under.batch)
