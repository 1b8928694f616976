"""Where the bytes of a block lie in an engine's own tensors, and what of them goes into a DRAM slot. Pure numpy.

Native: a slot holds the bytes as they lie, piece by piece: nothing is converted, and only an engine with the same
layout can read it. Shared: a slot is `[layer, K|V, kv_head, token, head_dim]`, as the bundled engine has it
(kvstore/geometry.py), and each layer says by strides where its elements are.

A rank's part of a block is the pieces of all its layers, one behind the other; a slot has the parts of all ranks, in
their order, each rounded up to 4 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument
from kvstore.geometry import SLOT_ALIGN_BYTES

__all__ = ["Copies", "Dimension", "LayerPages", "PieceMap", "SharedLayer", "part_bytes"]

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One axis of a block; `stride` in bytes. `name` is what the engine calls it."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """The pages of one layer: block `b` begins at `address + b * block_stride`."""

    group: int  # of the engine's block tables
    address: int
    block_stride: int
    itemsize: int
    dimensions: tuple[Dimension, ...]

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return self.itemsize * prod(dimension.size for dimension in self.dimensions)

    @property
    def order(self) -> str:
        """What a native slot is like: axes from the outermost in memory to the innermost."""
        axes = " ".join(f"{axis.name}{axis.size}" for axis in self._outermost_first())
        return f"{axes} x{self.itemsize}"

    def pieces(self) -> tuple[list[int], int]:
        """Offsets of the contiguous pieces of a block, in the order of `order`, and their size."""
        size, outer = self.itemsize, self._outermost_first()
        while outer and outer[-1].stride == size:
            size *= outer.pop().size
        offsets = [0]
        for axis in outer:
            offsets = [offset + at * axis.stride for offset in offsets for at in range(axis.size)]
        return offsets, size

    def _outermost_first(self) -> list[Dimension]:
        axes = [axis for axis in self.dimensions if axis.size > 1]
        return sorted(axes, key=lambda axis: axis.stride, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """[n] addresses on both sides."""

    pages: U64
    slots: U64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayer:
    """Where element (head, token, dim) of a block's K and V is: offset + the three strides, in bytes."""

    address: int
    block_stride: int
    itemsize: int
    shape: tuple[int, int, int]  # heads, tokens, head_dim
    key_offset: int
    key_strides: tuple[int, int, int]
    value_offset: int
    value_strides: tuple[int, int, int]


def part_bytes(payload_bytes: int) -> int:
    """Bytes of a rank's part of a slot."""
    return -(-payload_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class PieceMap:
    """Addresses of the pieces of blocks, native. All pieces have one size, the largest that divides each."""

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        """Raises InvalidArgument for no layers."""
        if not layers:
            raise InvalidArgument("there is no layer whose pages could be kept")
        self.order = "; ".join(dict.fromkeys(layer.order for layer in layers))
        self.payload_bytes = sum(layer.nbytes for layer in layers)
        merged = _merged(_pieces(layers))
        self.piece_bytes = gcd(*(piece.size for piece in merged))
        cut = [(piece, at) for piece in merged for at in range(0, piece.size, self.piece_bytes)]
        self._groups = np.array([piece.group for piece, _ in cut], dtype=np.intp)
        self._addresses: U64 = np.array([piece.address + at for piece, at in cut], dtype=np.uint64)
        self._strides: U64 = np.array([piece.stride for piece, _ in cut], dtype=np.uint64)
        self._offsets: U64 = np.array([piece.offset + at for piece, at in cut], dtype=np.uint64)

    def __len__(self) -> int:
        """Pieces of a block."""
        return len(self._addresses)

    def copies(self, pages: NDArray[np.int64], slots: U64) -> Copies:
        """For blocks `pages` [b, groups] and this rank's parts of their slots, `slots` [b] addresses.

        Pieces of a group whose page is 0, the engine's null block, are left out.
        """
        blocks = pages[:, self._groups].astype(np.uint64)  # [b, p]
        in_pages = (self._addresses + blocks * self._strides).reshape(-1)
        in_slots = (slots[:, None] + self._offsets).reshape(-1)
        real = blocks.reshape(-1) != 0
        if not real.all():
            in_pages, in_slots = in_pages[real], in_slots[real]
        return Copies(pages=in_pages, slots=in_slots)


@dataclass(slots=True)
class _Piece:
    group: int
    address: int
    stride: int
    offset: int  # in a rank's part of a slot
    size: int


def _pieces(layers: Sequence[LayerPages]) -> list[_Piece]:
    found, offset = [], 0
    for layer in layers:
        offsets, size = layer.pieces()
        for at in offsets:
            found.append(_Piece(layer.group, layer.address + at, layer.block_stride, offset, size))
            offset += size
    return found


def _merged(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Neighbours in the tensors are one piece: in a block-major layout all layers of a block are."""
    found: list[_Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            last is not None
            and last.address + last.size == piece.address
            and (last.group, last.stride) == (piece.group, piece.stride)
            and last.size + piece.size <= piece.stride
        ):
            last.size += piece.size
        else:
            found.append(piece)
    return found
