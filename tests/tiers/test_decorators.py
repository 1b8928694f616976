"""What each decorator adds; that it keeps the contract is tests/tiers/test_storage_contract.py."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import NvmeThrottle
from kvstore.moves import MoveKind, MoveStatus
from tests.tiers.harness import NVME, SLABS, SLOT_BYTES, Harness
from tiers.decorators import FaultyStorage, MeasuredStorage, StorageCounts, ThrottledStorage
from tiers.memory import MemoryStorage
from tiers.nvme.io import NvmeTier


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 1.0
        self.now_s += seconds


@pytest.fixture
def inner(harness: Harness) -> MemoryStorage:
    made = MemoryStorage(harness.memory, capacity_bytes=SLABS)
    made.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    return made


def test_throttle_holds_writes_to_the_rate_and_reads_not(inner: MemoryStorage, harness: Harness) -> None:
    clock = Clock()
    throttled = ThrottledStorage(
        inner, limits=NvmeThrottle(write_bytes_per_s=SLOT_BYTES), clock=clock, sleep=clock.sleep
    )
    for slot in range(11):
        throttled.transfer(harness.moves_for([slot]))
    assert clock.now_s == pytest.approx(110.9)
    throttled.transfer(harness.moves_back(list(range(11))))
    assert clock.now_s == pytest.approx(110.9)


def test_a_throttled_disk_that_is_asked_now_and_then_is_slow_each_time(
    inner: MemoryStorage, harness: Harness
) -> None:
    """After a pause a second's worth came at once, and all of a call that was larger than that."""
    clock = Clock()
    throttled = ThrottledStorage(
        inner, limits=NvmeThrottle(write_bytes_per_s=SLOT_BYTES), clock=clock, sleep=clock.sleep
    )
    for slot in range(3):
        began = clock.now_s
        throttled.transfer(harness.moves_for([slot]))
        assert clock.now_s - began == pytest.approx(0.9)
        clock.now_s += 30.0
    began = clock.now_s
    throttled.transfer(harness.moves_for([3, 4, 5]))
    assert clock.now_s - began == pytest.approx(2.9)


def test_throttle_lets_a_write_larger_than_a_seconds_rate_through(
    inner: MemoryStorage, harness: Harness
) -> None:
    """A block larger than one second of the rate waited for ever."""
    clock = Clock()
    throttled = ThrottledStorage(
        inner, limits=NvmeThrottle(write_bytes_per_s=SLOT_BYTES // 4), clock=clock, sleep=clock.sleep
    )
    for slot in range(3):
        assert throttled.transfer(harness.moves_for([slot]))["status"].tolist() == [MoveStatus.OK]
    assert clock.now_s == pytest.approx(111.9)


def test_throttle_holds_reads_to_their_own_rate(inner: MemoryStorage, harness: Harness) -> None:
    """Reads were never held back, so nothing could leave the disk to others."""
    clock = Clock()
    limits = NvmeThrottle(read_bytes_per_s=SLOT_BYTES)
    throttled = ThrottledStorage(inner, limits=limits, clock=clock, sleep=clock.sleep)
    throttled.transfer(harness.moves_for(list(range(11))))
    assert clock.now_s == 100.0
    for slot in range(11):
        throttled.transfer(harness.moves_back([slot]))
    assert clock.now_s == pytest.approx(110.9)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_throttle_counts_the_calls_of_the_disk(harness: Harness, tmp_path: Path, kind: str) -> None:
    clock = Clock()
    inner = NvmeTier(tmp_path, harness.memory)
    inner.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    limits = NvmeThrottle(**{f"{kind}_operations_per_s": 2})
    throttled = ThrottledStorage(inner, limits=limits, clock=clock, sleep=clock.sleep)
    moves = harness.moves_for if kind == "write" else harness.moves_back
    throttled.transfer(moves(list(range(16))))  # side by side: one call
    throttled.transfer(moves([0, 4, 8]))  # three, since they lie apart
    throttled.transfer(moves([0]))
    assert clock.now_s == pytest.approx(102.4)  # five, of which 0.2 were there at the start
    inner.close()


def test_counts_are_of_what_went_through(inner: MemoryStorage, harness: Harness) -> None:
    clock = Clock()

    def first_two_fail(moves: NDArray[np.void]) -> NDArray[np.uint32]:
        clock.now_s += 0.25
        return np.where(moves["nvme_slot"] < 2, MoveStatus.IO_ERROR, MoveStatus.OK).astype(np.uint32)

    measured = MeasuredStorage(FaultyStorage(inner, decide=first_two_fail), clock=clock)
    measured.transfer(harness.moves_for([0, 1, 2, 3, 4]))
    measured.transfer(np.concatenate([harness.moves_back([3, 4]), harness.read([5], [30])]))
    measured.sync()
    assert measured.counts() == StorageCounts(
        read_blocks=2,
        read_bytes=2 * SLOT_BYTES,
        written_blocks=3,
        written_bytes=3 * SLOT_BYTES,
        corrupt_blocks=1,
        failed_blocks=2,
        syncs=1,
        busy_s=0.5,
    )


def test_counts_are_right_however_long_nobody_asks(inner: MemoryStorage, harness: Harness) -> None:
    measured = MeasuredStorage(inner, clock=Clock())
    for _ in range(150):
        measured.transfer(harness.moves_for([0, 1]))
    assert (measured.counts().written_blocks, measured.counts().written_bytes) == (300, 300 * SLOT_BYTES)


def test_faults_leave_the_tier_untouched(inner: MemoryStorage, harness: Harness) -> None:
    def fail(moves: NDArray[np.void]) -> NDArray[np.uint32]:
        return np.full(len(moves), MoveStatus.IO_ERROR, dtype=np.uint32)

    def no_sync() -> None:
        raise OSError(errno.EIO, "Input/output error")

    faulty = FaultyStorage(inner, decide=fail, before_sync=no_sync)
    assert faulty.transfer(harness.moves_for([0]))["status"].tolist() == [MoveStatus.IO_ERROR]
    assert inner.transfer(harness.moves_back([0]))["status"].tolist() == [MoveStatus.CORRUPT]
    with pytest.raises(OSError, match="Input/output"):
        faulty.sync()


def test_a_large_call_has_its_turn_among_small_ones(harness: Harness) -> None:
    """Small calls took each token as it came, and a large one waited until there were none any more."""
    rate = 20_000
    limits = NvmeThrottle(read_bytes_per_s=rate)
    inner = MemoryStorage(harness.memory, capacity_bytes=SLABS)
    storage = ThrottledStorage(inner, limits=limits, clock=time.monotonic, sleep=time.sleep)
    bucket = storage._bytes[MoveKind.READ]
    storage._wait(bucket, rate)  # what has gathered is gone
    began, ended = threading.Event(), threading.Event()

    def large_call() -> None:
        began.set()
        storage._wait(bucket, rate // 4)
        ended.set()

    large = threading.Thread(target=large_call)
    large.start()
    began.wait()
    small_calls = 0
    while (
        not ended.is_set() and small_calls < 400
    ):  # two seconds' worth, eight times as much as the large one
        storage._wait(bucket, rate // 200)
        small_calls += 1
    large.join()
    assert small_calls < 400
