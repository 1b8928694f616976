"""The twin's copier: order, priority, bounds, completion, and its speed beside a plain memcpy."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.copier import CopyBatch, Direction, TwinCopier

BLOCK_BYTES = 64 * 1024


@pytest.fixture
def copier() -> Iterator[TwinCopier]:
    copier = TwinCopier(max_blocks=8)
    yield copier
    copier.close()


def addresses(blocks: NDArray[np.uint8]) -> NDArray[np.uint64]:
    step = blocks.strides[0]
    return np.arange(len(blocks), dtype=np.uint64) * np.uint64(step) + np.uint64(blocks.ctypes.data)


def batch(
    direction: Direction,
    sources: NDArray[np.uint8],
    targets: NDArray[np.uint8],
    done: Callable[[], None],
) -> CopyBatch:
    return CopyBatch(
        direction=direction,
        sources=addresses(sources),
        targets=addresses(targets),
        nbytes=sources.shape[1],
        done=done,
    )


def blocks(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(count, BLOCK_BYTES), dtype=np.uint8)


class Gate:
    """A batch whose completion holds the copier until it is opened."""

    def __init__(self, copier: TwinCopier) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        source, target = blocks(1), np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
        self._keep = (source, target)
        copier.submit(batch(Direction.LOAD, source, target, self._wait))
        assert self.reached.wait(5)

    def _wait(self) -> None:
        self.reached.set()
        assert self._open.wait(5)

    def open(self) -> None:
        self._open.set()


def test_bytes_arrive_before_the_completion(copier: TwinCopier) -> None:
    """A block was announced when its copy had been issued, not when it had ended: readers saw half of it."""
    source, target = blocks(5), np.zeros((5, BLOCK_BYTES), dtype=np.uint8)
    equal: list[bool] = []
    done = threading.Event()

    def completed() -> None:
        equal.append(bool((source == target).all()))
        done.set()

    assert copier.submit(batch(Direction.STORE, source, target, completed))
    assert done.wait(5)
    assert equal == [True]


def test_loads_overtake_stores_and_each_direction_keeps_its_order(copier: TwinCopier) -> None:
    gate = Gate(copier)
    source, target = blocks(4), np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    order: list[str] = []
    done = threading.Event()

    def note(name: str) -> Callable[[], None]:
        return lambda: (order.append(name), done.set() if len(order) == 4 else None)[0]

    for i, (direction, name) in enumerate(
        [(Direction.STORE, "s0"), (Direction.STORE, "s1"), (Direction.LOAD, "l0"), (Direction.LOAD, "l1")]
    ):
        assert copier.submit(batch(direction, source[i : i + 1], target[i : i + 1], note(name)))
    gate.open()
    assert done.wait(5)
    assert order == ["l0", "l1", "s0", "s1"]
    assert (source == target).all()


def test_what_is_under_way_is_bounded(copier: TwinCopier) -> None:
    gate = Gate(copier)
    source, target = blocks(8), np.zeros((8, BLOCK_BYTES), dtype=np.uint8)
    assert copier.submit(batch(Direction.STORE, source, target, lambda: None))
    assert not copier.submit(batch(Direction.STORE, source[:1], target[:1], lambda: None))
    gate.open()
    deadline = time.monotonic() + 5
    while copier.stats().waiting_blocks and time.monotonic() < deadline:
        time.sleep(0.001)
    assert copier.stats().stored_blocks == 8
    assert copier.submit(batch(Direction.STORE, source[:1], target[:1], lambda: None))
    copier.close()  # before the arrays go


def test_a_batch_larger_than_the_bound_is_taken_alone() -> None:
    copier = TwinCopier(max_blocks=2)
    source, target = blocks(5), np.zeros((5, BLOCK_BYTES), dtype=np.uint8)
    done = threading.Event()
    assert copier.submit(batch(Direction.LOAD, source, target, done.set))
    assert done.wait(5)
    copier.close()
    assert (source == target).all()


def test_close_finishes_what_was_taken() -> None:
    copier = TwinCopier()
    source, target = blocks(6), np.zeros((6, BLOCK_BYTES), dtype=np.uint8)
    ended: list[int] = []
    for i in range(6):
        assert copier.submit(
            batch(Direction.STORE, source[i : i + 1], target[i : i + 1], lambda i=i: ended.append(i))
        )
    copier.close()
    assert ended == list(range(6))
    assert (source == target).all()
    assert not copier.submit(batch(Direction.STORE, source, target, lambda: None))


def test_a_completion_that_fails_does_not_end_the_copier(
    copier: TwinCopier, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = blocks(2), np.zeros((2, BLOCK_BYTES), dtype=np.uint8)
    done = threading.Event()

    def fail() -> None:
        raise ValueError("a bug of the caller")

    copier.submit(batch(Direction.STORE, source[:1], target[:1], fail))
    copier.submit(batch(Direction.STORE, source[1:], target[1:], done.set))
    assert done.wait(5)
    assert "a completion failed" in caplog.text


def test_the_copier_adds_little_to_a_plain_memcpy() -> None:
    """At least three quarters here, where other work shares the machine; `kvstore bench store` demands 90 %."""
    count, nbytes = 32, 1 << 20
    source = np.ones((count, nbytes), dtype=np.uint8)
    target = np.zeros((count, nbytes), dtype=np.uint8)
    from_, to = addresses(source).tolist(), addresses(target).tolist()
    copier = TwinCopier()
    ratios = []
    for _ in range(7):
        begin = time.perf_counter()
        for i in range(count):
            ctypes.memmove(to[i], from_[i], nbytes)
        plain = time.perf_counter() - begin
        done = threading.Event()
        begin = time.perf_counter()
        copier.submit(batch(Direction.STORE, source, target, done.set))
        assert done.wait(30)
        ratios.append(plain / (time.perf_counter() - begin))
    copier.close()
    assert max(ratios) >= 0.75
