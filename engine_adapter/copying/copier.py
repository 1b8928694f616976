"""Moves whole blocks between HBM and DRAM: the contract, and the twin's implementation, a thread that copies memory.

A batch is submitted with a callback and completes as a whole, in the order of submission within one direction; loads
overtake stores, because a request waits for a load and nobody waits for a store. A load may come in groups of layers,
for who computes the first ones while the others are under way. The store learns of a copy only after its completion, so
the copier's word is what makes a block readable. `cuda_copier` puts the same batches on streams and completes them by
events; nothing else of the adapter changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.summed import checksums_at, copy_summed
from engine_adapter.layouts.convert import BlockCopy, copy_plain
from kvstore.errors import Unavailable
from kvstore.faults import fault

__all__ = [
    "Copier",
    "CopierStats",
    "CopyBatch",
    "Direction",
    "TwinCopier",
    "complete",
    "complete_group",
    "give_up",
]

_LOG = logging.getLogger("kvstore.copier")
_PIECE_BYTES = 16 << 20
"""A store is copied in pieces of this size, so that a load waits for one piece at most."""


class Direction(IntEnum):
    """Which way a batch goes; the smaller value goes first."""

    LOAD = 0  # DRAM → HBM
    STORE = 1  # HBM → DRAM


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyBatch:
    """Blocks to copy, each `nbytes` long. `done` is called once, on a copier's thread, when all are copied."""

    direction: Direction
    sources: NDArray[np.uint64]  # [n] addresses
    targets: NDArray[np.uint64]  # [n] addresses
    nbytes: int
    done: Callable[[], None]
    failed: Callable[[], None] | None = None
    """Called in place of `done` where the copier has failed. Some of it may be copied, and nobody knows whether what
    was begun has ended: neither sources nor targets are to be given away. `submit` raises from then on."""
    after: int | None = None
    """A CUDA event, alive until `done`, that has to come first; None: nothing. The twin's memory is always ready."""
    hbm_slots: NDArray[np.uint32] | None = None  # [n]
    dram_slots: NDArray[np.uint32] | None = None  # [n]
    """The same blocks by the store's numbers: other processes of a group copy their parts of them."""
    sums: NDArray[np.uint64] | None = None
    """[n, 2] zeros: the copier puts the checksum of each block there, as it was copied, before `done` and the last
    `group_done`; where it takes none (`takes_sums`) it leaves them. None: nobody wants them."""
    groups: int = 1
    """Of a load: equal slices of each block, copied one after the other: slice g of all blocks, then slice g + 1."""
    group_done: Callable[[int], None] | None = None
    """Called on a copier's thread for each of several groups, in order, when that slice of all blocks has come."""

    def __post_init__(self) -> None:
        if self.groups == 1:
            return
        if self.direction is not Direction.LOAD or self.groups < 1 or self.nbytes % self.groups:
            raise ValueError(
                f"{self.groups} groups of a {self.direction.name} of blocks of {self.nbytes} bytes"
            )
        if not len(self.sources):
            raise ValueError("groups of no blocks")

    def group(self, number: int) -> CopyBatch:
        """That slice of the blocks, as a batch of its own."""
        if self.groups == 1:
            return self
        nbytes = self.nbytes // self.groups
        offset = np.uint64(number * nbytes)
        return replace(
            self,
            sources=self.sources + offset,
            targets=self.targets + offset,
            nbytes=nbytes,
            sums=None,
            groups=1,
            group_done=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopierStats:
    """Counters since the start, by direction."""

    loaded_blocks: int
    stored_blocks: int
    waiting_blocks: int


class Copier(Protocol):
    """Copies batches. `submit` may be called from any thread, also from `done`."""

    def takes_sums(self, nbytes: int) -> bool:
        """Whether it takes the checksums that a batch asks for, of blocks of this size."""
        ...

    def submit(self, batch: CopyBatch) -> bool:
        """Takes a batch, or returns False where too many blocks of its direction are under way: try again later.

        Raises Unavailable once the copier has failed.
        """
        ...

    def cancel(self, batch: CopyBatch) -> bool:
        """Takes a batch back. True: nothing of it is ever copied, and `done` is never called. False: too late."""
        ...

    def computing(self, steps: int) -> None:
        """So many steps of the engine are under way, or 0: copies leave them the multiprocessors. See BlockManager."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finishes what was taken and ends. After it no memory is touched."""
        ...


def complete(batch: CopyBatch) -> None:
    """Calls `done`, on a copier's thread: one callback that fails must not end all later copies."""
    fault("copy.done")
    try:
        batch.done()
    except Exception:  # noqa: BLE001 (a thread's boundary)
        _LOG.exception("a completion failed")


def complete_group(batch: CopyBatch, group: int) -> None:
    """Calls `group_done` of a batch in several groups, as `complete` does `done`."""
    if batch.groups == 1:
        return
    fault("copy.group")
    if batch.group_done is not None:
        try:
            batch.group_done(group)
        except Exception:  # noqa: BLE001 (a thread's boundary)
            _LOG.exception("the completion of a group failed")


def give_up(batch: CopyBatch) -> None:
    """Calls `failed`, as `complete` does `done`."""
    if batch.failed is not None:
        try:
            batch.failed()
        except Exception:  # noqa: BLE001 (a thread's boundary)
            _LOG.exception("the failure of a batch was not taken in")


class TwinCopier:
    """Copier between two kinds of host memory: one thread, which copies without the GIL."""

    def __init__(
        self, *, max_blocks: int = 4096, load: BlockCopy = copy_plain, store: BlockCopy = copy_plain
    ) -> None:
        """`max_blocks`: most blocks of one direction under way; a batch that finds none under way is always taken.

        `load`, `store`: how a block is copied where the engine's layout is not the store's (`layouts.convert`).
        """
        self._max_blocks = max_blocks
        self._copies = (load, store)  # by Direction
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queues: tuple[deque[CopyBatch], deque[CopyBatch]] = (deque(), deque())
        self._waiting = [0, 0]
        self._copied = [0, 0]
        self._taken: list[CopyBatch] = []  # out of the queues, and not finished
        self._failure: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._guarded, name="kvstore-copier", daemon=True)
        self._thread.start()

    def takes_sums(self, nbytes: int) -> bool:
        """See Copier. Not of blocks that are converted: the checksum is of a slot."""
        del nbytes
        return self._copies == (copy_plain, copy_plain)

    def submit(self, batch: CopyBatch) -> bool:
        """See Copier."""
        count = len(batch.sources)
        assert batch.groups == 1 or self._copies[batch.direction] is copy_plain, (
            "a conversion takes whole blocks"
        )
        with self._lock:
            if self._failure is not None:
                raise Unavailable(f"the copier has failed: {self._failure}")
            waiting = self._waiting[batch.direction]
            if self._closing or (waiting and waiting + count > self._max_blocks):
                return False
            self._waiting[batch.direction] += count
            self._queues[batch.direction].append(batch)
            self._work.notify()
        return True

    def cancel(self, batch: CopyBatch) -> bool:
        """See Copier."""
        with self._lock:
            queue = self._queues[batch.direction]
            if batch not in queue:
                return False
            queue.remove(batch)
            self._waiting[batch.direction] -= len(batch.sources)
        return True

    def computing(self, steps: int) -> None:
        """See Copier. There are none."""

    def close(self, timeout_s: float = 10.0) -> None:
        """See Copier."""
        with self._lock:
            self._closing = True
            self._work.notify()
        self._thread.join(timeout_s)

    def stats(self) -> CopierStats:
        """Counters now."""
        with self._lock:
            return CopierStats(
                loaded_blocks=self._copied[Direction.LOAD],
                stored_blocks=self._copied[Direction.STORE],
                waiting_blocks=sum(self._waiting),
            )

    def _guarded(self) -> None:
        """The thread's boundary: whoever waits for a batch hears that it will not come."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 (a thread's boundary)
            _LOG.exception("the copier failed")
            with self._lock:
                self._failure = error
                batches = [*self._taken, *self._queues[Direction.LOAD], *self._queues[Direction.STORE]]
                for queue in self._queues:
                    queue.clear()
            for batch in batches:
                give_up(batch)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            fault("copy.issued")
            if batch.direction is Direction.LOAD:
                self._load(batch)
                continue
            step = max(1, _PIECE_BYTES // batch.nbytes)
            for begin in range(0, len(batch.sources), step):
                self._loads_first()
                self._copy(batch, begin, begin + step)
            self._finish(batch)

    def _next(self) -> CopyBatch | None:
        """The next batch; None once closing and empty."""
        with self._lock:
            while True:
                for queue in self._queues:
                    if queue:
                        self._taken.append(queue.popleft())
                        return self._taken[-1]
                if self._closing:
                    return None
                self._work.wait()

    def _loads_first(self) -> None:
        """Between two pieces of a store: every load that has come."""
        while True:
            with self._lock:
                if not self._queues[Direction.LOAD]:
                    return
                batch = self._queues[Direction.LOAD].popleft()
                self._taken.append(batch)
            self._load(batch)

    def _load(self, batch: CopyBatch) -> None:
        for number in range(batch.groups):
            self._copy(batch.group(number), 0, len(batch.sources))
            if batch.groups > 1 and number == batch.groups - 1 and batch.sums is not None:
                batch.sums[:] = checksums_at(batch.targets, batch.nbytes)
            complete_group(batch, number)
        self._finish(batch)

    def _copy(self, batch: CopyBatch, begin: int, end: int) -> None:
        nbytes, copy = batch.nbytes, self._copies[batch.direction]
        if batch.sums is not None and copy is copy_plain:
            batch.sums[begin:end] = copy_summed(batch.targets[begin:end], batch.sources[begin:end], nbytes)
            fault("copy.block")
            return
        sources, targets = batch.sources[begin:end].tolist(), batch.targets[begin:end].tolist()
        for source, target in zip(sources, targets, strict=True):
            copy(target, source, nbytes)
            fault("copy.block")

    def _finish(self, batch: CopyBatch) -> None:
        with self._lock:
            self._taken.remove(batch)
            self._waiting[batch.direction] -= len(batch.sources)
            self._copied[batch.direction] += len(batch.sources)
        complete(batch)
