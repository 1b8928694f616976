"""Where the KV of a block lies, as data, and how a block of one layout becomes a block of another. Pure numpy.

A block is the KV of some tokens: elements (layer, K|V, kv head, token, dim). A layout says at which byte each of them
is, as a sum of one offset an axis, counted from the block's address. That covers what engines do: any order of the
axes, another one for V than for K, gaps, K and V beside each other, heads in the parts of several devices, and layers
in allocations of their own. Element type, model and block size are never converted: other shapes do not meet.

    the store, bundled engine      packed(shape, (LAYER, KV, HEAD, TOKEN, DIM))
    its blocks shared by n devices packed(shape, (HEAD, LAYER, KV, HEAD, TOKEN, DIM), parts={HEAD: n})
    NHD                            packed(shape, (LAYER, KV, TOKEN, HEAD, DIM))
    a tensor a layer               strided(shape, {…}, layer_offsets=[…])

`plan` finds what lies together in both layouts: the largest contiguous piece, loops of pieces with constant steps, and
a table of starts for the rest. Who copies (`convert`, `convert_torch`) knows of nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument
from kvstore.geometry import DTYPE_BYTES, Geometry

__all__ = [
    "Axis",
    "BlockLayout",
    "BlockShape",
    "Conversion",
    "Loop",
    "Part",
    "canonical",
    "packed",
    "plan",
    "strided",
]

I64 = NDArray[np.int64]


class Axis(enum.IntEnum):
    """The axes of a block."""

    LAYER = 0
    KV = 1
    """K, then V."""
    HEAD = 2
    TOKEN = 3
    DIM = 4


_CANONICAL = (Axis.LAYER, Axis.KV, Axis.HEAD, Axis.TOKEN, Axis.DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """How many elements a block has along each axis, and the bytes of one."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        if min(*self.sizes, self.element_bytes) < 1:
            raise InvalidArgument(f"every size of a block is at least 1: {self}")

    @classmethod
    def of(cls, geometry: Geometry) -> BlockShape:
        """The shape of a geometry's blocks."""
        group = geometry.groups[0]
        return cls(
            layers=group.layers,
            kv_heads=group.kv_heads,
            block_tokens=group.block_tokens,
            head_dim=group.head_dim,
            element_bytes=DTYPE_BYTES[geometry.dtype],
        )

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Elements along each `Axis`."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all elements."""
        return int(np.prod(self.sizes)) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLayout:
    """The byte of each element: `sum(offsets[axis][i_axis])` from the block's address on.

    `values`: the same for V where V is in another order than K; then `offsets` are K's, and both have each their place
    along `Axis.KV`.
    """

    shape: BlockShape
    offsets: tuple[I64, ...]  # one an Axis, [size of that axis]
    values: tuple[I64, ...] | None = None

    def __post_init__(self) -> None:
        for offsets in (self.offsets, self.offsets if self.values is None else self.values):
            if tuple(len(part) for part in offsets) != self.shape.sizes:
                raise InvalidArgument("a layout has one offset for each element of an axis")

    def half(self, kv: int) -> tuple[I64, ...]:
        """As `offsets`, of K (0) or V (1) alone."""
        offsets = self.offsets if kv == 0 or self.values is None else self.values
        return tuple(part[kv : kv + 1] if axis == Axis.KV else part for axis, part in enumerate(offsets))

    @property
    def lowest(self) -> int:
        """First byte from the block's address on; below 0 where a layer lies before it."""
        return min(int(sum(part.min() for part in self.half(kv))) for kv in (0, 1))

    @property
    def end(self) -> int:
        """Byte behind the last one, from the block's address on."""
        ends = (int(sum(part.max() for part in self.half(kv))) for kv in (0, 1))
        return max(ends) + self.shape.element_bytes


def packed(
    shape: BlockShape, order: Sequence[Axis] = _CANONICAL, *, parts: Mapping[Axis, int] | None = None
) -> BlockLayout:
    """All elements without gaps, the last axis of `order` innermost.

    An axis that `order` names twice is cut into `parts[axis]` equal parts: its first place counts the parts, its second
    the elements of one. Raises: InvalidArgument for axes that are missing, or that cannot be cut so.
    """
    parts = parts or {}
    inner = {axis: shape.sizes[axis] // parts.get(axis, 1) for axis in Axis}
    expected = sorted([*Axis, *parts])
    if sorted(order) != expected or any(
        inner[axis] * count != shape.sizes[axis] for axis, count in parts.items()
    ):
        raise InvalidArgument(
            f"a packed layout names every axis once, and one that is cut into equal parts twice, not {list(order)}"
        )
    offsets = [np.zeros(size, dtype=np.int64) for size in shape.sizes]
    step, seen = shape.element_bytes, set[Axis]()
    for axis in reversed(order):
        index = np.arange(shape.sizes[axis], dtype=np.int64)
        if axis in seen:
            index, count = index // inner[axis], parts[axis]
        else:
            index, count = index % inner[axis], inner[axis]
        offsets[axis] += index * step
        step *= count
        seen.add(axis)
    return BlockLayout(shape=shape, offsets=tuple(offsets))


def canonical(geometry: Geometry, *, shards: int = 1) -> BlockLayout:
    """What the store has: kvstore/geometry.py; of a block that `shards` devices share, their parts one by one."""
    shape = BlockShape.of(geometry)
    if shards == 1:
        return packed(shape)
    return packed(shape, (Axis.HEAD, *_CANONICAL), parts={Axis.HEAD: shards})


def strided(
    shape: BlockShape,
    steps: Mapping[Axis, int],
    *,
    layer_offsets: Sequence[int] | None = None,
    value_steps: Mapping[Axis, int] | None = None,
) -> BlockLayout:
    """Constant steps in bytes along each axis; of layers in tensors of their own `layer_offsets`, bytes from the
    block's address to each. `value_steps`: those of V that are not K's. Raises: InvalidArgument where one is missing.
    """
    steps = dict(steps)
    if layer_offsets is not None:
        steps[Axis.LAYER] = 0
    if set(steps) != set(Axis):
        raise InvalidArgument("a strided layout has a step for each axis")

    def offsets(of: Mapping[Axis, int]) -> tuple[I64, ...]:
        found = [
            np.arange(size, dtype=np.int64) * of[axis] for axis, size in zip(Axis, shape.sizes, strict=True)
        ]
        if layer_offsets is not None:
            found[Axis.LAYER] = np.asarray(layer_offsets, dtype=np.int64)
        return tuple(found)

    values = None if value_steps is None else offsets({**steps, **value_steps})
    return BlockLayout(shape=shape, offsets=offsets(steps), values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`count` equal things, `source_step` bytes apart where they come from, `target_step` where they go; both > 0."""

    count: int
    source_step: int
    target_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """For each start, all loops nested: `target + target_starts[i] + …` takes `piece_bytes` at `source +
    source_starts[i] + …`.
    """

    piece_bytes: int
    loops: tuple[Loop, ...]  # outermost first
    source_starts: I64  # [n]
    target_starts: I64  # [n]

    @property
    def word_bytes(self) -> int:
        """The largest power of two up to 8 that divides a piece and every step and start."""
        every = [self.piece_bytes, *self.source_starts.tolist(), *self.target_starts.tolist()]
        every += [step for loop in self.loops for step in (loop.source_step, loop.target_step)]
        return int(np.gcd.reduce(np.abs(np.array([8, *every], dtype=np.int64))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """The copies that turn a block of one layout into one of another: one part, or one for K and one for V.

    No two pieces overlap, in neither layout.
    """

    parts: tuple[Part, ...]
    payload_bytes: int

    @property
    def is_one_piece(self) -> bool:
        """Both layouts are the same bytes in the same order: a plain copy."""
        return self.parts[0].piece_bytes == self.payload_bytes


def plan(source: BlockLayout, target: BlockLayout) -> Conversion:
    """How a block of `source` becomes one of `target`; the way back is `plan(target, source)`.

    O(elements / head_dim) time once, nothing a block. Raises: InvalidArgument where the shapes differ, or two elements
    of one layout share a byte.
    """
    if source.shape != target.shape:
        raise InvalidArgument(f"blocks of {source.shape} are not blocks of {target.shape}")
    element_bytes = source.shape.element_bytes
    if source.values is None and target.values is None:
        parts = [_part(element_bytes, source.offsets, target.offsets)]
    else:
        parts = [_part(element_bytes, source.half(kv), target.half(kv)) for kv in (0, 1)]
    _require_apart(parts)
    return Conversion(parts=tuple(parts), payload_bytes=source.shape.payload_bytes)


def _part(element_bytes: int, source: Sequence[I64], target: Sequence[I64]) -> Part:
    loops: list[Loop] = []
    starts = np.zeros((1, 2), dtype=np.int64)
    for axis in Axis:
        found, table = _loops(np.stack([source[axis], target[axis]], axis=1))
        loops += found
        starts = (starts[:, None, :] + table[None, :, :]).reshape(-1, 2)
    piece, loops = _merged(element_bytes, loops)
    return Part(
        piece_bytes=piece,
        loops=tuple(loops),
        source_starts=starts[:, 0].copy(),
        target_starts=starts[:, 1].copy(),
    )


def _loops(offsets: I64) -> tuple[list[Loop], I64]:
    """One axis [n, 2] as loops with constant steps in both layouts, outermost first, and a table [m, 2] of the rest."""
    loops: list[Loop] = []
    while len(offsets) > 1:
        count = _regular(offsets)
        source_step, target_step = (offsets[1] - offsets[0]).tolist()
        if count == 1 or min(source_step, target_step) < 0:  # torch has no views that go backwards
            break
        loops.insert(0, Loop(count=count, source_step=source_step, target_step=target_step))
        offsets = offsets[::count]
    return loops, offsets


def _regular(offsets: I64) -> int:
    """The largest length that divides [n, 2] into runs with the same constant steps."""
    steps = np.diff(offsets, axis=0)
    ends = np.flatnonzero((steps != steps[0]).any(axis=1)) + 1  # where a run must end
    return int(np.gcd.reduce(np.append(ends, len(offsets))))


def _merged(piece: int, loops: list[Loop]) -> tuple[int, list[Loop]]:
    """Loops that lie one inside the other in both layouts become one, and what is contiguous a larger piece."""
    left = [loop for loop in loops if loop.count > 1]
    grown = True
    while grown:
        grown = False
        for loop in left:
            if loop.source_step == loop.target_step == piece:
                piece *= loop.count
                left.remove(loop)
                grown = True
                break
    left.sort(key=lambda loop: -abs(loop.target_step))
    merged: list[Loop] = []
    for inner in reversed(left):
        outer = merged[0] if merged else None
        if (
            outer is not None
            and inner.source_step == outer.source_step * outer.count
            and inner.target_step == outer.target_step * outer.count
        ):
            merged[0] = Loop(
                count=inner.count * outer.count, source_step=outer.source_step, target_step=outer.target_step
            )
        else:
            merged.insert(0, inner)
    return piece, merged


def _require_apart(parts: Sequence[Part]) -> None:
    for side in ("source", "target"):
        begins, ends = [], []
        for part in parts:
            every: I64 = getattr(part, f"{side}_starts")
            for loop in part.loops:
                steps = np.arange(loop.count, dtype=np.int64) * getattr(loop, f"{side}_step")
                every = (every[:, None] + steps[None, :]).reshape(-1)
            begins.append(every)
            ends.append(every + part.piece_bytes)
        if (np.sort(np.concatenate(begins))[1:] < np.sort(np.concatenate(ends))[:-1]).any():
            raise InvalidArgument("two elements of a block share a byte in this layout")
