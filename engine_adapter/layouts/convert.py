"""Carries out a `Conversion` in host memory: blocks at addresses, one or a few numpy copies each, without the GIL.

Owns no memory: whoever calls vouches for the addresses. Thread-safe. ARCHITECTURE.md ("Blocks in other
layouts") has what it costs: between a third of a plain copy's rate, where K is transposed, and all of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_adapter.layouts.block_layout import BlockLayout, Conversion, Part, plan
from kvstore.errors import InvalidArgument

__all__ = ["BlockCopy", "copy_plain", "copy_to_slot", "host_copy"]

BlockCopy: TypeAlias = Callable[[int, int, int], object]
"""Copies one block: (target address, source address, bytes of the store's slot)."""

copy_plain: BlockCopy = ctypes.memmove
"""For layouts that are alike. A foreign call: it releases the GIL."""


def host_copy(conversion: Conversion) -> BlockCopy:
    """The copy of blocks in host memory that a conversion says."""
    copies = [_copy_of(part) for part in conversion.parts]
    if len(copies) == 1:
        return copies[0]

    def copy_all(target: int, source: int, slot_bytes: int) -> None:
        for copy in copies:
            copy(target, source, slot_bytes)

    return copy_all


def _copy_of(part: Part) -> BlockCopy:
    if part.loops or len(part.source_starts) > 1:
        return _Strided(part)
    nbytes, source_at, target_at = part.piece_bytes, int(part.source_starts[0]), int(part.target_starts[0])

    def copy_piece(target: int, source: int, _: int) -> None:
        ctypes.memmove(target + target_at, source + source_at, nbytes)

    return copy_piece


def copy_to_slot(source: BlockLayout, slot: BlockLayout) -> BlockCopy:
    """As `host_copy`, for a slot of the store: what is behind the payload becomes zeros, never old bytes of others."""
    copy, end = host_copy(plan(source, slot)), slot.end
    if slot.lowest != 0 or end != slot.shape.payload_bytes:
        raise InvalidArgument("a slot has its payload first and without gaps")

    def copy_and_clear(target: int, source: int, slot_bytes: int) -> None:
        copy(target, source, slot_bytes)
        if slot_bytes > end:
            ctypes.memset(target + end, 0, slot_bytes - end)

    return copy_and_clear


class _Strided:
    """Pieces in loops: one view a side, of machine words, for each start."""

    __slots__ = ("_shape", "_source_steps", "_starts", "_target_steps", "_typestr")

    def __init__(self, part: Part) -> None:
        word = part.word_bytes
        counts = tuple(loop.count for loop in part.loops)
        self._typestr = f"|u{word}" if word == 1 else f"<u{word}"
        self._shape = (*counts, part.piece_bytes // word)
        self._source_steps = (*(loop.source_step for loop in part.loops), word)
        self._target_steps = (*(loop.target_step for loop in part.loops), word)
        self._starts = list(zip(part.source_starts.tolist(), part.target_starts.tolist(), strict=True))

    def __call__(self, target: int, source: int, _: int) -> None:
        for source_start, target_start in self._starts:
            np.copyto(
                self._view(target + target_start, self._target_steps),
                self._view(source + source_start, self._source_steps),
            )

    def _view(self, address: int, steps: tuple[int, ...]) -> NDArray[np.unsignedinteger]:
        return np.asarray(_At(address, self._shape, steps, self._typestr))


class _At:
    """What numpy views uncopied at an address."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], steps: tuple[int, ...], typestr: str) -> None:
        self.__array_interface__ = {
            "shape": shape,
            "strides": steps,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }
