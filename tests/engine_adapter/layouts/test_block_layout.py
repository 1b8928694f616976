"""Layouts as data: what a plan says, and that blocks come through any pair of layouts unchanged."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.layouts.block_layout import (
    Axis,
    BlockLayout,
    BlockShape,
    Conversion,
    Part,
    canonical,
    packed,
    plan,
    strided,
)
from engine_adapter.layouts.convert import copy_to_slot, host_copy
from engine_adapter.layouts.convert_torch import tensor_copy
from kvstore.errors import InvalidArgument
from kvstore.geometry import Geometry, LayerGroup

LAYER, KV, HEAD, TOKEN, DIM = Axis
SHAPE = BlockShape(layers=3, kv_heads=4, block_tokens=6, head_dim=8, element_bytes=4)


def vllm_cpu(shape: BlockShape, layer_offsets: list[int]) -> BlockLayout:
    """A tensor a layer, `[blocks, kv_heads, block_tokens, 2 * head_dim]`."""
    row = 2 * shape.head_dim * shape.element_bytes
    steps = {KV: row // 2, HEAD: shape.block_tokens * row, TOKEN: row, DIM: shape.element_bytes}
    return strided(shape, steps, layer_offsets=layer_offsets)


def elements(memory: np.ndarray, layout: BlockLayout) -> np.ndarray:
    """[layer, kv, head, token, dim, bytes] of the block that begins at `memory[-layout.lowest]`; one by one."""
    halves = []
    for kv in (0, 1):
        at = np.zeros((1,), dtype=np.int64)
        for offsets in layout.half(kv):
            at = (at[..., None] + offsets).reshape(*at.shape, -1)
        halves.append(at[0] - layout.lowest)
    whole = np.concatenate(halves, axis=1)
    return memory[whole[..., None] + np.arange(layout.shape.element_bytes)]


def span(layout: BlockLayout) -> np.ndarray:
    return np.zeros(layout.end - layout.lowest, dtype=np.uint8)


def converted(source: BlockLayout, target: BlockLayout, memory: np.ndarray) -> np.ndarray:
    """`memory` as a block of `target`, by the host's copy."""
    out = span(target)
    copy = host_copy(plan(source, target))
    copy(out.ctypes.data - target.lowest, memory.ctypes.data - source.lowest, 0)
    return out


def random_block(layout: BlockLayout, seed: int) -> np.ndarray:
    memory = span(layout)
    memory[:] = np.random.default_rng(seed).integers(0, 256, size=len(memory), dtype=np.uint8)
    return memory


@st.composite
def layouts(draw: st.DrawFn, shape: BlockShape) -> BlockLayout:
    """Any order of the axes, each perhaps in two, with gaps, perhaps with layers anywhere."""
    sizes = dict(zip(Axis, shape.sizes, strict=True))
    parts = {
        axis: draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0]))
        for axis, size in sizes.items()
        if size > 1 and draw(st.integers(0, 3)) == 0
    }
    layout = packed(shape, draw(st.permutations([*Axis, *parts])), parts=parts)
    if draw(st.integers(0, 3)) == 0:  # K, and behind all of it V in an order of its own
        orders = [packed(shape, (KV, *draw(st.permutations([LAYER, HEAD, TOKEN, DIM])))) for _ in "kv"]
        return BlockLayout(shape=shape, offsets=orders[0].offsets, values=orders[1].offsets)
    if draw(st.booleans()):
        return layout
    whole = layout.end  # each layer in a place of its own, in any order, also below the first
    places = draw(st.permutations(range(-1, shape.layers - 1)))
    offsets = list(layout.offsets)
    offsets[LAYER] = np.array([place * (whole + 8) for place in places], dtype=np.int64)
    return BlockLayout(shape=shape, offsets=tuple(offsets))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[BlockLayout, BlockLayout]:
    shape = BlockShape(
        layers=draw(st.integers(1, 4)),
        kv_heads=draw(st.sampled_from([1, 2, 3, 4, 8])),
        block_tokens=draw(st.sampled_from([1, 2, 8, 12])),
        head_dim=draw(st.sampled_from([1, 4, 6])),
        element_bytes=draw(st.sampled_from([1, 2, 4])),
    )
    return draw(layouts(shape)), draw(layouts(shape))


@settings(max_examples=120, deadline=None)
@given(pairs(), st.integers(0, 1 << 16))
def test_every_element_is_where_the_other_layout_has_it(
    pair: tuple[BlockLayout, BlockLayout], seed: int
) -> None:
    source, target = pair
    memory = random_block(source, seed)
    there = converted(source, target, memory)
    assert np.array_equal(elements(there, target), elements(memory, source))
    back = converted(target, source, there)
    assert np.array_equal(elements(back, source), elements(memory, source))


@pytest.mark.parametrize("heads_first", [True, False])
def test_the_bundled_engines_blocks_become_those_of_a_tensor_a_layer(heads_first: bool) -> None:
    """Against plain numpy on the whole array, so that the offsets themselves are judged."""
    memory = random_block(packed(SHAPE), 1)
    block = memory.view(np.float32).reshape(SHAPE.sizes)
    if heads_first:
        layer_bytes = SHAPE.payload_bytes // SHAPE.layers
        target = vllm_cpu(SHAPE, [layer * layer_bytes for layer in range(SHAPE.layers)])
        expected = np.concatenate([block[:, 0], block[:, 1]], axis=-1)  # [layer, head, token, 2 * dim]
    else:
        target = packed(SHAPE, (LAYER, KV, TOKEN, HEAD, DIM))
        expected = block.transpose(0, 1, 3, 2, 4)
    assert np.array_equal(
        converted(packed(SHAPE), target, memory), np.ascontiguousarray(expected).view(np.uint8).reshape(-1)
    )


def test_shards_are_whole_parts_of_the_block() -> None:
    group = LayerGroup(layers=3, kv_heads=4, head_dim=8, block_tokens=6)
    geometry = Geometry(groups=(group,), dtype="float32")
    memory = random_block(canonical(geometry), 2)
    block = memory.view(np.float32).reshape(SHAPE.sizes)
    expected = np.stack([block[:, :, :2], block[:, :, 2:]])
    shared = converted(canonical(geometry), canonical(geometry, shards=2), memory)
    assert np.array_equal(shared, expected.view(np.uint8).reshape(-1))


def only_part(conversion: Conversion) -> Part:
    (part,) = conversion.parts
    return part


def test_values_may_be_in_another_order_than_keys() -> None:
    """As vLLM's CPU backend keeps them for some instruction sets: K a row a dim, V a row a token."""
    half = SHAPE.block_tokens * SHAPE.head_dim * 4
    steps = {KV: half, HEAD: 2 * half, TOKEN: 4, DIM: SHAPE.block_tokens * 4}
    layer_offsets = [4096, 0, 16384]
    engine = strided(
        SHAPE, steps, layer_offsets=layer_offsets, value_steps={TOKEN: SHAPE.head_dim * 4, DIM: 4}
    )
    memory = random_block(packed(SHAPE), 5)
    block = memory.view(np.uint32).reshape(SHAPE.sizes)
    there = converted(packed(SHAPE), engine, memory)
    for layer, at in enumerate(layer_offsets):
        heads = there[at : at + SHAPE.kv_heads * 2 * half].view(np.uint32).reshape(SHAPE.kv_heads, 2, -1)
        assert np.array_equal(heads[:, 0], block[layer, 0].transpose(0, 2, 1).reshape(SHAPE.kv_heads, -1))
        assert np.array_equal(heads[:, 1], block[layer, 1].reshape(SHAPE.kv_heads, -1))
    assert len(plan(packed(SHAPE), engine).parts) == 2


def test_what_lies_together_in_both_is_one_piece() -> None:
    same = plan(packed(SHAPE), packed(SHAPE))
    assert same.is_one_piece
    assert only_part(same).loops == ()
    rows = only_part(plan(packed(SHAPE), packed(SHAPE, (LAYER, KV, TOKEN, HEAD, DIM))))
    assert rows.piece_bytes == SHAPE.head_dim * SHAPE.element_bytes
    assert (
        len(rows.loops) == 3
    )  # K and V lie one behind the other in every layer of both: one loop of 2 * layers
    layers_apart = strided(
        SHAPE,
        dict(zip(Axis, (0, 768, 192, 32, 4), strict=True)),
        layer_offsets=[10_000, 0, 50_000],
    )
    scattered = only_part(plan(packed(SHAPE), layers_apart))
    assert scattered.piece_bytes == SHAPE.payload_bytes // SHAPE.layers
    assert scattered.loops == ()
    assert scattered.target_starts.tolist() == [10_000, 0, 50_000]


def test_evenly_spread_layers_need_no_table() -> None:
    even = vllm_cpu(SHAPE, [0, 1 << 20, 2 << 20])
    assert len(only_part(plan(packed(SHAPE), even)).source_starts) == 1


def test_slots_get_no_bytes_of_others_behind_their_payload() -> None:
    """A slot is reused: what was behind the payload of its last block would reach disk and exports."""
    source = packed(SHAPE, (LAYER, KV, TOKEN, HEAD, DIM))
    memory = random_block(source, 3)
    slot_bytes = SHAPE.payload_bytes + 100
    slot = np.full(slot_bytes + 8, 7, dtype=np.uint8)
    copy_to_slot(source, packed(SHAPE))(slot.ctypes.data, memory.ctypes.data, slot_bytes)
    assert np.array_equal(elements(slot, packed(SHAPE)), elements(memory, source))
    assert not slot[SHAPE.payload_bytes : slot_bytes].any()
    assert (slot[slot_bytes:] == 7).all()


@settings(max_examples=50, deadline=None)
@given(pairs(), st.integers(0, 1 << 16))
def test_tensors_are_converted_as_host_memory_is(pair: tuple[BlockLayout, BlockLayout], seed: int) -> None:
    """torch copies the same pieces, on whatever device the tensors are."""
    source, target = pair
    memory, blocks = random_block(source, seed), 3
    sources = np.concatenate([memory, np.zeros(-len(memory) % 8, dtype=np.uint8)] * blocks)
    stride = -(-(target.end - target.lowest) // 8) * 8
    targets = torch.zeros(blocks * stride, dtype=torch.uint8)
    copy = tensor_copy(plan(source, target))
    for block in (2, 0, 1):
        at = block * (len(sources) // blocks) - source.lowest
        copy(targets, block * stride - target.lowest, torch.from_numpy(sources), at)
    expected = converted(source, target, memory)
    for block in range(blocks):
        got = targets.numpy()[block * stride :][: len(expected)]
        assert np.array_equal(elements(got, target), elements(expected, target))


def test_what_makes_no_sense_is_refused() -> None:
    other = BlockShape(layers=3, kv_heads=4, block_tokens=6, head_dim=8, element_bytes=2)
    with pytest.raises(InvalidArgument, match="are not blocks of"):
        plan(packed(SHAPE), packed(other))
    overlapping = strided(SHAPE, dict(zip(Axis, (768, 768, 192, 32, 4), strict=True)))
    for source, target in itertools.permutations([packed(SHAPE), overlapping]):
        with pytest.raises(InvalidArgument, match="share a byte"):
            plan(source, target)
    with pytest.raises(InvalidArgument, match="every axis once"):
        packed(SHAPE, (LAYER, KV, HEAD, TOKEN))
    with pytest.raises(InvalidArgument, match="every axis once"):
        packed(SHAPE, (HEAD, *Axis), parts={HEAD: 3})
    with pytest.raises(InvalidArgument, match="step for each axis"):
        strided(SHAPE, {KV: 4})
    with pytest.raises(InvalidArgument, match="payload first"):
        copy_to_slot(packed(SHAPE), vllm_cpu(SHAPE, [0, 1 << 20, 2 << 20]))
    with pytest.raises(InvalidArgument, match="at least 1"):
        BlockShape(layers=0, kv_heads=4, block_tokens=6, head_dim=8, element_bytes=2)
