"""Slots larger than a call, and more calls than may be under way: the queue, one call after the other, and Python."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.moves import MoveKind, MoveStatus
from kvstore.wire.packed import MOVE
from tests.support.daemon import wait_for
from tiers.dram import DramTier
from tiers.nvme.carry import (
    IS_COMPILED,
    MAX_RUN_SLOTS,
    SHORT,
    Carried,
    Carry,
    carry,
    carry_in_python,
    carry_in_turn,
    is_queued,
)
from tiers.nvme.slab import Slab, open_slab, stride_bytes
from tiers.nvme.trailer import TRAILER_BYTES

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="there is no C compiler here: only the twin is in use"
)

MIB = 1 << 20
LARGE = 9 * MIB + 4096  # three parts, the last of which is more than a page
SMALL = 64 << 10
WAYS = {"queued": carry, "in turn": carry_in_turn, "python": carry_in_python}
EACH_WAY = pytest.mark.parametrize("how", list(WAYS.values()), ids=list(WAYS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """Random blocks in DRAM, as many places to read them into, and a slab of as many slots."""

    slab: Slab
    memory: DramTier
    blocks: NDArray[np.uint8]  # [2 * count, slot bytes]
    path: Path

    @property
    def count(self) -> int:
        return len(self.blocks) // 2

    def run(
        self, how: Carry, kind: MoveKind, checksums: NDArray[np.uint64] | None = None, *, unread: bool = False
    ) -> Carried:
        """Every block of the first half to its slot, or every slot to its block in the second half."""
        slot_bytes = self.slab.file.slot_bytes
        at = np.arange(self.count, dtype=np.uint64)
        moves = np.zeros(self.count, dtype=MOVE)
        moves["id"], moves["kind"], moves["length"], moves["generation"] = (
            at + np.uint64(1),
            kind,
            slot_bytes,
            1,
        )
        moves["nvme_offset"] = at * np.uint64(stride_bytes(slot_bytes))
        places = at if kind is MoveKind.WRITE else at + np.uint64(self.count)
        moves["dram_offset"] = places * np.uint64(slot_bytes)
        moves["hash"] = np.stack([at, at], axis=1)
        moves["unread"] = unread
        if checksums is not None:
            moves["checksum"] = checksums
        pages = memoryview(mmap.mmap(-1, MAX_RUN_SLOTS * TRAILER_BYTES))
        carried = how(self.slab, moves, self.memory, pages, 1_700_000_000_000)
        assert carried is not None, "it is one piece"
        return carried

    def address(self, block: int, offset: int) -> int:
        return self.memory.address(0) + block * self.slab.file.slot_bytes + offset

    def right(self) -> list[bool]:
        """Of each block, whether the second half has it."""
        return [np.array_equal(self.blocks[i], self.blocks[self.count + i]) for i in range(self.count)]


def rigged(folder: Path, slot_bytes: int, count: int) -> Iterator[Rig]:
    slab = open_slab(folder, 1, count * stride_bytes(slot_bytes), slot_bytes)
    if slab.descriptor is None:
        pytest.skip("this file system has no O_DIRECT, so the twin is in use")
    memory = DramTier()
    memory.create(0, 2 * count * slot_bytes)
    blocks = np.frombuffer(memory.view(0), dtype=np.uint8).reshape(2 * count, slot_bytes)
    blocks[:count] = np.random.default_rng(7).integers(0, 256, (count, slot_bytes), dtype=np.uint8)
    yield Rig(slab=slab, memory=memory, blocks=blocks, path=folder / slab.file.name)
    memory.close()
    slab.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Rig]:
    yield from rigged(tmp_path, LARGE, 2)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Rig]:
    yield from rigged(tmp_path, SMALL, 400)


@pytest.mark.parametrize(
    "writer, reader", list(itertools.product(WAYS.values(), WAYS.values())), ids=lambda how: how.__name__
)
def test_a_slot_in_parts_is_what_one_in_one_call_is(large: Rig, writer: Carry, reader: Carry) -> None:
    written = large.run(writer, MoveKind.WRITE)
    read = large.run(reader, MoveKind.READ)
    assert not written.failed
    assert not read.failed
    assert np.array_equal(written.replies["checksum"], read.replies["checksum"])
    assert large.right() == [True, True]


@EACH_WAY
def test_more_calls_than_may_be_under_way_all_arrive(
    small: Rig, how: Carry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 slots of 64 KiB: 26 MiB, of which 9 may be under way."""
    monkeypatch.setattr("tiers.nvme.carry._WINDOW_BYTES", 9 * MIB)
    assert not small.run(how, MoveKind.WRITE).failed
    carried = small.run(how, MoveKind.READ)
    assert not carried.failed
    assert carried.replies["id"].tolist() == list(range(1, small.count + 1))
    assert all(small.right())


@EACH_WAY
@pytest.mark.parametrize("at", [5, 4 * MIB - 1, 4 * MIB, 9 * MIB, LARGE - 1, LARGE + 20])
def test_damage_in_any_part_is_seen(large: Rig, how: Carry, at: int) -> None:
    large.run(carry, MoveKind.WRITE)
    with large.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))
        os.fsync(file.fileno())
    carried = large.run(how, MoveKind.READ)
    assert carried.replies["status"].tolist() == [MoveStatus.CORRUPT, MoveStatus.OK]
    assert large.right()[1]


@EACH_WAY
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_fails_costs_its_own_block(large: Rig, how: Carry, part: int) -> None:
    """EFAULT in one part: the slot is tried again as a whole, fails again, and its neighbour arrives."""
    large.run(carry, MoveKind.WRITE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = large.address(large.count, 4 * MIB * part + 8192)
    assert libc.mprotect(begin, 4096, mmap.PROT_READ) == 0
    try:
        carried = large.run(how, MoveKind.READ)
    finally:
        assert libc.mprotect(begin, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert carried.replies["status"].tolist() == [MoveStatus.IO_ERROR, MoveStatus.OK]
    assert carried.faults[0] in (errno.EFAULT, SHORT)
    assert large.right()[1]


@EACH_WAY
def test_a_slot_whose_end_is_cut_off_comes_short(large: Rig, how: Carry) -> None:
    large.run(carry, MoveKind.WRITE)
    os.truncate(large.path, stride_bytes(LARGE) + 5 * MIB)
    carried = large.run(how, MoveKind.READ)
    assert carried.replies["status"].tolist() == [MoveStatus.OK, MoveStatus.IO_ERROR]
    assert carried.faults.tolist() == [0, SHORT]


def test_a_write_that_the_file_refuses_says_why(large: Rig) -> None:
    """EBADF: the parts of a write fail in the queue, and again by themselves."""
    descriptor = os.open(large.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    read_only = Slab(descriptor, large.slab.file, direct=True)
    rig = Rig(slab=read_only, memory=large.memory, blocks=large.blocks, path=large.path)
    for how in (carry, carry_in_turn):
        carried = rig.run(how, MoveKind.WRITE)
        assert carried.replies["status"].tolist() == [MoveStatus.IO_ERROR] * 2
        assert carried.faults.tolist() == [errno.EBADF] * 2
    read_only.close()


def test_a_threads_queue_ends_with_it(small: Rig) -> None:
    """The kernel has 65,536 of them in all by default."""

    def queues() -> int:
        return sum(
            "[aio]" in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        )

    before = queues()
    during = []

    def work() -> None:
        small.run(carry, MoveKind.WRITE)
        during.append(queues())

    for _ in range(8):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if not max(during):
        pytest.skip("this kernel gives no queue, so calls were made one after the other")
    wait_for(
        "no queue more than before", lambda: queues() <= before
    )  # who is joined has still to leave the kernel


def test_a_file_in_memory_is_not_queued(tmp_path: Path) -> None:
    """There the kernel comes back when the read has ended: more threads are what helps."""
    with mmap.mmap(-1, 4 * MIB) as data, memoryview(data) as view:
        fd = os.memfd_create("data")
        os.truncate(fd, len(data))
        assert not is_queued(fd, view)
        os.close(fd)


@EACH_WAY
@pytest.mark.parametrize("rig", ["large", "small"])
def test_what_is_unread_bears_and_says_the_checksum_of_who_stored_it(
    rig: str, how: Carry, request: pytest.FixtureRequest
) -> None:
    """In parts, too, where a checksum is otherwise put together: neither way looks at a byte of the payload."""
    made: Rig = request.getfixturevalue(rig)
    right = made.run(how, MoveKind.WRITE).replies["checksum"].copy()
    given = right + np.arange(made.count, dtype=np.uint64)[:, None]  # of the first block alone it is right
    written = made.run(how, MoveKind.WRITE, given, unread=True)
    assert written.failed == 0
    assert np.array_equal(written.replies["checksum"], given)
    unread = made.run(how, MoveKind.READ, unread=True)
    assert unread.failed == 0
    assert np.array_equal(unread.replies["checksum"], given)
    assert all(made.right())
    looked_at = made.run(how, MoveKind.READ)
    wrong = [MoveStatus.CORRUPT] * (made.count - 1)
    assert looked_at.replies["status"].tolist() == [MoveStatus.OK, *wrong]
    assert np.array_equal(looked_at.replies["checksum"], right)
