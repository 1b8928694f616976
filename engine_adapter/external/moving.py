"""Moves blocks between an engine's pages and DRAM slots: as they lie, by a copier, or converted, in host memory.

A ticket ends once, by `done` on a thread of the mover's: nothing touches the pages or the slots after it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from engine_adapter.copier import Copier, CopyBatch, Direction
from engine_adapter.external.pages import PieceMap, SharedLayer

__all__ = ["BlockMover", "ConvertingMover", "PieceMover", "StepEvent", "Ticket"]

_LOG = logging.getLogger("kvstore.copier")
_MAX_WAITING_BLOCKS = 4096
_UINTS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Pages = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEvent:
    """A CUDA event that has to come before a copy; `owner` keeps it alive."""

    handle: int
    owner: object


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """Blocks on their way."""

    direction: Direction
    pages: Pages  # [n, groups]
    slots: U64  # [n] addresses of this rank's parts
    done: Callable[[], None]
    after: StepEvent | None = None


class BlockMover(Protocol):
    """One thread submits and cancels."""

    def submit(self, ticket: Ticket) -> bool:
        """Takes a ticket, or returns False where too much is under way: try again later."""
        ...

    def cancel(self, ticket: Ticket) -> bool:
        """Takes it back. True: nothing of it is copied, and `done` is never called."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finishes what was taken and ends."""
        ...


class PieceMover:
    """Native: every piece is a plain copy, by whatever copier the device has."""

    def __init__(self, pieces: PieceMap, copier: Copier) -> None:
        """The copier becomes ours."""
        self._pieces = pieces
        self._copier = copier
        self._batches: dict[int, CopyBatch] = {}  # of tickets under way, by identity
        self._lock = threading.Lock()

    def submit(self, ticket: Ticket) -> bool:
        """See BlockMover."""
        copies = self._pieces.copies(ticket.pages, ticket.slots)
        load = ticket.direction is Direction.LOAD

        def ended() -> None:
            self._take(ticket)
            ticket.done()

        batch = CopyBatch(
            direction=ticket.direction,
            sources=copies.slots if load else copies.pages,
            targets=copies.pages if load else copies.slots,
            nbytes=self._pieces.piece_bytes,
            done=ended,
            after=None if ticket.after is None else ticket.after.handle,
        )
        with self._lock:
            self._batches[id(ticket)] = batch
        if self._copier.submit(batch):
            return True
        self._take(ticket)
        return False

    def cancel(self, ticket: Ticket) -> bool:
        """See BlockMover."""
        with self._lock:
            batch = self._batches.get(id(ticket))
        cancelled = batch is not None and self._copier.cancel(batch)
        if cancelled:
            self._take(ticket)
        return cancelled

    def close(self, timeout_s: float) -> None:
        """See BlockMover."""
        self._copier.close(timeout_s)

    def _take(self, ticket: Ticket) -> None:
        with self._lock:
            self._batches.pop(id(ticket), None)


class ConvertingMover:
    """Shared, in host memory: a thread reads and writes elements where each side has them."""

    def __init__(self, layers: Sequence[SharedLayer]) -> None:
        """`layers` have one shape, their elements one size."""
        self._layers = _Stack(layers)
        self._work = threading.Condition()
        self._queues: tuple[deque[Ticket], deque[Ticket]] = (deque(), deque())
        self._waiting = [0, 0]
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-copier", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> bool:
        """See BlockMover."""
        blocks = len(ticket.pages)
        with self._work:
            waiting = self._waiting[ticket.direction]
            if self._closing or (waiting and waiting + blocks > _MAX_WAITING_BLOCKS):
                return False
            self._waiting[ticket.direction] += blocks
            self._queues[ticket.direction].append(ticket)
            self._work.notify()
        return True

    def cancel(self, ticket: Ticket) -> bool:
        """See BlockMover."""
        with self._work:
            queue = self._queues[ticket.direction]
            if ticket not in queue:
                return False
            queue.remove(ticket)
            self._waiting[ticket.direction] -= len(ticket.pages)
        return True

    def close(self, timeout_s: float) -> None:
        """See BlockMover."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            for page, slot in zip(ticket.pages[:, 0].tolist(), ticket.slots.tolist(), strict=True):
                self._layers.move(ticket.direction, page, slot)
            with self._work:
                self._waiting[ticket.direction] -= len(ticket.pages)
            try:
                ticket.done()
            except Exception:  # noqa: BLE001 (a thread's boundary)
                _LOG.exception("a completion failed")

    def _next(self) -> Ticket | None:
        with self._work:
            while True:
                for queue in self._queues:
                    if queue:
                        return queue.popleft()
                if self._closing:
                    return None
                self._work.wait()


class _Stack:
    """The layers of an engine as one strided array where they lie evenly apart, as they do in one allocation."""

    def __init__(self, layers: Sequence[SharedLayer]) -> None:
        first = layers[0]
        self._layers = layers
        self._dtype = _UINTS[first.itemsize]
        self._slot_shape = (len(layers), 2, *first.shape)
        self._nbytes = 2 * len(layers) * int(np.prod(first.shape)) * first.itemsize
        steps = {later.address - layer.address for layer, later in pairwise(layers)}
        alike = len({replace(layer, address=0) for layer in layers}) == 1
        self._step = steps.pop() if alike and len(steps) == 1 else None

    def move(self, direction: Direction, page: int, slot: int) -> None:
        """One block, either way."""
        shared = np.frombuffer(_memory(slot, self._nbytes), dtype=self._dtype).reshape(self._slot_shape)
        if self._step is not None:
            self._copy(direction, self._layers[0], page, shared, ((len(self._layers), self._step),))
            return
        for layer, slot_layer in zip(self._layers, shared, strict=True):
            self._copy(direction, layer, page, slot_layer[None], ((1, 0),))

    def _copy(
        self,
        direction: Direction,
        layer: SharedLayer,
        page: int,
        shared: NDArray[np.generic],
        outer: tuple[tuple[int, int]],
    ) -> None:
        """`shared`: [layers, K|V, head, token, dim]; `outer`: how many layers, and bytes from one to the next."""
        (count, step), base = outer[0], layer.address + page * layer.block_stride
        for half, (offset, strides) in enumerate(
            ((layer.key_offset, layer.key_strides), (layer.value_offset, layer.value_strides))
        ):
            engine = _strided(base + offset, self._dtype, (count, *layer.shape), (step, *strides))
            if direction is Direction.LOAD:
                np.copyto(engine, shared[:, half])
            else:
                np.copyto(shared[:, half], engine)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _strided(
    address: int, dtype: type[np.unsignedinteger[Any]], shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[np.generic]:
    """Memory at an address, which stays its owner's."""
    nbytes = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    whole = np.frombuffer(_memory(address, nbytes + np.dtype(dtype).itemsize), dtype=dtype)
    return as_strided(whole, shape=shape, strides=strides, writeable=True)
