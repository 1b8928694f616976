"""The compiled mover of bytes and its twin in Python: the same bytes on the disk, the same answers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.moves import MoveKind, MoveStatus
from tests.tiers.harness import SLABS, SLOT_BYTES, STRIDE, Harness, opened
from tiers.nvme.carry import (
    IS_COMPILED,
    MAX_RUN_SLOTS,
    NO_MEMORY,
    NO_SLOT,
    SHORT,
    Carried,
    Carry,
    carry,
    carry_in_python,
    carry_in_turn,
)
from tiers.nvme.slab import Slab, open_slab
from tiers.nvme.trailer import TRAILER_BYTES

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="there is no C compiler here: only the twin is in use"
)

BOTH = pytest.mark.parametrize(
    "writer, reader",
    [(carry, carry_in_python), (carry_in_python, carry), (carry_in_turn, carry)],
    ids=["queued", "python", "in turn"],
)
EACH_WAY = pytest.mark.parametrize(
    "how", [carry, carry_in_turn, carry_in_python], ids=["queued", "in turn", "python"]
)
NOW_MS = 1_700_000_000_000


@pytest.fixture
def slab(tmp_path: Path) -> Slab:
    made = open_slab(tmp_path, 1, SLABS, SLOT_BYTES)
    if made.descriptor is None:
        pytest.skip("this file system has no O_DIRECT, so the twin is in use")
    return made


@pytest.fixture
def pages() -> memoryview:
    return memoryview(mmap.mmap(-1, MAX_RUN_SLOTS * TRAILER_BYTES))


def run(how: Carry, slab: Slab, harness: Harness, moves: NDArray[np.void], pages: memoryview) -> Carried:
    carried = how(slab, moves, harness.memory, pages, NOW_MS)
    assert carried is not None, "it is one piece"
    assert carried.failed == (carried.replies["status"] != 0).sum()
    return carried


@pytest.mark.parametrize("how", ["avx512 lines", "avx512", "avx2 lines", "avx2", "plain"])
def test_the_checksum_is_that_of_the_package(how: str) -> None:
    """On every kind of processor: blocks that another machine, or the twin, has written must be read."""
    from kvstore._slab_io import checksum

    payload = np.random.default_rng(5).integers(0, 256, 70_000, dtype=np.uint8)
    try:
        checksum(payload.data, how)
    except ValueError as error:
        pytest.skip(f"{how}: {error}")

    @given(
        st.integers(241, 69_000) | st.sampled_from([1024, 1025, 1088, 4096, 16384, 65536]),
        st.integers(0, 999),
    )
    def equal(nbytes: int, shift: int) -> None:
        data = payload[shift : shift + nbytes].data
        assert checksum(data, how) == xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")

    equal()
    assert checksum(payload.data) == checksum(payload.data, how)


@BOTH
def test_what_one_writes_the_other_reads(
    slab: Slab, harness: Harness, pages: memoryview, writer: Carry, reader: Carry
) -> None:
    slots = [0, 1, 2, 5, 9, 10]
    expected = [harness.fill(slot) for slot in slots]
    written = run(writer, slab, harness, harness.moves_for(slots), pages)
    assert slab.dirty
    slab.sync()
    read = run(reader, slab, harness, harness.moves_back(slots), pages)
    assert not slab.dirty, "only what is written has to be synced"
    for carried in (written, read):
        assert not carried.replies["status"].any()
        assert not carried.faults.any()
    assert np.array_equal(written.replies["checksum"], read.replies["checksum"])
    for slot, payload in zip(slots, expected, strict=True):
        assert np.array_equal(harness.bytes[slot + 32], payload)


def test_both_write_the_same_bytes(tmp_path: Path, slab: Slab, harness: Harness, pages: memoryview) -> None:
    slots = [3, 4, 8]
    for slot in slots:
        harness.fill(slot)
    moves = harness.moves_for(slots)
    files = []
    for how in (carry, carry_in_turn, carry_in_python):
        pages[:] = bytes(len(pages))
        replies = run(how, slab, harness, moves, pages).replies
        slab.sync()
        files.append(((tmp_path / slab.file.name).read_bytes(), replies.tobytes()))
    assert files[0] == files[1] == files[2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_judge_damage_alike(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any bytes anywhere in three slots, other identities asked for: the same verdict of both, and never a wrong OK."""
    folder = tmp_path_factory.mktemp("slab")
    slab = open_slab(folder, 1, SLABS, SLOT_BYTES)
    pages = memoryview(mmap.mmap(-1, MAX_RUN_SLOTS * TRAILER_BYTES))
    with opened() as harness:
        expected = [harness.fill(slot) for slot in range(3)]
        run(carry, slab, harness, harness.moves_for([0, 1, 2]), pages)
        slab.sync()
        at = data.draw(st.integers(0, 3 * STRIDE - 1) | st.integers(SLOT_BYTES, SLOT_BYTES + 120), label="at")
        damage = data.draw(st.binary(min_size=1, max_size=40), label="damage")
        with (folder / slab.file.name).open("r+b") as file:
            file.seek(at)
            file.write(damage)
            os.fsync(file.fileno())
        moves = harness.moves_back([0, 1, 2])
        field = data.draw(st.sampled_from(["", "hash", "ns_digest", "generation"]), label="asked otherwise")
        if field:
            moves[field][1] = 77
        verdicts = []
        for how in (carry, carry_in_turn, carry_in_python):
            harness.bytes[32:35] = 0
            replies = run(how, slab, harness, moves, pages).replies
            verdicts.append(replies.tobytes())
            for slot, status in enumerate(replies["status"].tolist()):
                if status == MoveStatus.OK:
                    assert np.array_equal(harness.bytes[32 + slot], expected[slot])
            if field:
                assert replies["status"][1] == MoveStatus.CORRUPT
        assert verdicts[0] == verdicts[1] == verdicts[2]
    slab.close()


@EACH_WAY
def test_a_file_that_ends_early_costs_what_is_behind_its_end(
    tmp_path: Path, slab: Slab, harness: Harness, pages: memoryview, how: Carry
) -> None:
    run(how, slab, harness, harness.moves_for([0, 1, 2, 3]), pages)
    os.truncate(tmp_path / slab.file.name, 2 * STRIDE + 4096)
    carried = run(how, slab, harness, harness.moves_back([0, 1, 2, 3]), pages)
    assert carried.replies["status"].tolist() == [0, 0, MoveStatus.IO_ERROR, MoveStatus.IO_ERROR]
    assert carried.faults.tolist() == [0, 0, SHORT, SHORT]
    assert not carried.replies["checksum"][2:].any()


@EACH_WAY
def test_a_call_that_fails_says_why_of_each_slot(
    slab: Slab, harness: Harness, pages: memoryview, how: Carry
) -> None:
    """EFAULT for one payload of four: a real call that fails, or ends early, for a slot in its middle."""
    moves = harness.moves_for([0, 1, 2, 3])
    run(how, slab, harness, moves, pages)
    back = harness.moves_back([0, 1, 2, 3])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = int(harness.memory.addresses(back["dram_extent"][2:3], back["dram_offset"][2:3])[0])
    assert libc.mprotect(address, SLOT_BYTES, mmap.PROT_READ) == 0
    try:
        carried = run(how, slab, harness, back, pages)
    finally:
        libc.mprotect(address, SLOT_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
    assert carried.replies["status"].tolist() == [0, 0, MoveStatus.IO_ERROR, 0]
    assert carried.faults[2] in (errno.EFAULT, SHORT)


@EACH_WAY
@pytest.mark.parametrize(
    "field, value, fault",
    [
        ("dram_extent", 9, NO_MEMORY),
        ("dram_extent", 65535, NO_MEMORY),
        ("dram_offset", 64 * SLOT_BYTES - 1, NO_MEMORY),
        ("dram_offset", (1 << 64) - 1, NO_MEMORY),
        ("nvme_offset", 3 * STRIDE + 4096, NO_SLOT),
        ("nvme_offset", SLABS // STRIDE * STRIDE, NO_SLOT),
        ("nvme_offset", ((1 << 64) - 1) // STRIDE * STRIDE, NO_SLOT),
    ],
)
def test_what_is_not_there_is_refused_by_itself(
    slab: Slab, harness: Harness, pages: memoryview, how: Carry, field: str, value: int, fault: int
) -> None:
    """One move of a piece that named what is not there took its neighbours with it."""
    moves = harness.moves_for([0, 1, 2, 3])
    moves[field][3] = value
    for kind in (MoveKind.WRITE, MoveKind.READ):
        moves["kind"] = kind
        carried = run(how, slab, harness, moves, pages)
        assert carried.replies["status"].tolist() == [0, 0, 0, MoveStatus.IO_ERROR]
        assert carried.faults.tolist() == [0, 0, 0, fault]


@EACH_WAY
def test_every_other_move_of_an_array_is_carried(
    slab: Slab, harness: Harness, pages: memoryview, how: Carry
) -> None:
    assert run(how, slab, harness, harness.moves_for([0, 1, 2, 3])[::2], pages).failed == 0


@EACH_WAY
def test_what_is_no_piece_is_left_alone(slab: Slab, harness: Harness, pages: memoryview, how: Carry) -> None:
    mixed = np.concatenate((harness.moves_for([0]), harness.moves_back([1])))
    elsewhere = harness.moves_for([0, 1])
    elsewhere["nvme_extent"][1] = 3
    for moves in (mixed, elsewhere, harness.moves_for([1, 0])):
        assert how(slab, moves, harness.memory, pages, NOW_MS) is None
    assert not slab.dirty


def test_records_that_do_not_fit_each_other_are_refused(
    slab: Slab, harness: Harness, pages: memoryview
) -> None:
    from kvstore._slab_io import transfer

    moves = harness.moves_for([0, 1])
    spans = harness.memory.spans()
    fd = slab.descriptor
    assert fd is not None

    def call(
        replies: int = 64, faults: int = 2, scratch: memoryview = pages, slot_bytes: int = SLOT_BYTES
    ) -> int:
        made = np.zeros(replies, dtype=np.uint8), np.zeros(faults, dtype=np.int32)
        return transfer(fd, 8, slot_bytes, moves, spans.bases, spans.sizes, scratch, 0, *made, 0)

    assert call() == 0
    for wrong in ({"replies": 32}, {"faults": 3}, {"scratch": pages[:4095]}, {"slot_bytes": 240}):
        with pytest.raises(ValueError, match="as many"):
            call(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="read-write"):
        call(scratch=memoryview(bytes(4096)))
