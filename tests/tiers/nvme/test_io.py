"""Damage on the disk, and what the NVMe tier makes of it: never a wrong byte."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.moves import MoveStatus
from tests.tiers.harness import NVME, SLABS, SLOT_BYTES, STRIDE, Harness
from tiers.nvme import slab as slab_module
from tiers.nvme.carry import carry, carry_in_python, carry_in_turn
from tiers.nvme.disk import SystemDisk
from tiers.nvme.io import NvmeTier
from tiers.nvme.slab import Slab, SlabFile, list_slabs, open_slab
from tiers.nvme.trailer import Trailer, read_trailer, write_trailer

Call = Callable[[Slab, Sequence[memoryview], int], int]
Faulty = Callable[[Call, Slab, Sequence[memoryview], int], int]

SLOT = 6  # the slot that is damaged; 5 and 7 are its neighbours


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture(params=[carry, carry_in_turn, carry_in_python], ids=["best", "in turn", "python"])
def tier(harness: Harness, tmp_path: Path, notices: list[str], request: pytest.FixtureRequest) -> NvmeTier:
    made = NvmeTier(tmp_path, harness.memory, notify=notices.append, carry=request.param)
    made.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    return made


@pytest.fixture
def python_tier(harness: Harness, tmp_path: Path, notices: list[str]) -> NvmeTier:
    """Whose calls can be replaced."""
    made = NvmeTier(tmp_path, harness.memory, notify=notices.append, carry=carry_in_python)
    made.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    return made


def test_a_slab_that_cannot_be_opened_is_said_by_its_error_alone(
    harness: Harness, tmp_path: Path, notices: list[str]
) -> None:
    """The moves behind it said the same again, in worse words: a slot that the path does not have."""
    tier = NvmeTier(tmp_path / "gone", harness.memory, notify=notices.append)
    with pytest.raises(KvstoreError):
        tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    moves = harness.moves_for([0])
    assert tier.transfer(moves)["status"].tolist() == [MoveStatus.IO_ERROR]
    assert notices == []
    (tmp_path / "gone").mkdir()
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    assert tier.transfer(moves)["status"].tolist() == [MoveStatus.OK]
    tier.drop_slab(NVME)
    assert tier.transfer(moves)["status"].tolist() == [MoveStatus.IO_ERROR]
    assert len(notices) == 1, "a fault of ours is still said"
    tier.close()


def the_slab(directory: Path) -> Path:
    return directory / SlabFile(number=1, slot_bytes=SLOT_BYTES, nbytes=SLABS).name


def overwrite(directory: Path, offset: int, data: bytes) -> None:
    with the_slab(directory).open("r+b") as file:
        file.seek(offset)
        file.write(data)
        os.fsync(file.fileno())


def flip(directory: Path, offset: int) -> None:
    with the_slab(directory).open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    overwrite(directory, offset, bytes([byte ^ 0x10]))


def torn(directory: Path) -> None:
    """The second half of the payload is that of the block before."""
    overwrite(directory, SLOT * STRIDE + SLOT_BYTES // 2, bytes(SLOT_BYTES // 2))


def swapped(directory: Path) -> None:
    """The whole slot, trailer and all, holds what belongs to another slot (a misdirected write)."""
    with the_slab(directory).open("rb") as file:
        file.seek(5 * STRIDE)
        data = file.read(STRIDE)
    overwrite(directory, SLOT * STRIDE, data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "first payload bit": lambda directory: flip(directory, SLOT * STRIDE),
    "last payload bit": lambda directory: flip(directory, SLOT * STRIDE + SLOT_BYTES - 1),
    "torn write": torn,
    "zeroed trailer": lambda directory: overwrite(directory, SLOT * STRIDE + SLOT_BYTES, bytes(4096)),
    "zeroed slot": lambda directory: overwrite(directory, SLOT * STRIDE, bytes(STRIDE)),
    "misdirected write": swapped,
    **{
        f"trailer byte {at}": lambda directory, at=at: flip(directory, SLOT * STRIDE + SLOT_BYTES + at)  # type: ignore[misc]
        for at in range(0, 112, 7)
    },
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_block_is_corrupt_and_its_neighbours_are_served(
    tier: NvmeTier, harness: Harness, tmp_path: Path, notices: list[str], damage: Callable[[Path], None]
) -> None:
    """A block whose bytes had changed on the disk was served."""
    expected = [harness.fill(slot) for slot in (5, SLOT, 7)]
    tier.transfer(harness.moves_for([5, SLOT, 7]))
    damage(tmp_path)
    replies = tier.transfer(harness.moves_back([5, SLOT, 7]))
    assert replies["status"].tolist() == [MoveStatus.OK, MoveStatus.CORRUPT, MoveStatus.OK]
    assert np.array_equal(harness.bytes[5 + 32], expected[0])
    assert np.array_equal(harness.bytes[7 + 32], expected[2])
    assert len(notices) == 1


def test_a_slab_that_was_cut_short_loses_what_was_behind_and_serves_the_rest(
    tier: NvmeTier, harness: Harness, tmp_path: Path, notices: list[str]
) -> None:
    """Blocks behind the end of a slab counted as failures of the disk, and enough of them took the path out of use."""
    harness.fill(0)
    tier.transfer(harness.moves_for([0, 1, 2, 3]))
    os.truncate(the_slab(tmp_path), 2 * STRIDE + 4096)
    replies = tier.transfer(harness.moves_back([0, 1, 2, 3]))
    assert replies["status"].tolist() == [0, 0, MoveStatus.CORRUPT, MoveStatus.CORRUPT]
    assert [text for text in notices if "came short" in text]


def test_a_truncated_slab_is_whole_again_after_reopening_and_its_blocks_are_not(
    tier: NvmeTier, harness: Harness, tmp_path: Path
) -> None:
    tier.transfer(harness.moves_for([0, 1, 2, 3]))
    tier.close()
    os.truncate(the_slab(tmp_path), 2 * STRIDE + 4096)
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    corrupt = MoveStatus.CORRUPT
    assert tier.transfer(harness.moves_back([0, 1, 2, 3]))["status"].tolist() == [0, 0, corrupt, corrupt]
    assert tier.transfer(harness.moves_for([3]))["status"].tolist() == [MoveStatus.OK]
    assert the_slab(tmp_path).stat().st_size == SLABS


def ends_before(bad_slot: int, error: OSError | None) -> Faulty:
    """What goes through ends before the bad slot; a call that begins at it fails with `error`, or comes short."""

    def run(real: Call, slab: Slab, buffers: Sequence[memoryview], offset: int) -> int:
        good = max(0, bad_slot - offset // STRIDE) if offset // STRIDE <= bad_slot else len(buffers)
        if good == 0:
            if error is not None:
                raise error
            return 100
        return real(slab, buffers[: 2 * good], offset)

    return run


def fails_as_a_whole(bad_slot: int, error: OSError) -> Faulty:
    """Every call with the bad slot in it fails, as direct I/O does."""

    def run(real: Call, slab: Slab, buffers: Sequence[memoryview], offset: int) -> int:
        first = offset // STRIDE
        if first <= bad_slot < first + len(buffers) // 2:
            raise error
        return real(slab, buffers, offset)

    return run


EIO = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize(
    "faulty, said",
    [
        (ends_before(4, EIO), "Input/output error"),
        (fails_as_a_whole(4, EIO), "Input/output error"),
        (ends_before(4, None), "came short"),
    ],
    ids=["EIO", "whole", "short"],
)
def test_a_bad_sector_costs_its_own_block_only(
    python_tier: NvmeTier,
    harness: Harness,
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    faulty: Faulty,
    said: str,
) -> None:
    """One bad sector failed a whole batch, or every block before it in a call that failed as a whole."""
    if call == "read":
        python_tier.transfer(harness.moves_for(list(range(10))))
    real = getattr(Slab, call)
    monkeypatch.setattr(Slab, call, lambda slab, buffers, offset: faulty(real, slab, buffers, offset))
    moves = harness.moves_back if call == "read" else harness.moves_for
    for _ in range(3):
        replies = python_tier.transfer(moves(list(range(10))))
        assert replies["status"].tolist() == [0, 0, 0, 0, MoveStatus.IO_ERROR, 0, 0, 0, 0, 0]
    assert len(notices) == 1  # three times the same, said once
    assert said in notices[0]


def test_adjacent_slots_are_one_call(
    python_tier: NvmeTier, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = Slab.write

    def counted(slab: Slab, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(slab, buffers, offset)

    monkeypatch.setattr(Slab, "write", counted)
    python_tier.transfer(harness.write([9, 3, 4, 5, 20, 21], [12, 10, 11, 40, 41, 60]))
    assert sorted(calls) == [2, 4, 6]


def test_a_file_system_without_o_direct_is_used_and_said(
    harness: Harness, tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that refuses O_DIRECT the tier did not start."""
    real = os.open

    def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(SystemDisk, "open", staticmethod(refusing))
    tier = NvmeTier(tmp_path, harness.memory, notify=notices.append)
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    assert not tier.direct
    assert len(notices) == 1
    assert "refuses O_DIRECT" in notices[0]
    expected = harness.fill(0)
    tier.transfer(harness.moves_for([0]))
    tier.sync()
    assert tier.transfer(harness.moves_back([0]))["status"].tolist() == [MoveStatus.OK]
    assert np.array_equal(harness.bytes[32], expected)


def test_a_file_system_that_refuses_only_the_read_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "_reads_direct", lambda disk, fd: False)
    assert not open_slab(tmp_path, 1, SLABS, SLOT_BYTES).direct


def test_a_crash_while_a_slab_is_made_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "slab-3-16384.kv.new").write_bytes(bytes(4096))
    (tmp_path / "slab-x-1.kv").write_bytes(b"")
    slab = open_slab(tmp_path, 2, SLABS, SLOT_BYTES)
    slab.close()
    assert list_slabs(tmp_path) == [SlabFile(number=2, slot_bytes=SLOT_BYTES, nbytes=SLABS)]
    assert not (tmp_path / "slab-3-16384.kv.new").exists()


def test_slabs_are_private_and_allocated_in_full(tier: NvmeTier, tmp_path: Path) -> None:
    status = the_slab(tmp_path).stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= SLABS


@pytest.mark.parametrize(
    "nbytes, slot_bytes", [(SLABS, 100), (SLABS, 0), (SLABS + 1, SLOT_BYTES), (8192, 8192)]
)
def test_a_slab_that_cannot_be_is_refused(tmp_path: Path, nbytes: int, slot_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        open_slab(tmp_path, 1, nbytes, slot_bytes)


def test_a_failed_sync_is_tried_again(
    tier: NvmeTier, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an fdatasync that failed the next one said that all was well."""
    tier.transfer(harness.moves_for([0]))
    calls: list[int] = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SystemDisk, "fdatasync", staticmethod(fail))
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            tier.sync()
    monkeypatch.undo()
    tier.sync()
    assert len(calls) == 2


def test_a_sync_fails_where_a_slab_was_deleted(tier: NvmeTier, harness: Harness, tmp_path: Path) -> None:
    """The kernel syncs a file without a name as any other, and the tier passed that on as durable."""
    tier.transfer(harness.moves_for([0]))
    tier.sync()
    assert tier.deleted() == {}
    the_slab(tmp_path).unlink()
    for _ in range(2):  # also where nothing was written since
        with pytest.raises(OSError, match="was deleted"):
            tier.sync()
    assert tier.deleted() == {NVME: 1}
    tier.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    tier.sync()


def test_a_sync_that_meets_a_write_leaves_it_to_the_next(
    python_tier: NvmeTier, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that ran while another thread synced was taken as durable and was not."""
    real_write, real_sync = os.pwritev, os.fdatasync
    synced: list[int] = []

    def write_after_a_sync(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        python_tier.sync()
        return real_write(fd, buffers, offset)

    def counted(fd: int) -> None:
        synced.append(fd)
        real_sync(fd)

    monkeypatch.setattr(SystemDisk, "pwritev", staticmethod(write_after_a_sync))
    monkeypatch.setattr(SystemDisk, "fdatasync", staticmethod(counted))
    python_tier.transfer(harness.moves_for([0]))
    before = len(synced)
    python_tier.sync()
    assert len(synced) == before + 1
    python_tier.sync()
    assert len(synced) == before + 1


def test_a_drop_does_not_wait_for_a_sync(
    tier: NvmeTier, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab was dropped only after a running fdatasync, and the mover's reading thread stood still until then."""
    tier.transfer(harness.moves_for([0]))
    began, go_on = threading.Event(), threading.Event()
    descriptors: list[int] = []

    def slow(fd: int) -> None:
        began.set()
        assert go_on.wait(20)
        os.fstat(fd)  # still ours: nobody closed it under the sync
        descriptors.append(fd)

    monkeypatch.setattr(SystemDisk, "fdatasync", staticmethod(slow))
    with ThreadPoolExecutor(2) as pool:
        sync = pool.submit(tier.sync)
        assert began.wait(20)
        pool.submit(tier.drop_slab, NVME).result(20)
        assert not sync.done()
        assert not the_slab(tmp_path).exists()
        go_on.set()
        sync.result(20)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    tier.open_slab(NVME, 2, SLABS, SLOT_BYTES)


def test_a_sync_ends_after_one_that_was_under_way(
    tier: NvmeTier, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second sync beside one that had not ended would have said that all was on the medium."""
    tier.transfer(harness.moves_for([0]))
    began, go_on = threading.Event(), threading.Event()

    def slow(_fd: int) -> None:
        began.set()
        assert go_on.wait(20)

    monkeypatch.setattr(SystemDisk, "fdatasync", staticmethod(slow))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tier.sync)
        assert began.wait(20)
        second = pool.submit(tier.sync)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        go_on.set()
        first.result(20)
        second.result(20)


def test_a_trailer_of_another_version_is_none() -> None:
    page = memoryview(bytearray(4096))
    trailer = Trailer(1, 0, SLOT_BYTES, 3, 4, b"h" * 16, b"p" * 16, b"n" * 16, b"c" * 16)
    write_trailer(page, trailer)
    assert read_trailer(page) == trailer
    page[8] += 1
    assert read_trailer(page) is None
    assert read_trailer(memoryview(bytes(4096))) is None


def test_a_sync_covers_what_an_earlier_mover_wrote(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush was answered after a new mover's sync, which did nothing for slabs that a killed one had written to."""
    first = NvmeTier(tmp_path, harness.memory)
    first.open_slab(NVME, 1, SLABS, SLOT_BYTES)
    first.transfer(harness.moves_for([0]))
    first.close()
    synced: list[str] = []

    def counted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(SystemDisk, "fdatasync", staticmethod(counted))
    second = NvmeTier(tmp_path, harness.memory)
    second.sync()
    second.sync()
    assert synced == [the_slab(tmp_path).name]
