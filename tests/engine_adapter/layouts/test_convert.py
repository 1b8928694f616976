"""A copier between an engine's layout and the store's: batches of blocks that are converted on the way."""

import threading

import numpy as np

from engine_adapter.copying.copier import CopyBatch, Direction, TwinCopier
from engine_adapter.layouts.block_layout import Axis, BlockShape, packed, plan, strided
from engine_adapter.layouts.convert import copy_to_slot, host_copy

SHAPE = BlockShape(layers=3, kv_heads=2, block_tokens=4, head_dim=8, element_bytes=4)
BLOCKS, SLOT_BYTES = 5, 4096


def copied(copier: TwinCopier, direction: Direction, sources: np.ndarray, targets: np.ndarray) -> None:
    done = threading.Event()
    batch = CopyBatch(
        direction=direction,
        sources=sources.astype(np.uint64),
        targets=targets.astype(np.uint64),
        nbytes=SLOT_BYTES,
        done=done.set,
    )
    assert copier.submit(batch)
    assert done.wait(10)


def test_a_copier_converts_what_it_stores_and_loads() -> None:
    """The engine has a tensor a layer, `[blocks, heads, tokens, 2 * dim]`; slots have the store's layout."""
    rng = np.random.default_rng(4)
    tensors = rng.random((SHAPE.layers, BLOCKS, SHAPE.kv_heads, SHAPE.block_tokens, 2, 8), dtype=np.float32)
    before = tensors.copy()
    slots = np.full((BLOCKS, SLOT_BYTES), 9, dtype=np.uint8)
    row = 2 * SHAPE.head_dim * 4
    steps = {Axis.KV: row // 2, Axis.HEAD: SHAPE.block_tokens * row, Axis.TOKEN: row, Axis.DIM: 4}
    engine = strided(SHAPE, steps, layer_offsets=[layer * tensors[0].nbytes for layer in range(SHAPE.layers)])
    copier = TwinCopier(
        load=host_copy(plan(packed(SHAPE), engine)), store=copy_to_slot(engine, packed(SHAPE))
    )
    try:
        pages = tensors.ctypes.data + np.array([4, 0, 3]) * tensors[0, 0].nbytes
        places = slots.ctypes.data + np.array([1, 2, 4]) * SLOT_BYTES
        copied(copier, Direction.STORE, pages, places)
        for slot, page in ((1, 4), (2, 0), (4, 3)):
            stored = slots[slot, : SHAPE.payload_bytes].view(np.float32).reshape(SHAPE.sizes)
            assert np.array_equal(stored, before[:, page].transpose(0, 3, 1, 2, 4))
            assert not slots[slot, SHAPE.payload_bytes :].any()
        assert (slots[[0, 3]] == 9).all()
        tensors[:, [0, 3, 4]] = 0
        copied(copier, Direction.LOAD, places, pages)
        assert np.array_equal(tensors, before)
    finally:
        copier.close()
