"""Moves blocks between an engine's pages and DRAM slots by a copier: as they lie, or converted in host memory.

A ticket ends once, by `done` on a thread of the copier's: nothing touches the pages or the slots after it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.block_convert import BlockCopy, host_copy
from engine_adapter.block_layout import Conversion, Loop
from engine_adapter.copier import Copier, CopyBatch, Direction
from engine_adapter.external.pages import Copies, SharedLayer
from kvstore.errors import InvalidArgument

__all__ = ["AddressMap", "BlockMover", "PieceMover", "SharedBlocks", "StepEvent", "Ticket"]

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


class AddressMap(Protocol):
    """Which copies blocks take. `PieceMap`: one a piece, as they lie; `SharedBlocks`: one a block."""

    @property
    def piece_bytes(self) -> int:
        """Of each copy, on the slot's side."""
        ...

    def copies(self, pages: Pages, slots: U64) -> Copies:
        """For blocks `pages` [b, groups] and this rank's parts of their slots, `slots` [b] addresses."""
        ...


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
    """By whatever copier the device has: piece by piece, or whole blocks by one that converts."""

    def __init__(self, addresses: AddressMap, copier: Copier) -> None:
        """The copier becomes ours."""
        self._addresses = addresses
        self._copier = copier
        self._batches: dict[int, CopyBatch] = {}  # of tickets under way, by identity
        self._lock = threading.Lock()

    def submit(self, ticket: Ticket) -> bool:
        """See BlockMover."""
        copies = self._addresses.copies(ticket.pages, ticket.slots)
        load = ticket.direction is Direction.LOAD

        def ended() -> None:
            self._take(ticket)
            ticket.done()

        batch = CopyBatch(
            direction=ticket.direction,
            sources=copies.slots if load else copies.pages,
            targets=copies.pages if load else copies.slots,
            nbytes=self._addresses.piece_bytes,
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


class SharedBlocks:
    """Blocks as the bundled engine has them, from pages that have each element elsewhere: in host memory."""

    def __init__(self, layers: Sequence[SharedLayer], slot_bytes: int) -> None:
        """`layers` have one shape, and one distance from block to block. Raises InvalidArgument where not."""
        first = layers[0]
        if len({replace(layer, address=0) for layer in layers}) != 1:
            raise InvalidArgument("layers that differ cannot be converted")
        self.piece_bytes = slot_bytes
        self._first = first
        self._payload_bytes = 2 * len(layers) * int(np.prod(first.shape)) * first.itemsize
        self._at = [layer.address - first.address for layer in layers]

    def copies(self, pages: Pages, slots: U64) -> Copies:
        """See AddressMap."""
        blocks = pages[:, 0].astype(np.uint64)
        return Copies(
            pages=np.uint64(self._first.address) + blocks * np.uint64(self._first.block_stride), slots=slots
        )

    def load(self) -> BlockCopy:
        """From a slot into a page."""
        halves = [host_copy(_turned(self._half(half))) for half in range(2)]
        return lambda target, source, nbytes: [copy(target, source, nbytes) for copy in halves]

    def store(self) -> BlockCopy:
        """From a page into a slot; what is behind the payload becomes zeros."""
        halves = [host_copy(self._half(half)) for half in range(2)]
        payload = self._payload_bytes

        def copy(target: int, source: int, nbytes: int) -> None:
            for half in halves:
                half(target, source, nbytes)
            if nbytes > payload:
                ctypes.memset(target + payload, 0, nbytes - payload)

        return copy

    def _half(self, half: int) -> Conversion:
        """From a page to the keys (0) or values (1) of a slot `[layer, K|V, head, token, dim]`."""
        layer, count = self._first, len(self._at)
        offset, steps = (
            (layer.key_offset, layer.key_strides) if half == 0 else (layer.value_offset, layer.value_strides)
        )
        heads, tokens, dims = layer.shape
        slot_steps = (tokens * dims * layer.itemsize, dims * layer.itemsize, layer.itemsize)
        half_bytes = heads * slot_steps[0]
        loops = [
            Loop(count=size, source_step=step, target_step=slot_step)
            for size, step, slot_step in zip(layer.shape, steps, slot_steps, strict=True)
        ]
        starts = np.array(self._at, dtype=np.int64) + offset
        slot_starts = np.arange(count, dtype=np.int64) * 2 * half_bytes + half * half_bytes
        apart = set(np.diff(starts).tolist())
        if len(apart) == 1 and min(apart) > 0:  # layers in one allocation: a loop more instead of a table
            loops.insert(0, Loop(count=count, source_step=apart.pop(), target_step=2 * half_bytes))
            starts, slot_starts = starts[:1], slot_starts[:1]
        return Conversion(
            piece_bytes=layer.itemsize,
            loops=tuple(loops),
            source_starts=starts,
            target_starts=slot_starts,
            payload_bytes=self._payload_bytes // 2,
        )


def _turned(conversion: Conversion) -> Conversion:
    """The way back."""
    return Conversion(
        piece_bytes=conversion.piece_bytes,
        loops=tuple(
            Loop(count=loop.count, source_step=loop.target_step, target_step=loop.source_step)
            for loop in conversion.loops
        ),
        source_starts=conversion.target_starts,
        target_starts=conversion.source_starts,
        payload_bytes=conversion.payload_bytes,
    )
