"""Copies with checksums: every form is the checksum of storage, and copies the block and nothing else."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import xxhash

from engine_adapter.copying import summed
from engine_adapter.copying.summed import checksums_at, copy_summed, copy_summed_in_python

SIZES = (241, 1000, 1023, 1024, 1025, 4096, 65536, 65536 + 100, 1 << 20)
FORMS = ("plain", "avx2", "avx2 lines", "avx512", "avx512 lines")


def block_of(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def xxh3(block: np.ndarray) -> bytes:
    return xxhash.xxh3_128_intdigest(block.tobytes()).to_bytes(16, "little")


class Room:
    """A target at a chosen distance from a line's start, with guards on both sides."""

    def __init__(self, nbytes: int, offset: int) -> None:
        self._memory = np.full(nbytes + 256, 0xA5, dtype=np.uint8)
        self._begin = -self._memory.ctypes.data % 64 + 64 + offset
        self.address = self._memory.ctypes.data + self._begin
        self.block = self._memory[self._begin : self._begin + nbytes]

    def guards_are_whole(self) -> bool:
        outside = np.concatenate((self._memory[: self._begin], self._memory[self._begin + len(self.block) :]))
        return bool((outside == 0xA5).all())


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 8])
def test_both_copy_the_block_and_say_the_checksum_of_storage(nbytes: int, offset: int) -> None:
    block = block_of(nbytes, nbytes)
    for copy in (copy_summed, copy_summed_in_python):
        room = Room(nbytes, offset)
        sums = copy(
            np.array([room.address], dtype=np.uint64),
            np.array([block.ctypes.data], dtype=np.uint64),
            nbytes,
        )
        assert sums.tobytes() == xxh3(block)
        assert (room.block == block).all()
        assert room.guards_are_whole()


@pytest.mark.skipif(summed._copy is None, reason="built without a C compiler")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_each_form_is_the_same_checksum(form: str, nbytes: int) -> None:
    block = block_of(nbytes, 1)
    for offset in (0, 8):
        room = Room(nbytes, offset)
        sums = np.zeros((1, 2), dtype=np.uint64)
        targets, sources = (np.array([at], dtype=np.uint64) for at in (room.address, block.ctypes.data))
        try:
            summed._copy(targets, sources, nbytes, sums, form)
        except ValueError as error:
            pytest.skip(f"{form}: {error}")
        assert sums.tobytes() == xxh3(block)
        assert (room.block == block).all()
        assert room.guards_are_whole()


def test_a_batch_says_the_checksum_of_each_block_in_its_place() -> None:
    nbytes = 8192
    blocks = block_of(3 * nbytes, 2).reshape(3, nbytes)
    targets = np.zeros_like(blocks)
    order = np.array([2, 0, 1])
    sums = copy_summed(
        (targets.ctypes.data + order * nbytes).astype(np.uint64),
        (blocks.ctypes.data + np.arange(3) * nbytes).astype(np.uint64),
        nbytes,
    )
    assert [row.tobytes() for row in sums] == [xxh3(block) for block in blocks]
    assert (targets[order] == blocks).all()
    at = (targets.ctypes.data + order * nbytes).astype(np.uint64)
    assert (checksums_at(at, nbytes) == sums).all()


@pytest.mark.skipif(summed._copy is None, reason="built without a C compiler")
def test_arrays_that_do_not_fit_together_are_refused() -> None:
    two, one = np.zeros(2, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    for arguments in (
        (two, one, 4096, np.zeros((2, 2), dtype=np.uint64)),
        (two, two, 4096, one),
        (two, two, 64, two),
    ):
        with pytest.raises(ValueError, match="as many targets"):
            summed._copy(*arguments)


def test_one_changed_byte_is_another_checksum() -> None:
    block = block_of(65536, 3)
    at = np.array([block.ctypes.data], dtype=np.uint64)
    before = checksums_at(at, 65536)
    for position in (0, 4095, 65535):
        ctypes.memset(block.ctypes.data + position, int(block[position]) ^ 1, 1)
        assert (checksums_at(at, 65536) != before).any()
        ctypes.memset(block.ctypes.data + position, int(block[position]) ^ 1, 1)
    assert (checksums_at(at, 65536) == before).all()
