"""Moves blocks between an engine's pages and DRAM slots by a copier: as they lie, or converted in host memory.

A ticket ends once, by `done` on a thread of the copier's: nothing touches the pages or the slots after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.copier import Copier, CopyBatch, Direction
from engine_adapter.external.pages import Copies, SharedLayer
from engine_adapter.layouts.block_layout import Axis, BlockLayout, BlockShape, packed, plan, strided
from engine_adapter.layouts.convert import BlockCopy, copy_to_slot, host_copy
from kvstore.errors import InvalidArgument, Unavailable

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
    failed: Callable[[], None]
    """In place of `done`: the copier has failed."""
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

        def failed() -> None:
            self._take(ticket)
            ticket.failed()

        batch = CopyBatch(
            direction=ticket.direction,
            sources=copies.slots if load else copies.pages,
            targets=copies.pages if load else copies.slots,
            nbytes=self._addresses.piece_bytes,
            done=ended,
            failed=failed,
            after=None if ticket.after is None else ticket.after.handle,
        )
        with self._lock:
            self._batches[id(ticket)] = batch
        try:
            if self._copier.submit(batch):
                return True
        except Unavailable:  # once and for all: not to be tried again
            failed()
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
        self._slot, self._page = _layouts(layers)

    def copies(self, pages: Pages, slots: U64) -> Copies:
        """See AddressMap."""
        blocks = pages[:, 0].astype(np.uint64)
        return Copies(
            pages=np.uint64(self._first.address) + blocks * np.uint64(self._first.block_stride), slots=slots
        )

    def load(self) -> BlockCopy:
        """From a slot into a page."""
        return host_copy(plan(self._slot, self._page))

    def store(self) -> BlockCopy:
        """From a page into a slot; what is behind the payload becomes zeros."""
        return copy_to_slot(self._page, self._slot)


def _layouts(layers: Sequence[SharedLayer]) -> tuple[BlockLayout, BlockLayout]:
    """Of a slot `[layer, K|V, head, token, dim]`, and of the engine's page, from the first layer's address on."""
    first = layers[0]
    heads, tokens, dims = first.shape
    shape = BlockShape(
        layers=len(layers), kv_heads=heads, block_tokens=tokens, head_dim=dims, element_bytes=first.itemsize
    )
    axes = (Axis.HEAD, Axis.TOKEN, Axis.DIM)
    page = strided(
        shape,
        {Axis.KV: first.value_offset - first.key_offset, **dict(zip(axes, first.key_strides, strict=True))},
        layer_offsets=[layer.address - first.address + first.key_offset for layer in layers],
        value_steps=dict(zip(axes, first.value_strides, strict=True)),
    )
    return packed(shape), page
