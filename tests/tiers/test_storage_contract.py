"""The contract of StorageTier, run by every implementation, bare and decorated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import NvmeThrottle
from kvstore.errors import NotFound, ResourceExhausted
from kvstore.moves import MoveStatus
from tests.tiers.harness import DRAM, NVME, SLABS, SLOT_BYTES, STRIDE, Harness
from tiers.base import StorageTier
from tiers.decorators import FaultyStorage, MeasuredStorage, ThrottledStorage
from tiers.memory import MemoryStorage
from tiers.nvme.io import NvmeTier

Open = Callable[[], StorageTier]


def _nothing_fails(moves: NDArray[np.void]) -> NDArray[np.uint32]:
    return np.zeros(len(moves), dtype=np.uint32)


@pytest.fixture(params=["memory", "nvme", "nvme-buffered", "measured", "throttled", "faulty"])
def storage(request: pytest.FixtureRequest, harness: Harness, tmp_path: Path) -> Iterator[StorageTier]:
    made: StorageTier
    match request.param:
        case "memory":
            made = MemoryStorage(harness.memory, capacity_bytes=2 * SLABS)
        case "nvme-buffered":
            made = NvmeTier(tmp_path, harness.memory, direct=False)
        case _:
            made = NvmeTier(tmp_path, harness.memory)
    match request.param:
        case "measured":
            made = MeasuredStorage(made, clock=lambda: 0.0)
        case "throttled":
            made = ThrottledStorage(
                made,
                limits=NvmeThrottle(read_bytes_per_s=1 << 40, write_bytes_per_s=1 << 40),
                clock=lambda: 0.0,
                sleep=lambda seconds: None,
            )
        case "faulty":
            made = FaultyStorage(made, decide=_nothing_fails)
    made.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    yield made
    made.close()


def statuses(replies: NDArray[np.void]) -> dict[int, int]:
    """Status by move."""
    return dict(zip(replies["id"].tolist(), replies["status"].tolist(), strict=True))


def test_what_is_written_is_read(storage: StorageTier, harness: Harness) -> None:
    slots = [5, 1, 9, 2, 40]
    expected = [harness.fill(slot) for slot in slots]
    written = storage.transfer(harness.write(slots, [10, 11, 12, 3, 77]))
    assert set(written["status"].tolist()) == {MoveStatus.OK}
    back = harness.read([20, 21, 22, 23, 24], [10, 11, 12, 3, 77])
    replies = storage.transfer(back)
    assert statuses(replies) == dict.fromkeys(back["id"].tolist(), MoveStatus.OK)
    for slot, payload in zip(range(20, 25), expected, strict=True):
        assert np.array_equal(harness.bytes[slot], payload)


def test_checksum_of_a_write_is_that_of_its_read(storage: StorageTier, harness: Harness) -> None:
    harness.fill(0)
    written = storage.transfer(harness.write([0], [4]))
    read = storage.transfer(harness.read([1], [4]))
    assert written["checksum"].any()
    assert np.array_equal(written["checksum"], read["checksum"])


def test_an_unread_write_bears_the_checksum_that_it_was_given(storage: StorageTier, harness: Harness) -> None:
    """Nobody looks at its bytes: what differs from its checksum is found by who reads it, or loads it."""
    harness.fill(0)
    right = storage.transfer(harness.write([0], [3]))["checksum"]
    for checksum, status in ((right, MoveStatus.OK), (right + np.uint64(1), MoveStatus.CORRUPT)):
        write = harness.write([0], [4])
        write["unread"], write["checksum"] = 1, checksum
        written = storage.transfer(write)
        assert written["status"].tolist() == [MoveStatus.OK]
        assert np.array_equal(written["checksum"], checksum)
        assert storage.transfer(harness.read([1], [4]))["status"].tolist() == [status]


def test_an_unread_read_says_what_its_bytes_should_be(storage: StorageTier, harness: Harness) -> None:
    payload = harness.fill(0)
    storage.transfer(harness.write([0, 0], [4, 5]))
    unread = harness.read([1, 2], [4, 5])
    unread["unread"] = 1
    replies = storage.transfer(unread)
    assert replies["status"].tolist() == [MoveStatus.OK] * 2
    assert np.array_equal(replies["checksum"], storage.transfer(harness.read([3, 4], [4, 5]))["checksum"])
    assert np.array_equal(harness.bytes[1], payload)
    wrong = harness.write([0], [6])
    wrong["unread"], wrong["checksum"] = 1, (1, 2)
    storage.transfer(wrong)
    unread = harness.read([1], [6])
    unread["unread"] = 1
    replies = storage.transfer(unread)
    assert replies["status"].tolist() == [MoveStatus.OK], "whoever loads it compares"
    assert replies["checksum"].tolist() == [[1, 2]]


@pytest.mark.parametrize("field", ["hash", "ns_digest", "generation"])
def test_another_block_is_corrupt_also_unread(storage: StorageTier, harness: Harness, field: str) -> None:
    harness.fill(0)
    storage.transfer(harness.write([0], [6]))
    other = harness.read([1, 2], [6, 50])
    other["unread"] = 1
    other[field] += 1
    assert storage.transfer(other)["status"].tolist() == [MoveStatus.CORRUPT] * 2


def test_neighbours_are_left_alone(storage: StorageTier, harness: Harness) -> None:
    before, after = harness.fill(0), harness.fill(2)
    harness.fill(1)
    storage.transfer(harness.write([0, 1, 2], [0, 1, 2]))
    harness.fill(1)
    storage.transfer(harness.write([1], [1], generation=2))
    storage.transfer(harness.read([10, 12], [0, 2]))
    assert np.array_equal(harness.bytes[10], before)
    assert np.array_equal(harness.bytes[12], after)


@pytest.mark.parametrize("field", ["hash", "ns_digest", "generation"])
def test_another_block_in_the_slot_is_corrupt(storage: StorageTier, harness: Harness, field: str) -> None:
    """A slot that was given to another block since was served as the one that used to be there."""
    harness.fill(0)
    storage.transfer(harness.write([0], [6]))
    other = harness.read([1], [6])
    other[field] += 1
    assert storage.transfer(other)["status"].tolist() == [MoveStatus.CORRUPT]


def test_a_slot_never_written_is_corrupt(storage: StorageTier, harness: Harness) -> None:
    assert storage.transfer(harness.read([1], [50]))["status"].tolist() == [MoveStatus.CORRUPT]


@pytest.mark.parametrize(
    "change",
    [
        {"nvme_offset": SLABS},
        {"nvme_offset": SLABS // STRIDE * STRIDE},
        {"nvme_offset": 2**63},
        {"nvme_offset": 4096},
        {"nvme_extent": NVME + 1},
        {"dram_extent": DRAM + 1},
        {"dram_offset": 64 * SLOT_BYTES},
        {"dram_offset": 64 * SLOT_BYTES - 4096},
        {"length": 2 * SLOT_BYTES},
    ],
    ids=lambda change: "-".join(f"{name}={value}" for name, value in change.items()),
)
def test_a_move_out_of_bounds_is_refused(
    storage: StorageTier, harness: Harness, change: dict[str, int]
) -> None:
    """A number out of range went to the disk or to memory unchecked."""
    for move in (harness.write([0], [0]), harness.read([0], [0])):
        for name, value in change.items():
            move[name] = value
        assert storage.transfer(move)["status"].tolist() == [MoveStatus.IO_ERROR]


def test_pieces_lose_nothing(storage: StorageTier, harness: Harness) -> None:
    moves = np.concatenate(
        [harness.write(list(range(30)), list(range(100, 130))), harness.read([40, 41], [150, 7])]
    )
    harness.rng.shuffle(moves)
    pieces = storage.pieces(moves)
    assert sorted(np.concatenate(pieces)["id"].tolist()) == sorted(moves["id"].tolist())
    assert all(len(set(piece["kind"].tolist())) == 1 for piece in pieces)
    assert list(storage.pieces(moves[:0])) == []
    assert len(storage.transfer(moves[:0])) == 0


def test_blocks_survive_reopening_under_another_extent(storage: StorageTier, harness: Harness) -> None:
    expected = harness.fill(0)
    storage.transfer(harness.write([0], [8]))
    storage.sync()
    storage.close()
    storage.open_slab(NVME + 4, 1, SLABS, SLOT_BYTES)
    move = harness.read([1], [8])
    move["nvme_extent"] = NVME + 4
    assert storage.transfer(move)["status"].tolist() == [MoveStatus.OK]
    assert np.array_equal(harness.bytes[1], expected)


def test_a_dropped_slab_is_gone(storage: StorageTier, harness: Harness) -> None:
    harness.fill(0)
    storage.transfer(harness.write([0], [0]))
    storage.drop_slab(NVME)
    assert storage.transfer(harness.read([1], [0]))["status"].tolist() == [MoveStatus.IO_ERROR]
    with pytest.raises(NotFound):
        storage.drop_slab(NVME)
    storage.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    assert storage.transfer(harness.read([1], [0]))["status"].tolist() == [MoveStatus.CORRUPT]


def test_threads_may_transfer_together(storage: StorageTier, harness: Harness) -> None:
    expected = {slot: harness.fill(slot) for slot in range(32)}
    failures: list[int] = []

    def run(first: int) -> None:
        slots = list(range(first, first + 8))
        write = harness.moves_for(slots)
        read = harness.moves_back(slots)
        for _ in range(10):
            for moves in (write, read):
                failures.extend(status for status in storage.transfer(moves)["status"].tolist() if status)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(0, 32, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for slot, payload in expected.items():
        assert np.array_equal(harness.bytes[slot + 32], payload)


def test_a_slab_without_room_is_one_clear_error(storage: StorageTier) -> None:
    with pytest.raises(ResourceExhausted, match="no space"):
        storage.open_slab(NVME + 1, 2, 1 << 50, SLOT_BYTES)
