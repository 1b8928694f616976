"""Blocks of any layout, as they lie and converted, there and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copying.copier import Direction, TwinCopier
from engine_adapter.external.moving import BlockMover, PieceMover, SharedBlocks, Ticket
from engine_adapter.external.pages import Dimension, LayerPages, PieceMap, SharedLayer, part_bytes
from kvstore.errors import InvalidArgument
from kvstore.geometry import Geometry, LayerGroup

L, B, H, N, C = 3, 5, 2, 4, 6  # layers, blocks, heads, tokens, content: K of 3 and V of 3
LAYOUTS = {  # physical order of the axes (layer, block, head, token, content), as vLLM names them
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
PIECES = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 6}


def cache(layout: str) -> NDArray[np.uint16]:
    """`[layer, block, head, token, content]`, each element another, in this order of memory."""
    order = LAYOUTS[layout]
    sizes = (L, B, H, N, C)
    memory = np.zeros([sizes[axis] for axis in order], dtype=np.uint16)
    view = memory.transpose(np.argsort(order))
    view[...] = np.arange(L * B * H * N * C, dtype=np.uint16).reshape(sizes)
    return view


def layers_of(view: NDArray[np.uint16], groups: Sequence[int] = (0, 0, 0)) -> list[LayerPages]:
    return [
        LayerPages(
            group=group,
            address=int(layer.ctypes.data),
            block_stride=layer.strides[0],
            itemsize=2,
            dimensions=tuple(
                Dimension(name=name, size=size, stride=stride)
                for name, size, stride in zip("HNC", layer.shape[1:], layer.strides[1:], strict=True)
            ),
        )
        for layer, group in zip(view, groups, strict=True)
    ]


def shared_of(view: NDArray[np.uint16]) -> list[SharedLayer]:
    half = C // 2
    return [
        SharedLayer(
            address=int(layer.ctypes.data),
            block_stride=layer.strides[0],
            itemsize=2,
            shape=(H, N, half),
            key_offset=0,
            key_strides=(layer.strides[1], layer.strides[2], 2),
            value_offset=half * 2,
            value_strides=(layer.strides[1], layer.strides[2], 2),
        )
        for layer in view
    ]


def move(mover: BlockMover, direction: Direction, pages: list[int], slots: NDArray[np.uint8]) -> None:
    """Blocks of group 0 to or from rows of `slots`; waits."""
    done = threading.Event()
    addresses = np.array([row.ctypes.data for row in slots], dtype=np.uint64)
    table = np.array(pages, dtype=np.int64).reshape(len(pages), -1)
    assert mover.submit(Ticket(direction, table, addresses, done.set, pytest.fail))
    assert done.wait(10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_they_lie_there_and_back(layout: str) -> None:
    view = cache(layout)
    pieces = PieceMap(layers_of(view))
    assert len(pieces) == PIECES[layout]
    assert pieces.payload_bytes == L * H * N * C * 2
    mover = PieceMover(pieces, TwinCopier())
    slots = np.zeros((2, part_bytes(pieces.payload_bytes)), dtype=np.uint8)
    try:
        before = view.copy()
        move(mover, Direction.STORE, [1, 4], slots)
        view[:, [2, 3]] = 0
        move(mover, Direction.LOAD, [2, 3], slots)
    finally:
        mover.close(5)
    assert np.array_equal(view[:, [2, 3]], before[:, [1, 4]])
    assert np.array_equal(view[:, [0, 1, 4]], before[:, [0, 1, 4]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_converted_it_is_what_the_bundled_engine_has(layout: str) -> None:
    view = cache(layout)
    group = LayerGroup(layers=L, kv_heads=H, head_dim=C // 2, block_tokens=N)
    geometry = Geometry(groups=(group,), dtype="float16")
    blocks = SharedBlocks(shared_of(view), geometry.slot_bytes)
    mover = PieceMover(blocks, TwinCopier(load=blocks.load(), store=blocks.store()))
    slots = np.full((2, geometry.slot_bytes), 255, dtype=np.uint8)
    try:
        before = view.copy()
        move(mover, Direction.STORE, [1, 4], slots)
        payload = slots[:, : geometry.payload_bytes].view(np.uint16).reshape(2, L, 2, H, N, C // 2)
        assert np.array_equal(payload[:, :, 0], before[:, [1, 4], :, :, : C // 2].swapaxes(0, 1))
        assert np.array_equal(payload[:, :, 1], before[:, [1, 4], :, :, C // 2 :].swapaxes(0, 1))
        assert not slots[:, geometry.payload_bytes :].any()  # never what another block left there
        view[:, [2, 3]] = 0
        move(mover, Direction.LOAD, [2, 3], slots)
    finally:
        mover.close(5)
    assert np.array_equal(view[:, [2, 3]], before[:, [1, 4]])


def test_the_order_names_the_layout() -> None:
    orders = {PieceMap(layers_of(cache(layout))).order for layout in LAYOUTS}
    assert orders == {"H2 N4 C6 x2", "N4 H2 C6 x2"}


def test_pages_that_a_group_has_let_go_of_are_left_out() -> None:
    view = cache("LBHNC")
    pieces = PieceMap(layers_of(view, groups=(0, 1, 0)))
    slots = np.array([1 << 20, 2 << 20], dtype=np.uint64)
    copies = pieces.copies(np.array([[1, 2], [3, 0]], dtype=np.int64), slots)
    assert len(copies.pages) == 5
    assert copies.pages[1] == view[1, 2].ctypes.data
    assert copies.slots.tolist() == [(1 << 20) + at for at in (0, 96, 192)] + [
        (2 << 20) + at for at in (0, 192)
    ]


def test_kernel_blocks_within_a_block() -> None:
    """A backend with smaller blocks than the scheduler: each block is two of the kernel's, side by side."""
    memory = np.arange(4 * 2 * H * 2 * C, dtype=np.uint16).reshape(
        8, H, 2, C
    )  # [kernel block, head, token, content]
    layer = LayerPages(
        group=0,
        address=int(memory.ctypes.data),
        block_stride=2 * memory.strides[0],
        itemsize=2,
        dimensions=(
            Dimension(name="b", size=2, stride=memory.strides[0]),
            *(
                Dimension(name=name, size=size, stride=stride)
                for name, size, stride in zip("HNC", memory.shape[1:], memory.strides[1:], strict=True)
            ),
        ),
    )
    pieces = PieceMap([layer])
    assert (len(pieces), pieces.piece_bytes) == (1, 2 * memory.strides[0])


def test_layers_of_several_sizes_are_cut_alike() -> None:
    memory = np.zeros(1000, dtype=np.uint8)
    layers = [
        LayerPages(
            group=0,
            address=int(memory.ctypes.data) + at,
            block_stride=200,
            itemsize=1,
            dimensions=(Dimension(name="C", size=size, stride=1),),
        )
        for at, size in ((0, 64), (100, 96))
    ]
    pieces = PieceMap(layers)
    assert (pieces.piece_bytes, len(pieces), pieces.payload_bytes) == (32, 5, 160)


def test_no_layers_are_no_map() -> None:
    with pytest.raises(InvalidArgument, match="no layer"):
        PieceMap([])


def test_a_ticket_that_waits_can_be_taken_back() -> None:
    view = cache("LBHNC")
    mover = PieceMover(PieceMap(layers_of(view)), TwinCopier())
    going, gate = threading.Event(), threading.Event()
    slots = np.zeros((1, 4096), dtype=np.uint8)
    address = np.array([slots.ctypes.data], dtype=np.uint64)
    page = np.array([[1]], dtype=np.int64)

    def hold() -> None:
        going.set()
        assert gate.wait(10)

    try:
        assert mover.submit(Ticket(Direction.STORE, page, address, hold, pytest.fail))
        assert going.wait(10)
        waiting = Ticket(Direction.STORE, page, address, pytest.fail, pytest.fail)
        assert mover.submit(waiting)
        assert mover.cancel(waiting)
        assert not mover.cancel(waiting)
        gate.set()
    finally:
        mover.close(5)
